/* SPDX-License-Identifier: Apache-2.0 */
#include "duty.h"

#include <string.h>

/* How much the member is for the unit. */
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

/* The units in the order in which a member wants them: a step that is odd meets each number below a
   power of two once. */
typedef struct wishes {
    uint32_t first, step;
} wishes;

static wishes wishes_of(const member *m)
{
    uint64_t x = claim(m, 0);
    return (wishes){(uint32_t)x, (uint32_t)(x >> 32) | 1};
}

/* By turns each member takes what it wants most of what is left (Maglev, NSDI 2016): n ln n steps
   for n units. To give each unit to the greatest claim would take n steps a member. */
void duty_deal(const member *members, size_t n_members, uint32_t *owner, size_t n_units,
               uint32_t *load)
{
    uint32_t *taken = load, mask = 0;
    while (mask + 1 < n_units)
        mask = 2 * mask + 1;
    memset(taken, 0, n_members * sizeof *taken);
    memset(owner, 0xFF, n_units * sizeof *owner);
    for (size_t dealt = 0; dealt < n_units; dealt++) {
        size_t i = dealt % n_members;
        const wishes w = wishes_of(&members[i]);
        uint32_t unit;
        do
            unit = (w.first + w.step * taken[i]++) & mask;
        while (unit >= n_units || owner[unit] != UINT32_MAX);
        owner[unit] = (uint32_t)i;
    }
    for (size_t i = 0; i < n_members; i++)
        load[i] = (uint32_t)(n_units / n_members + (i < n_units % n_members));
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
