/* SPDX-License-Identifier: Apache-2.0 */
#include "fetch/look.h"
#include "fetch/missing.h"
#include "counters.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct gathering {
    const session *session;
    look *out;
} gathering;

static void take_holders(const fanin_rank_stats *s, const char *publication,
                         look_rank *r)
{
    for (size_t i = 0; i < s->n_holders && r->n_holders < LOOK_HOLDERS; i++) {
        const fanin_lease_holder *h = s->holders[i];
        if (strcmp(h->publication, publication) == 0) {
            look_holder *to = &r->holders[r->n_holders++];
            snprintf(to->who, sizeof to->who, "%s", h->who);
            to->age_ms = h->age_ms;
        }
    }
}

/* Who has got less of its step, or is at an older one, is slower. */
static int by_what_is_there(const void *a, const void *b)
{
    const fanin_told_relay *x = &((const look_relay *)a)->told;
    const fanin_told_relay *y = &((const look_relay *)b)->told;
    uint64_t mine = x->step != y->step ? x->step : x->landed;
    uint64_t other = x->step != y->step ? y->step : y->landed;
    return (mine > other) - (mine < other);
}

static void take_relays(const fanin_rank_stats *s, const char *publication,
                        look_rank *r)
{
    for (size_t i = 0; i < s->n_told_relays && r->n_relays < LOOK_RELAYS; i++) {
        const fanin_told_relay *told = s->told_relays[i];
        if (strcmp(told->publication, publication) != 0)
            continue;
        if (r->relays == NULL)
            r->relays = output_require(calloc(LOOK_RELAYS, sizeof *r->relays));
        look_relay *to = &r->relays[r->n_relays++];
        to->told = *told;
        to->told.publication = to->told.address = to->told.place = NULL;
        snprintf(to->address, sizeof to->address, "%s", told->address);
        snprintf(to->place, sizeof to->place, "%s", told->place);
    }
    if (r->n_relays > 0)
        qsort(r->relays, r->n_relays, sizeof *r->relays, by_what_is_there);
}

static void look_take_stats(const fanin_rank_stats *s, const char *publication,
                            look_rank *r)
{
    r->stats = *s;
    r->stats.entries = NULL;
    r->stats.holders = NULL;
    r->stats.told_relays = NULL;
    for (size_t i = 0; i < s->n_entries; i++) {
        const fanin_publication_stats *e = s->entries[i];
        if (strcmp(e->name, publication) == 0) {
            r->there = true;
            r->is = *e;
            r->is.name = r->is.reason = NULL;
            snprintf(r->reason, sizeof r->reason, "%s", e->reason);
        }
    }
    take_holders(s, publication, r);
    take_relays(s, publication, r);
}

static bool look_on_rank(void *cookie, const fanin_rank_info *info,
                         const fanin_rank_stats *stats)
{
    gathering *g = cookie;
    look *l = g->out;
    if (l->count == l->asked)
        return false;
    look_rank *r = &l->ranks[l->count];
    r->at.rank = missing_number(g->session, info, l->count++);
    r->at.silent = info->silent;
    r->at.status = stats != NULL              ? FANIN_OK
                   : info->status != FANIN_OK ? info->status
                                              : FANIN_ERR_UNREACHABLE;
    snprintf(r->at.address, sizeof r->at.address, "%s", info->address);
    if (stats == NULL) {
        snprintf(r->at.message, sizeof r->at.message, "%s", missing_why(info));
    } else {
        look_take_stats(stats, g->session->publication, r);
        l->newest = r->is.step > l->newest ? r->is.step : l->newest;
    }
    return true;
}

/* If only one of several ranks is not known, it is the one that is left. */
static void look_name_last(look *l)
{
    look_rank *unknown = NULL;
    int64_t left = (int64_t)l->count * (l->count - 1) / 2;
    uint32_t nobody = 0;
    for (uint32_t i = 0; i < l->count; i++) {
        look_rank *r = &l->ranks[i];
        nobody += r->at.rank < 0;
        unknown = r->at.rank < 0 ? r : unknown;
        left -= r->at.rank < 0 ? 0 : r->at.rank;
    }
    if (nobody == 1 && l->count > 1 && left >= 0 && left < l->count)
        unknown->at.rank = (int32_t)left;
}

