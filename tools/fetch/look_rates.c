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
    look_rate rate = {0};
    if (look_answered(r) && r->stats.counted && b->known && now_ns > b->at_ns &&
        strcmp(b->address, r->at.address) == 0 && r->stats.bytes_streamed >= b->bytes &&
        pulls_of(r) >= b->pulls) {
        rate = (look_rate){.known = true,
                           .bytes = r->stats.bytes_streamed - b->bytes,
                           .ns = now_ns - b->at_ns};
    }
    return rate;
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
            r->before[i] = (look_before){.known = rank->stats.counted,
                                         .bytes = rank->stats.bytes_streamed,
                                         .pulls = pulls_of(rank),
                                         .at_ns = now_ns};
            snprintf(r->before[i].address, sizeof r->before[i].address, "%s",
                     rank->at.address);
        }
    }
}

void look_rates_free(look_rates *r)
{
    free(r->list);
    free(r->before);
    *r = (look_rates){0};
}
