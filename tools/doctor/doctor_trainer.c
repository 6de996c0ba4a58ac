/* SPDX-License-Identifier: Apache-2.0 */
#include "doctor/doctor.h"

#include "fetch/output.h"
#include "fetch/target.h"
#include "ucx.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct rank_bits {
    uint8_t bytes[TARGET_MAX_RANKS / 8];
} rank_bits;

/* What some rank has committed, and which ones have. */
typedef struct publication {
    char *name;
    rank_bits *ranks;
} publication;

typedef struct asking {
    const doctor_facts *facts;
    doctor_ranks *ranks;
    publication *all;
    size_t count, capacity;
    rank_bits answered, publish; /**< anything */
} asking;

static bool has_bit(const rank_bits *bits, unsigned rank)
{
    return bits != NULL && (bits->bytes[rank / 8] >> rank % 8 & 1) != 0;
}

static void set_bit(rank_bits *bits, unsigned rank)
{
    bits->bytes[rank / 8] |= (uint8_t)(1u << rank % 8);
}

static publication *doctor_find(asking *a, const char *name)
{
    for (size_t i = 0; i < a->count; i++)
        if (strcmp(a->all[i].name, name) == 0)
            return &a->all[i];
    return NULL;
}

static void doctor_note(asking *a, const fanin_publication_info *info)
{
    publication *p = doctor_find(a, info->name);
    if (p == NULL) {
        a->all = output_room(a->all, a->count, &a->capacity, sizeof a->all[0]);
        p = &a->all[a->count++];
        *p = (publication){output_require(strdup(info->name)),
                           output_require(calloc(1, sizeof *p->ranks))};
    }
    set_bit(p->ranks, info->rank);
    set_bit(&a->publish, info->rank);
}

static bool doctor_on_publication(void *cookie, const fanin_publication_info *info)
{
    asking *a = cookie;
    doctor_ranks *r = a->ranks;
    bool draining = info->state == FANIN_PUBLICATION_DRAINING;
    if (info->rank < TARGET_MAX_RANKS && info->catalog_version > 0)
        doctor_note(a, info);
    if ((!draining && info->state != FANIN_PUBLICATION_WRITING) ||
        info->state_age_ms < DOCTOR_STUCK_MS)
        return true;
    r->stuck++;
    if (info->state_age_ms > r->stuck_ms) {
        r->stuck_ms = info->state_age_ms;
        r->stuck_rank = info->rank;
        snprintf(r->stuck_name, sizeof r->stuck_name, "%s", info->name);
        snprintf(r->stuck_state, sizeof r->stuck_state, "%s",
                 draining ? "draining" : "writing");
    }
    return true;
}

static bool is_loopback(const char *address)
{
    return strncmp(address, "127.", 4) == 0 || strncmp(address, "[::1]", 5) == 0 ||
           strncmp(address, "localhost", 9) == 0;
}

static void doctor_compare(asking *a, const fanin_rank_info *info)
{
    doctor_ranks *r = a->ranks;
    char here[64];
    if (info->rank >= 0 && info->rank < TARGET_MAX_RANKS)
        set_bit(&a->answered, (unsigned)info->rank);
    r->answered++;
    if (r->software[0] == '\0') {
        snprintf(r->software, sizeof r->software, "%s", info->software);
        snprintf(r->ucx_version, sizeof r->ucx_version, "%s", info->ucx_version);
    }
    snprintf(here, sizeof here, "fanin %s", fanin_version());
    if (r->software_rank < 0 && strcmp(here, info->software) != 0) {
        r->software_rank = info->rank;
        snprintf(r->other_software, sizeof r->other_software, "%s", info->software);
    }
    if (r->ucx_rank < 0 && a->facts->ucx_found &&
        !ucx_versions_match(a->facts->ucx_version, info->ucx_version)) {
        r->ucx_rank = info->rank;
        snprintf(r->other_ucx, sizeof r->other_ucx, "%s", info->ucx_version);
    }
}

