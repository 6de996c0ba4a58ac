/* SPDX-License-Identifier: Apache-2.0 */
#include "cut_ahead.h"

#include "array.h"
#include "copy_units.h"
#include "worker_pool.h"
#include <stdlib.h>

/** Units of a block: 3 MiB. */
#define BLOCK_UNITS UINT32_C(65536)
#define BLOCKS 4 /* that there are at a time: one is uploaded, the others are cut */

typedef struct cut_block {
    worker_job job;
    cut_ahead *of;
    uint64_t entry, n; /* that it is cut from; n 0: none */
    copy_entry *units;
    size_t capacity;
    bool done;
} cut_block;

struct cut_ahead {
    const copy_entry *entries;
    const uint32_t *first;
    uint64_t n, given; /* entries; those that blocks have */
    worker_pool *pool;
    unsigned turn; /* the block that comes next */
    bool started, failed;
    cut_block blocks[BLOCKS];
};

static void cut_ahead_cut(worker_job *job)
{
    cut_block *b = (cut_block *)job; /* its first member */
    const uint32_t *first = b->of->first;
    for (uint64_t i = b->entry; i < b->entry + b->n; i++)
        copy_units_cut(&b->of->entries[i], b->units + (first[i] - first[b->entry]));
}

/* How many of the entries from @p i on make a block: one at least. */
static uint64_t entries_of_block(const cut_ahead *c, uint64_t i)
{
    uint64_t end = i + 1;
    while (end < c->n && c->first[end + 1] - c->first[i] <= BLOCK_UNITS)
        end++;
    return end - i;
}

/* Gives the block the next entries, if there are any. */
static void cut_ahead_begin(cut_ahead *c, cut_block *b)
{
    uint64_t i = c->given;
    b->n = 0;
    if (i == c->n || c->failed)
        return;
    uint64_t n = entries_of_block(c, i);
    size_t units = c->first[i + n] - c->first[i];
    if (!array_reserve(&b->units, &b->capacity, units + 1, sizeof *b->units)) {
        c->failed = true;
        return;
    }
    b->entry = i;
    b->n = n;
    b->done = false;
    c->given += n;
    worker_pool_submit(c->pool, &b->job);
}

cut_ahead *cut_ahead_open(const copy_entry *entries, const uint32_t *first, uint64_t n)
{
    cut_ahead *c = calloc(1, sizeof *c);
    if (!c)
        return NULL;
    c->entries = entries;
    c->first = first;
    c->n = n;
    c->pool = worker_pool_create(0, first[n] > BLOCK_UNITS ? BLOCKS - 1 : 0, -1);
    if (!c->pool) {
        free(c);
        return NULL;
    }
    for (unsigned i = 0; i < BLOCKS; i++) {
        c->blocks[i].job.run = cut_ahead_cut;
        c->blocks[i].of = c;
        cut_ahead_begin(c, &c->blocks[i]);
    }
    return c;
}

static void cut_ahead_wait_for(cut_ahead *c, const cut_block *b)
{
    while (!b->done) {
        worker_job *job = worker_pool_collect(c->pool);
        if (job)
            ((cut_block *)job)->done = true;
        else if (!worker_pool_help(c->pool))
            worker_pool_wait(c->pool);
    }
}

bool cut_ahead_next(cut_ahead *c, const copy_entry **units, uint32_t *count)
{
    if (c->started) {
        cut_ahead_begin(c, &c->blocks[c->turn]);
        c->turn = (c->turn + 1) % BLOCKS;
    }
    c->started = true;
    cut_block *b = &c->blocks[c->turn];
    *units = NULL;
    *count = 0;
    if (b->n == 0)
        return !c->failed;
    cut_ahead_wait_for(c, b);
    *units = b->units;
    *count = c->first[b->entry + b->n] - c->first[b->entry];
    return true;
}

void cut_ahead_close(cut_ahead **c)
{
    if (!*c)
        return;
    worker_pool_destroy(&(*c)->pool);
    for (unsigned i = 0; i < BLOCKS; i++)
        free((*c)->blocks[i].units);
    free(*c);
    *c = NULL;
}
