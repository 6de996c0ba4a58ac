/* SPDX-License-Identifier: Apache-2.0 */
#include "fetch/look_rates.h"
#include "fetch/output.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static uint64_t pulls_of(const look_rank *r)
{
    return r->stats.pulls_good + r->stats.pulls_stale;
}

/* What counts backwards is another process. */
static look_rate rate_of(const look_before *b, const look_rank *r, uint64_t now_ns)
{
    look_rate rate = {.ns = now_ns - b->at_ns};
    look_read reads[LOOK_PATHS];
    uint64_t most = 0;
    if (!look_answered(r) || !r->stats.counted || !b->known || now_ns <= b->at_ns ||
        strcmp(b->address, r->at.address) != 0 || pulls_of(r) < b->pulls) {
        return (look_rate){0};
    }
    look_reads(&r->stats, reads);
    for (size_t i = 0; i < LOOK_PATHS; i++) {
        if (reads[i].bytes < b->bytes[i]) {
            return (look_rate){0};
        }
        uint64_t more = reads[i].bytes - b->bytes[i];
        rate.bytes += more;
        rate.path = more > most ? reads[i].path : rate.path;
        most = more > most ? more : most;
    }
    rate.known = true;
    return rate;
}

static void remember(look_before *b, const look_rank *r, uint64_t now_ns)
{
    look_read reads[LOOK_PATHS];
    *b =
        (look_before){.known = r->stats.counted, .pulls = pulls_of(r), .at_ns = now_ns};
    look_reads(&r->stats, reads);
    for (size_t i = 0; i < LOOK_PATHS; i++) {
        b->bytes[i] = reads[i].bytes;
    }
    snprintf(b->address, sizeof b->address, "%s", r->at.address);
}

void look_rates_take(look_rates *r, const look *l, uint64_t now_ns)
{
    if (r->count < l->count) {
        r->list = output_require(realloc(r->list, l->count * sizeof *r->list));
        r->before = output_require(realloc(r->before, l->count * sizeof *r->before));
        memset(r->before + r->count, 0, (l->count - r->count) * sizeof *r->before);
        r->count = l->count;
    }
    for (uint32_t i = 0; i < l->count; i++) {
        const look_rank *rank = &l->ranks[i];
        r->list[i] = rate_of(&r->before[i], rank, now_ns);
        if (look_answered(rank)) {
            remember(&r->before[i], rank, now_ns);
        }
    }
}

void look_rates_free(look_rates *r)
{
    free(r->list);
    free(r->before);
    *r = (look_rates){0};
}
