/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Boxes with the same holders form a class. A class is shared out among its holders as
 * ranges of keys, so that each of them serves neighbouring boxes; the ranges are as long
 * as levels the loads of all sources. Which holder gets the first range is another one for
 * each client: what cannot be shared evenly (a tensor that stands alone) would else fall
 * upon the same rank for all of them.
 */
#include "plan/plan_internal.h"

#include <stdlib.h>
#include <string.h>

#define ROUNDS_MAX 16

static uint64_t hash_sources(const uint32_t *sources, uint32_t count)
{
    uint64_t hash = count;
    for (uint32_t i = 0; i < count; i++) {
        hash = (hash ^ sources[i]) * 0x9E3779B97F4A7C15;
        hash ^= hash >> 29;
    }
    return hash;
}

bool class_intern(cover *c, const uint32_t *sources, uint32_t count, uint32_t *id_out)
{
    if (count == 1) {
        *id_out = sources[0];
        return true;
    }
    uint64_t hash = hash_sources(sources, count), probe = 0;
    for (uint32_t id; (id = intern_next(&c->class_index, hash, &probe)) != PLAN_NONE;) {
        const holder_class *k = &c->classes[id];
        if (k->count == count && memcmp(&c->class_sources[k->first], sources,
                                        count * sizeof *sources) == 0) {
            *id_out = id;
            return true;
        }
    }
    if (c->n_classes >= PLAN_NONE - 1 ||
        !array_reserve(&c->classes, &c->class_capacity, c->n_classes + 1,
                       sizeof *c->classes) ||
        !array_reserve(&c->class_sources, &c->class_source_capacity,
                       c->n_class_sources + count, sizeof *c->class_sources) ||
        !intern_add(&c->class_index, hash, (uint32_t)c->n_classes))
        return false;
    *id_out = (uint32_t)c->n_classes;
    c->classes[c->n_classes++] =
        (holder_class){.first = c->n_class_sources, .count = count, .key = PLAN_NONE};
    memcpy(&c->class_sources[c->n_class_sources], sources, count * sizeof *sources);
    c->n_class_sources += count;
    return true;
}

/* The holder at a position: positions begin at the class's turn. */
static uint32_t holder_at(const holder_class *k, uint32_t position)
{
    return (position + k->turn) % k->count;
}

typedef struct level {
    uint64_t load;
    uint32_t position;
} level;

static int compare_levels(const void *a, const void *b)
{
    const level *x = a, *y = b;
    if (x->load != y->load)
        return x->load < y->load ? -1 : 1;
    return x->position < y->position ? -1 : x->position > y->position;
}

/* Pours a class's weight onto its sources, the least loaded first. True: shares moved. */
static bool pour(const cover *c, const holder_class *k, uint64_t *loads, level *levels)
{
    uint64_t *shares = &c->bounds[k->first], left = k->weight;
    const uint32_t *sources = &c->class_sources[k->first];
    for (uint32_t i = 0; i < k->count; i++) {
        uint64_t *load = &loads[sources[holder_at(k, i)]];
        *load -= shares[i];
        levels[i] = (level){.load = *load, .position = i};
    }
    qsort(levels, k->count, sizeof *levels, compare_levels);
    uint64_t height = levels[0].load;
    uint32_t wet = 1;
    for (; wet < k->count && levels[wet].load - height <= left / wet; wet++) {
        left -= (levels[wet].load - height) * wet;
        height = levels[wet].load;
    }
    height += left / wet;
    left %= wet;
    bool moved = false;
    for (uint32_t i = 0; i < k->count; i++) {
        uint32_t position = levels[i].position;
        uint64_t share = i < wet ? height - levels[i].load + (i < left) : 0;
        uint64_t before = shares[position];
        uint64_t step = share > before ? share - before : before - share;
        moved = moved || step > k->weight / 256;
        shares[position] = share;
        loads[sources[holder_at(k, position)]] += share;
    }
    return moved;
}

/* Sorting is most of it. */
static uint32_t pour_steps(const holder_class *k)
{
    return k->count < WORK_STEPS / 8 ? 8 * k->count : WORK_STEPS;
}

/* Neighbouring seeds, and a class's neighbours under one seed, begin anywhere. */
static void take_turns(cover *c, uint64_t seed)
{
    for (uint64_t i = c->n_sources; i < c->n_classes; i++) {
        holder_class *k = &c->classes[i];
        uint64_t words[] = {seed, i};
        k->turn = (uint32_t)(words_hash(words, 2, NULL) >> 32) % k->count;
    }
}

bool classes_balance(cover *c, uint64_t seed)
{
    uint64_t *loads = calloc(c->n_sources + 1, sizeof *loads);
    level *levels = malloc((c->n_sources + 1) * sizeof *levels);
    c->bounds = calloc(c->n_class_sources + 1, sizeof *c->bounds);
    bool ok = loads && levels && c->bounds, moved = true;
    take_turns(c, seed);
    for (size_t s = 0; s < c->n_sources && ok; s++)
        loads[s] = c->classes[s].weight;
    for (int round = 0; round < ROUNDS_MAX && moved && ok; round++) {
        moved = false;
        for (uint64_t i = c->n_sources; i < c->n_classes && ok; i++) {
            ok = !work_stopped_after(c->stop, pour_steps(&c->classes[i]));
            moved = pour(c, &c->classes[i], loads, levels) || moved;
        }
    }
    for (uint64_t i = c->n_sources; i < c->n_classes && ok; i++) {
        uint64_t *bounds = &c->bounds[c->classes[i].first];
        for (uint32_t j = 1; j < c->classes[i].count; j++)
            bounds[j] += bounds[j - 1];
    }
    free(loads);
    free(levels);
    return ok;
}

uint32_t class_holder(const cover *c, holder_class *k, uint32_t key, bool split)
{
    if (k->key != key || split) {
        k->key = key;
        while (k->position + 1 < k->count &&
               k->given >= c->bounds[k->first + k->position])
            k->position++;
    }
    return holder_at(k, k->position);
}