fanin_status look_take(const session *s, uint32_t timeout_ms, look *out,
                       fanin_error *error)
{
    gathering g = {.session = s, .out = out};
    *out = (look){.asked = s->target.count};
    out->ranks = output_require(calloc(out->asked, sizeof *out->ranks));
    fanin_status status = fanin_client_stats(s->client, s->publication, timeout_ms,
                                             look_on_rank, &g, error);
    look_name_last(out);
    int group = -status / 100;
    bool own = status == FANIN_ERR_CANCELLED || status == FANIN_ERR_WORLD ||
               group == 1 || group >= 5;
    return own || out->count == 0 ? status : FANIN_OK;
}

bool look_answered(const look_rank *r)
{
    return r->at.status == FANIN_OK;
}

void look_free(look *l)
{
    for (uint32_t i = 0; l->ranks != NULL && i < l->count; i++)
        free(l->ranks[i].relays);
    free(l->ranks);
    *l = (look){0};
}

static bool is_of_site(const look_relay *one, const look_relay *other)
{
    size_t site = strcspn(one->place, "/");
    return site == strcspn(other->place, "/") &&
           memcmp(one->place, other->place, site) == 0;
}

/* That engines which the ranks name are in. */
static unsigned count_sites(const look *l)
{
    const look_relay *found[LOOK_RELAYS];
    unsigned n = 0;
    for (uint32_t i = 0; i < l->count; i++) {
        for (size_t k = 0; k < l->ranks[i].n_relays; k++) {
            const look_relay *r = &l->ranks[i].relays[k];
            unsigned at = 0;
            while (at < n && !is_of_site(found[at], r))
                at++;
            if (at == n && n < LOOK_RELAYS)
                found[n++] = r;
        }
    }
    return n;
}

static output_text look_relays(const look *l)
{
    output_text text = {""};
    char sites[32] = "";
    unsigned n = count_sites(l);
    if (n > 1)
        snprintf(sites, sizeof sites, " in %u sites", n);
    uint64_t relays = 0, bytes = 0, left = 0;
    for (uint32_t i = 0; i < l->count; i++) {
        relays += l->ranks[i].stats.relays;
        bytes += l->ranks[i].is.bytes;
        left += l->ranks[i].is.bytes_left;
    }
    if (relays > 0 && bytes > 0)
        snprintf(text.s, sizeof text.s, ", %" PRIu64 " relays%s, %.2f models left",
                 relays, sites, (double)left / (double)bytes);
    return text;
}

char *look_summary(const session *s, const look *l, const problems *p)
{
    char *text;
    uint32_t there = 0;
    for (uint32_t i = 0; i < l->count; i++)
        there += look_answered(&l->ranks[i]);
    if (asprintf(&text, "%s: step %" PRIu64 ", %u of %u ranks answer%s%s",
                 s->publication, l->newest, there, l->asked, look_relays(l).s,
                 p->count == 0 ? ", nothing is wrong" : "") < 0)
        output_require(NULL);
    return text;
}

/* The bound of drain_waits[i + 1], that of [i] being bound; of the first 100 us. */
static uint64_t look_drain_bound_after(size_t i, uint64_t bound)
{
    return i % 2 == 0 ? bound * 3 : bound / 3 * 10;
}

uint64_t look_drain_ns(const fanin_rank_stats *s, unsigned percent)
{
    uint64_t all = 0, seen = 0, bound = 100000;
    for (size_t i = 0; i < FANIN_DRAIN_BUCKETS; i++)
        all += s->drain_waits[i];
    for (size_t i = 0; i < FANIN_DRAIN_BUCKETS && all > 0; i++) {
        seen += s->drain_waits[i];
        if ((double)seen * 100 >= (double)all * percent)
            break;
        bound = look_drain_bound_after(i, bound);
    }
    return all == 0 ? 0 : bound < s->drain_wait_ns_max ? bound : s->drain_wait_ns_max;
}

/* ----------------------------------------------------------------- for programs */

static json_t *drain_waits_json(const fanin_rank_stats *s)
{
    json_t *list = json_array();
    uint64_t bound = 100000;
    for (size_t i = 0; i < FANIN_DRAIN_BUCKETS; i++) {
        bool last = i + 1 == FANIN_DRAIN_BUCKETS;
        json_array_append_new(
            list, output_object("bound_ns", last ? json_null() : output_u64(bound),
                                "updates", output_u64(s->drain_waits[i]), NULL));
        bound = look_drain_bound_after(i, bound);
    }
    return list;
}

