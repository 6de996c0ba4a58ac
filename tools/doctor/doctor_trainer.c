/* SPDX-License-Identifier: Apache-2.0 */
#include "doctor/doctor.h"

#include "ucx.h"

#include <stdio.h>
#include <string.h>

typedef struct asking {
    const doctor_facts *facts;
    doctor_ranks *ranks;
} asking;

static bool is_loopback(const char *address)
{
    return strncmp(address, "127.", 4) == 0 || strncmp(address, "[::1]", 5) == 0 ||
           strncmp(address, "localhost", 9) == 0;
}

static void doctor_compare(const asking *a, const fanin_rank_info *info)
{
    doctor_ranks *r = a->ranks;
    char here[64];
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

static bool doctor_on_rank(void *cookie, const fanin_rank_info *info, uint64_t rtt_ns)
{
    (void)rtt_ns;
    const asking *a = cookie;
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

fanin_status doctor_ask(fanin_client *client, const doctor_facts *facts,
                        uint32_t timeout_ms, doctor_ranks *out, fanin_error *error)
{
    *out = (doctor_ranks){.ucx_rank = -1, .software_rank = -1, .is_local = true};
    asking a = {.facts = facts, .ranks = out};
    return fanin_client_ping(client, timeout_ms, doctor_on_rank, &a, error);
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
        doctor_add(report, DOCTOR_GOOD, "trainer", NULL,
                   "all %u ranks answer, %s; 'nixl-fetch status' tells of their runs",
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

void doctor_judge_ranks(const doctor_facts *facts, const doctor_ranks *ranks,
                        doctor_report *report)
{
    judge_reach(ranks, report);
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