static bool doctor_on_rank(void *cookie, const fanin_rank_info *info)
{
    asking *a = cookie;
    doctor_ranks *r = a->ranks;
    r->addresses++;
    r->is_local = r->is_local && is_loopback(info->address);
    if (info->status == FANIN_OK) {
        doctor_compare(a, info);
    } else if (info->silent) {
        if (r->silent++ == 0)
            snprintf(r->silent_address, sizeof r->silent_address, "%s", info->address);
    } else if (info->status == FANIN_ERR_AUTH) {
        if (r->barred++ == 0)
            snprintf(r->barred_why, sizeof r->barred_why, "%s", info->message);
    } else if (info->status == FANIN_ERR_PROTOCOL) {
        if (r->foreign++ == 0)
            snprintf(r->foreign_why, sizeof r->foreign_why, "%s", info->message);
    } else if (info->status == FANIN_ERR_VERSION) {
        if (r->others++ == 0)
            snprintf(r->others_why, sizeof r->others_why, "%s", info->message);
    } else if (r->refused++ == 0) {
        snprintf(r->refused_address, sizeof r->refused_address, "%s", info->address);
    }
    return true;
}

/* How many ranks that answer are not among @p ranks, which may be NULL; the first of them. */
static unsigned count_lacking(const asking *a, const rank_bits *ranks,
                              unsigned *first_out)
{
    unsigned count = 0;
    for (unsigned rank = 0; rank < TARGET_MAX_RANKS; rank++)
        if (has_bit(&a->answered, rank) && !has_bit(ranks, rank) && count++ == 0)
            *first_out = rank;
    return count;
}

/* The run that is wanted, else the first that some lack: whether all that answer publish it. */
static void compare_publications(asking *a, const char *wanted)
{
    doctor_ranks *r = a->ranks;
    r->empty = count_lacking(a, &a->publish, &r->empty_rank);
    if (wanted[0] != '\0') {
        const publication *p = doctor_find(a, wanted);
        snprintf(r->run, sizeof r->run, "%s", wanted);
        r->lacking = count_lacking(a, p != NULL ? p->ranks : NULL, &r->lacking_rank);
        return;
    }
    for (size_t i = 0; i < a->count; i++) {
        unsigned first = 0, lacking = count_lacking(a, a->all[i].ranks, &first);
        if (lacking > 0 && r->lacking == 0) {
            snprintf(r->run, sizeof r->run, "%s", a->all[i].name);
            r->lacking = lacking;
            r->lacking_rank = first;
        }
        r->is_one_whole = r->is_one_whole || lacking == 0;
    }
}

fanin_status doctor_ask(fanin_client *client, const doctor_facts *facts,
                        const char *publication, uint32_t timeout_ms, doctor_ranks *out,
                        fanin_error *error)
{
    *out = (doctor_ranks){.ucx_rank = -1, .software_rank = -1, .is_local = true};
    asking a = {.facts = facts, .ranks = out};
    fanin_status status =
        fanin_client_list(client, timeout_ms, doctor_on_publication, &a, error);
    fanin_status seen = fanin_client_ranks(client, doctor_on_rank, &a, NULL);
    if (status == FANIN_OK) /* else nobody's are known */
        compare_publications(&a, publication);
    for (size_t i = 0; i < a.count; i++) {
        free(a.all[i].name);
        free(a.all[i].ranks);
    }
    free(a.all);
    return status != FANIN_OK ? status : seen;
}

static void judge_strangers(const doctor_ranks *r, doctor_report *report)
{
    if (r->foreign > 0)
        doctor_add(report, DOCTOR_PROBLEM, "trainer",
                   "check the addresses and their ports",
                   "another program listens at %u of %u addresses: %s", r->foreign,
                   r->addresses, r->foreign_why);
    if (r->others > 0)
        doctor_add(report, DOCTOR_PROBLEM, "trainer",
                   "install one version of fanin in trainer and worker",
                   "%u of %u ranks are of another release: %s", r->others, r->addresses,
                   r->others_why);
}