static json_t *relays_json(const look_rank *r)
{
    json_t *list = json_array();
    for (size_t i = 0; i < r->n_relays; i++) {
        const look_relay *one = &r->relays[i];
        const fanin_told_relay *told = &one->told;
        json_array_append_new(
            list,
            output_object(
                "address", output_string(one->address), "place",
                output_string(one->place), "step", output_u64(told->step), "units",
                output_u64(told->units), "landed", output_u64(told->landed),
                "bytes_origin", output_u64(told->bytes_origin), "bytes_relays",
                output_u64(told->bytes_relays), "bytes_handed_on",
                output_u64(told->bytes_handed_on), "late", output_u64(told->late),
                "taken_over", output_u64(told->taken_over), NULL));
    }
    return list;
}

/* What a rank counts. */
static void add_counts(json_t *o, const look_rank *r)
{
    const fanin_rank_stats *s = &r->stats;
    const uint64_t plain =
        s->bytes_streamed > s->bytes_tls ? s->bytes_streamed - s->bytes_tls : 0;
    json_t *holders = json_array();
    json_t *read = output_object(
        "stream", output_u64(plain), "tls", output_u64(s->bytes_tls), "cma",
        output_u64(s->bytes_cma), "rdma", output_u64(s->bytes_rdma), "cuda_ipc",
        output_u64(s->bytes_cuda_ipc), NULL);
    for (size_t i = 0; i < r->n_holders; i++)
        json_array_append_new(
            holders, output_object("who", output_string(r->holders[i].who), "age_ns",
                                   output_age_ns(r->holders[i].age_ms), NULL));
#define ADD(key, name, ...) json_object_set_new(o, #name, output_u64(s->name));
    COUNTERS(ADD, COUNTER_NOT_SHOWN, ADD)
#undef ADD
    output_set(o, "told_relays", relays_json(r), NULL);
    output_set(
        o, "bytes", output_u64(r->is.bytes), "bytes_left", output_u64(r->is.bytes_left),
        "lease_age_ns", output_age_ns(r->is.lease_age_ms), "holders", holders,
        "bytes_read", read, "drain_waits", drain_waits_json(s), "leases",
        output_u64(r->is.leases), "rank_leases", output_u64(s->leases), "drain_p50_ns",
        output_u64(look_drain_ns(s, 50)), "drain_p99_ns",
        output_u64(look_drain_ns(s, 99)), "drain_wait_ns",
        output_u64(s->drain_wait_ns_total), "rtt_ns", output_u64(s->rtt_ns), NULL);
}

static json_t *rank_json(const look_rank *r)
{
    json_t *o = output_object("rank", output_rank(r->at.rank), "address",
                              output_string(r->at.address), "status",
                              output_string(fanin_status_name(r->at.status)), "message",
                              output_string(r->at.message), NULL);
    if (look_answered(r) && r->there)
        output_set(o, "state", output_string(rank_state_name(r->is.state)), "step",
                   output_u64(r->is.step), "state_age_ns",
                   output_age_ns(r->is.state_age_ms), "commit_age_ns",
                   output_age_ns(r->is.commit_age_ms), "update_age_ns",
                   output_age_ns(r->is.update_age_ms), "reason",
                   output_string(r->reason), NULL);
    if (look_answered(r) && r->stats.counted)
        add_counts(o, r);
    return o;
}

json_t *look_json(const session *s, const look *l, const problems *p)
{
    json_t *ranks = json_array(), *list = json_array();
    for (uint32_t i = 0; i < l->count; i++)
        json_array_append_new(ranks, rank_json(&l->ranks[i]));
    for (size_t i = 0; i < p->count; i++)
        json_array_append_new(
            list, output_object("kind", output_string(p->list[i].kind), "rank",
                                output_rank(p->list[i].rank), "fails",
                                json_boolean(p->list[i].status != FANIN_OK), "text",
                                output_string(p->list[i].text), "remedy",
                                output_string(p->list[i].remedy), NULL));
    char *summary = look_summary(s, l, p);
    json_t *told = output_object(
        "publication", output_string(s->publication), "summary", output_string(summary),
        "healthy", json_boolean(problems_verdict(p) == FANIN_OK), "step",
        output_u64(l->newest), "problems", list, "ranks", ranks, NULL);
    free(summary);
    return told;
}
