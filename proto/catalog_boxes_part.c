/* SPDX-License-Identifier: Apache-2.0 */
/* Parts of box tables: what they are of, and two made one. */
#include "array.h"
#include "box_table.h"
#include "error_set.h"

#include <stdlib.h>
#include <string.h>

static uint64_t keys_end(const box_run *run)
{
    return (uint64_t)run->keys.first + run->keys.count;
}

bool box_table_keys(const box_table *table, key_set *out)
{
    *out = (key_set){0};
    for (uint32_t i = 0; i < table->n_runs; i++)
        if (!key_set_add(out, table->runs[i].keys.first, table->runs[i].keys.count)) {
            key_set_free(out);
            return false;
        }
    return true;
}

bool box_table_has(const box_table *table, const key_set *keys)
{
    uint32_t run = 0;
    for (size_t i = 0; i < keys->n; i++) {
        const key_range *r = &keys->ranges[i];
        while (run < table->n_runs && keys_end(&table->runs[run]) <= r->first)
            run++;
        if (run == table->n_runs || table->runs[run].keys.first > r->first ||
            keys_end(&table->runs[run]) < (uint64_t)r->first + r->count)
            return false;
    }
    return true;
}

bool box_table_is_whole(const box_table *table)
{
    return !table->part;
}

/* Slots of one run, and what explicit boxes have besides, go behind those that are there. */
static bool take_run(box_table *to, const box_table *from, uint32_t index,
                     uint64_t words_moved)
{
    const box_run *run = &from->runs[index];
    box_run *last = to->n_runs > 0 ? &to->runs[to->n_runs - 1] : NULL;
    if (last && keys_end(last) == run->keys.first) {
        last->keys.count += run->keys.count;
    } else {
        to->runs[to->n_runs] = *run;
        to->runs[to->n_runs++].slot = (uint32_t)to->count;
    }
    bool ok = true;
    for (uint64_t slot = run->slot; slot < box_run_end(from, index) && ok; slot++) {
        uint64_t offset = number_column_get(&from->offset_of, slot) << from->shift;
        ok = box_table_add(to, box_table_key(from, slot),
                           (uint32_t)number_column_get(&from->region_of, slot), offset);
        if (ok && from->rule == BOXES_EXPLICIT)
            ok = number_column_add(&to->form_of,
                                   number_column_get(&from->form_of, slot) +
                                       2 * words_moved);
    }
    return ok;
}

/* Numbers ascend with the keys, and leave nothing out between neighbouring keys. */
static bool boxes_part_follows(const box_table *to, const box_table *from,
                               uint32_t index)
{
    const box_run *run = &from->runs[index];
    if (to->n_runs == 0)
        return true;
    const box_run *last = &to->runs[to->n_runs - 1];
    uint64_t next = last->ordinal + (to->count - last->slot);
    if (run->keys.first < keys_end(last))
        return false;
    return run->keys.first == keys_end(last) ? run->ordinal == next
                                             : run->ordinal >= next;
}

/* FANIN_ERR_PROTOCOL: they contradict each other; FANIN_ERR_MEMORY. */
static fanin_status take_runs(box_table *to, const box_table *a, const box_table *b)
{
    uint32_t i = 0, j = 0;
    while (i < a->n_runs || j < b->n_runs) {
        bool of_a = j == b->n_runs ||
                    (i < a->n_runs && a->runs[i].keys.first < b->runs[j].keys.first);
        const box_table *from = of_a ? a : b;
        uint32_t *index = of_a ? &i : &j;
        if (!boxes_part_follows(to, from, *index))
            return FANIN_ERR_PROTOCOL;
        if (!take_run(to, from, *index, of_a ? 0 : a->n_words))
            return FANIN_ERR_MEMORY;
        ++*index;
    }
    return box_table_close(to) ? FANIN_OK : FANIN_ERR_MEMORY;
}

/* Of both, without boxes yet. NULL: no memory. */
static box_table *boxes_part_make_room(const box_table *a, const box_table *b)
{
    box_table *t = calloc(1, sizeof *t);
    if (!t)
        return NULL;
    t->keys = a->keys;
    t->rule = a->rule;
    t->dim = a->dim;
    t->world = a->world;
    t->index = a->index;
    t->part = true;
    t->regions = a->regions > b->regions ? a->regions : b->regions;
    t->shift = a->shift < b->shift ? a->shift : b->shift;
    t->n_words = a->n_words + b->n_words;
    t->runs = calloc((size_t)a->n_runs + b->n_runs, sizeof *t->runs);
    if (t->rule == BOXES_EXPLICIT)
        t->words = malloc((t->n_words + 1) * sizeof *t->words);
    if (!t->runs || (t->rule == BOXES_EXPLICIT && !t->words))
        box_table_free(&t);
    return t;
}

static bool are_alike(const box_table *a, const box_table *b)
{
    return a->part && b->part && a->rule == b->rule && a->dim == b->dim &&
           a->world == b->world && a->index == b->index;
}

fanin_status box_table_join(box_table **table, box_table *more, fanin_error *error)
{
    static const error_place place = {.phase = "catalog"};
    box_table *a = *table, *b = more, *both = NULL;
    fanin_status status = FANIN_ERR_PROTOCOL;
    if (are_alike(a, b)) {
        both = boxes_part_make_room(a, b);
        status = both ? take_runs(both, a, b) : FANIN_ERR_MEMORY;
    }
    if (status == FANIN_ERR_MEMORY)
        error_set_memory(error);
    else if (status != FANIN_OK)
        error_set(error, status, &place, "parts of a box table contradict each other");
    if (status == FANIN_OK && both->words) {
        memcpy(both->words, a->words, a->n_words * sizeof *both->words);
        memcpy(both->words + a->n_words, b->words, b->n_words * sizeof *both->words);
    }
    box_table_free(&a);
    box_table_free(&b);
    if (status != FANIN_OK)
        box_table_free(&both);
    if (both)
        array_shrink(&both->runs, both->n_runs, sizeof *both->runs);
    *table = both;
    return status;
}
