/* SPDX-License-Identifier: Apache-2.0 */
#include "fetch/look.h"
#include "fetch/output.h"

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

static void take_stats(const fanin_rank_stats *s, const char *publication, look_rank *r)
{
    r->stats = *s;
    r->stats.entries = NULL;
    r->stats.holders = NULL;
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
}

static bool on_rank(void *cookie, const fanin_rank_info *info,
                    const fanin_rank_stats *stats)
{
    gathering *g = cookie;
    look *l = g->out;
    if (l->count == l->asked) {
        return false;
    }
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
        take_stats(stats, g->session->publication, r);
        l->newest = r->is.step > l->newest ? r->is.step : l->newest;
    }
    return true;
}

/* If only one of several ranks is not known, it is the one that is left. */
static void name_last(look *l)
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
    if (nobody == 1 && l->count > 1 && left >= 0 && left < l->count) {
        unknown->at.rank = (int32_t)left;
    }
}

fanin_status look_take(const session *s, uint32_t timeout_ms, look *out,
                       fanin_error *error)
{
    gathering g = {.session = s, .out = out};
    *out = (look){.asked = s->target.count};
    out->ranks = output_require(calloc(out->asked, sizeof *out->ranks));
    fanin_status status =
        fanin_client_stats(s->client, s->publication, timeout_ms, on_rank, &g, error);
    name_last(out);
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
    free(l->ranks);
    *l = (look){0};
}

uint64_t look_drain_bound_after(size_t i, uint64_t bound)
{
    return i % 2 == 0 ? bound * 3 : bound / 3 * 10;
}

void look_reads(const fanin_rank_stats *s, look_read out[LOOK_PATHS])
{
    uint64_t plain =
        s->bytes_streamed > s->bytes_tls ? s->bytes_streamed - s->bytes_tls : 0;
    const look_read reads[LOOK_PATHS] = {{"stream", plain},
                                         {"tls", s->bytes_tls},
                                         {"cma", s->bytes_cma},
                                         {"rdma", s->bytes_rdma},
                                         {"cuda_ipc", s->bytes_cuda_ipc}};
    memcpy(out, reads, sizeof reads);
}

uint64_t look_drain_ns(const fanin_rank_stats *s, unsigned percent)
{
    uint64_t all = 0, seen = 0, bound = 100000;
    for (size_t i = 0; i < FANIN_DRAIN_BUCKETS; i++) {
        all += s->drain_waits[i];
    }
    for (size_t i = 0; i < FANIN_DRAIN_BUCKETS && all > 0; i++) {
        seen += s->drain_waits[i];
        if ((double)seen * 100 >= (double)all * percent) {
            break;
        }
        bound = look_drain_bound_after(i, bound);
    }
    return all == 0 ? 0 : bound < s->drain_wait_ns_max ? bound : s->drain_wait_ns_max;
}