static void judge_reach(const doctor_ranks *r, doctor_report *report)
{
    if (r->answered == r->addresses)
        doctor_add(report, DOCTOR_GOOD, "trainer", NULL, "all %u ranks answer, %s",
                   r->addresses, r->software);
    if (r->silent > 0)
        doctor_add(
            report, DOCTOR_PROBLEM, "trainer",
            r->is_local
                ? "is the trainer process stopped (kill -CONT), or held in a debugger?"
                : "is the trainer process stopped? Otherwise open base_port to "
                  "base_port + world size - 1 in the firewall or security group; "
                  "behind NAT use host networking",
            "%u of %u ranks do not answer (the first is %s): %sthe trainer is stopped",
            r->silent, r->addresses, r->silent_address,
            r->is_local ? "" : "packets are dropped on the way, or ");
    if (r->barred > 0)
        doctor_add(report, DOCTOR_PROBLEM, "trainer",
                   "all ranks of a launch, and its readers, need the same secret "
                   "(--secret-file) or certificates of one job (--tls-cert, --tls-key, "
                   "--tls-ca), and ranks the same networks to allow",
                   "%u of %u ranks do not admit this reader, or are not believed: %s",
                   r->barred, r->addresses, r->barred_why);
    if (r->refused > 0)
        doctor_add(
            report, DOCTOR_PROBLEM, "trainer",
            "start the ranks; a trainer that is to be reached from another host must "
            "be "
            "open (bind, allow)",
            "%u of %u ranks refuse the connection or are unreachable (the first is %s)",
            r->refused, r->addresses, r->refused_address);
    judge_strangers(r, report);
}

/* Of ranks that publish something each. */
static void judge_run(const doctor_ranks *r, doctor_report *report)
{
    if (r->lacking > 0 && r->lacking == r->answered)
        doctor_add(
            report, DOCTOR_PROBLEM, "trainer",
            "check the run's name (--run): nixl-fetch list tells those there are",
            "no rank publishes %s, they publish other runs", r->run);
    else if (r->lacking > 0)
        doctor_add(report, r->is_one_whole ? DOCTOR_WARNING : DOCTOR_PROBLEM, "trainer",
                   "all ranks of a launch publish the same runs: look at that rank",
                   "rank %u does not publish %s, others do (%u of %u ranks): nobody "
                   "can pull it",
                   r->lacking_rank, r->run, r->lacking, r->answered);
}

static void judge_publications(const doctor_ranks *r, doctor_report *report)
{
    if (r->stuck > 0)
        doctor_add(report, DOCTOR_PROBLEM, "trainer",
                   "look at that rank: an update that began must end in a commit or an "
                   "abort, on every rank",
                   "rank %u has been %s %s for %" PRIu64
                   " s%s: no reader gets it meanwhile",
                   r->stuck_rank, r->stuck_state, r->stuck_name, r->stuck_ms / 1000,
                   r->stuck > 1 ? ", and others are stuck as well" : "");
    if (r->empty > 0 && r->empty == r->answered)
        doctor_add(report, DOCTOR_WARNING, "trainer",
                   "a trainer publishes with its first commit: has it made one?",
                   "nothing is published: none of the %u ranks that answer has "
                   "committed anything",
                   r->answered);
    else if (r->empty > 0)
        doctor_add(report, DOCTOR_PROBLEM, "trainer",
                   "all ranks of a launch publish the same runs: look at that rank",
                   "rank %u publishes nothing, others do (%u of %u ranks)",
                   r->empty_rank, r->empty, r->answered);
    else
        judge_run(r, report);
}

void doctor_judge_ranks(const doctor_facts *facts, const doctor_ranks *ranks,
                        doctor_report *report)
{
    judge_reach(ranks, report);
    judge_publications(ranks, report);
    if (ranks->software_rank >= 0)
        doctor_add(report, DOCTOR_NOTE, "versions",
                   "install one version of fanin in trainer and worker",
                   "rank %d runs %s, this is fanin %s", ranks->software_rank,
                   ranks->other_software, fanin_version());
    bool open = !ranks->is_local && ranks->other_ucx[0] == '\0';
    if (ranks->ucx_rank >= 0 && open)
        doctor_add(
            report, DOCTOR_NOTE, "paths",
            "serve with the flag for a trusted network if its peers may be given "
            "RDMA, and if UCX is installed there",
            "rank %d offers no path through UCX, as open servers do: stream",
            ranks->ucx_rank);
    else if (ranks->ucx_rank >= 0)
        doctor_add(report, ranks->is_local ? DOCTOR_NOTE : DOCTOR_WARNING, "versions",
                   "install the same major.minor version of UCX on both ends",
                   "rank %d has UCX %s, this host %s: no path through UCX between them",
                   ranks->ucx_rank, ranks->other_ucx[0] ? ranks->other_ucx : "none",
                   facts->ucx_version);
}
