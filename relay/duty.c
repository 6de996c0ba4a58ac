/* SPDX-License-Identifier: Apache-2.0 */
#include "duty.h"

#include <string.h>

/* How much the member is for the unit: the greatest has it. */
static uint64_t claim(const member *m, uint64_t unit)
{
    uint64_t low, high;
    memcpy(&low, m->id, sizeof low);
    memcpy(&high, m->id + sizeof low, sizeof high);
    uint64_t x = (low ^ high) * UINT64_C(0x9E3779B97F4A7C15) +
                 unit * UINT64_C(0xC2B2AE3D27D4EB4F);
    x = (x ^ x >> 31) * UINT64_C(0xBF58476D1CE4E5B9);
    x = (x ^ x >> 27) * UINT64_C(0x94D049BB133111EB);
    return x ^ x >> 31;
}

int member_compare(const void *a, const void *b)
{
    return memcmp(((const member *)a)->id, ((const member *)b)->id,
                  sizeof((const member *)a)->id);
}

/* Of the claims @p x and @p y. Incarnations are random: two of one claim differ in their ids. */
static bool precedes(const member *a, uint64_t x, const member *b, uint64_t y)
{
    return x != y ? x > y : member_compare(a, b) > 0;
}

void duty_deal(const member *members, size_t n_members, uint32_t *owner, size_t n_units,
               uint32_t *load)
{
    size_t least = n_units / n_members, more = n_units % n_members;
    memset(load, 0, n_members * sizeof *load);
    for (size_t unit = 0; unit < n_units; unit++) {
        size_t best = n_members;
        uint64_t most = 0;
        for (size_t i = 0; i < n_members; i++) {
            if (load[i] > least || (load[i] == least && more == 0))
                continue;
            uint64_t by = claim(&members[i], unit);
            if (best == n_members || precedes(&members[i], by, &members[best], most)) {
                best = i;
                most = by;
            }
        }
        more -= load[best] == least;
        load[best]++;
        owner[unit] = (uint32_t)best;
    }
}

size_t duty_rank(const member *members, size_t n_members, size_t self, size_t but,
                 size_t unit)
{
    const uint64_t turn = ~(uint64_t)unit, own = claim(&members[self], turn);
    size_t before = 0;
    for (size_t i = 0; i < n_members; i++)
        before += i != self && i != but &&
                  precedes(&members[i], claim(&members[i], turn), &members[self], own);
    return before;
}
