/* SPDX-License-Identifier: Apache-2.0 */
#include "digest.h"
#include "plan/plan_internal.h"

#include <stdlib.h>
#include <string.h>

#define HASH_WORDS                                                                     \
    65536 /* that are hashed without a look at whether it is still wanted */

uint32_t intern_next(const intern *t, uint64_t hash, uint64_t *probe)
{
    if (!t->slots)
        return PLAN_NONE;
    for (;;) {
        const intern_slot *slot = &t->slots[(hash + *probe) & t->mask];
        if (slot->id_plus_1 == 0)
            return PLAN_NONE;
        ++*probe;
        if (slot->hash == hash)
            return (uint32_t)(slot->id_plus_1 - 1);
    }
}

static void put(intern *t, uint64_t hash, uint64_t id_plus_1)
{
    uint64_t i = hash & t->mask;
    while (t->slots[i].id_plus_1 != 0)
        i = (i + 1) & t->mask;
    t->slots[i] = (intern_slot){.hash = hash, .id_plus_1 = id_plus_1};
}

bool intern_add(intern *t, uint64_t hash, uint32_t id)
{
    uint64_t size = t->slots ? t->mask + 1 : 0;
    if (2 * (t->used + 1) > size) {
        intern old = *t;
        size = size ? 2 * size : 64;
        t->slots = calloc(size, sizeof *t->slots);
        if (!t->slots) {
            *t = old;
            return false;
        }
        t->mask = size - 1;
        for (uint64_t i = 0; old.slots && i <= old.mask; i++)
            if (old.slots[i].id_plus_1 != 0)
                put(t, old.slots[i].hash, old.slots[i].id_plus_1);
        free(old.slots);
    }
    put(t, hash, (uint64_t)id + 1);
    t->used++;
    return true;
}

void intern_free(intern *t)
{
    free(t->slots);
    *t = (intern){0};
}

uint64_t words_hash(const uint64_t *words, uint64_t count, work_stop *stop)
{
    uint64_t state[2] = {0}, done = 0;
    do {
        uint64_t n = count - done < HASH_WORDS ? count - done : HASH_WORDS;
        digest d = digest_of(words + done, n * sizeof *words);
        memcpy(&state[1], d.bytes, sizeof state[1]);
        if (done > 0) {
            d = digest_of(state, sizeof state);
            memcpy(&state[1], d.bytes, sizeof state[1]);
        }
        state[0] = state[1];
        done += n;
    } while (done < count && !work_stopped_after(stop, WORK_STEPS));
    return state[0];
}
