/* SPDX-License-Identifier: Apache-2.0 */
#include "number_column.h"

#include "array.h"

#include <stdlib.h>
#include <string.h>

#define WORD_BITS 64

/* ------------------------------------------------------------------- filling */

/* How wide the distances above a line of that slope are, which then begins at *base. All of it
   modulo 2^64, so that it is right for all numbers, if not narrow. */
static uint32_t width_above(const uint64_t *numbers, uint32_t n, uint64_t slope,
                            uint64_t *base)
{
    uint64_t lowest = 0, bits = 0;
    for (uint32_t i = 0; i < n; i++) {
        uint64_t above = numbers[i] - (numbers[0] + slope * i);
        if ((int64_t)above < (int64_t)lowest)
            lowest = above;
    }
    *base = numbers[0] + lowest;
    for (uint32_t i = 0; i < n; i++)
        bits |= numbers[i] - (*base + slope * i);
    return bits ? WORD_BITS - (uint32_t)__builtin_clzll(bits) : 0;
}

/* The narrower of a level line and of one from the first number to the last. */
static column_block fit(const uint64_t *numbers, uint32_t n)
{
    column_block level = {0}, rising = {0};
    level.width = width_above(numbers, n, 0, &level.base);
    if (n < 2 || level.width == 0)
        return level;
    rising.slope =
        (uint64_t)((int64_t)(numbers[n - 1] - numbers[0]) / (int64_t)(n - 1));
    rising.width = width_above(numbers, n, rising.slope, &rising.base);
    return rising.width < level.width ? rising : level;
}

static void put_bits(uint64_t *words, uint64_t at, uint32_t width, uint64_t bits)
{
    uint32_t shift = at % WORD_BITS;
    words[at / WORD_BITS] |= bits << shift;
    if (shift + width > WORD_BITS)
        words[at / WORD_BITS + 1] |= bits >> (WORD_BITS - shift);
}

/* The block that is being filled is full, or the last one. */
static bool column_pack_block(number_column *c)
{
    uint32_t n = (uint32_t)(c->count - (uint64_t)c->n_blocks * COLUMN_BLOCK);
    column_block b = fit(c->open, n);
    size_t need = ((size_t)n * b.width + WORD_BITS - 1) / WORD_BITS;
    if (!array_reserve(&c->blocks, &c->block_capacity, c->n_blocks + 1,
                       sizeof *c->blocks) ||
        !array_reserve(&c->words, &c->word_capacity, c->n_words + need + 1,
                       sizeof *c->words))
        return false;
    uint64_t *words = c->words + c->n_words;
    memset(words, 0, need * sizeof *words);
    for (uint32_t i = 0; i < n && b.width > 0; i++)
        put_bits(words, (uint64_t)i * b.width, b.width,
                 c->open[i] - (b.base + b.slope * i));
    b.first = (uint32_t)c->n_words;
    c->blocks[c->n_blocks++] = b;
    c->n_words += need;
    return true;
}

bool number_column_add(number_column *c, uint64_t number)
{
    if (!c->open && !(c->open = malloc(COLUMN_BLOCK * sizeof *c->open)))
        return false;
    c->open[c->count++ % COLUMN_BLOCK] = number;
    return c->count % COLUMN_BLOCK != 0 || column_pack_block(c);
}

bool number_column_close(number_column *c)
{
    if (c->count % COLUMN_BLOCK != 0 && !column_pack_block(c))
        return false;
    free(c->open);
    c->open = NULL;
    array_shrink(&c->blocks, c->n_blocks, sizeof *c->blocks);
    array_shrink(&c->words, c->n_words, sizeof *c->words);
    return true;
}

void number_column_free(number_column *c)
{
    free(c->blocks);
    free(c->words);
    free(c->open);
    *c = (number_column){0};
}

/* -------------------------------------------------------------------- asking */

uint64_t number_column_get(const number_column *c, uint64_t at)
{
    const column_block *b = &c->blocks[at / COLUMN_BLOCK];
    uint64_t index = at % COLUMN_BLOCK, line = b->base + b->slope * index;
    if (b->width == 0)
        return line;
    uint64_t bit = index * b->width;
    uint32_t shift = bit % WORD_BITS;
    const uint64_t *word = c->words + b->first + bit / WORD_BITS;
    uint64_t bits = word[0] >> shift;
    if (shift + b->width > WORD_BITS)
        bits |= word[1] << (WORD_BITS - shift);
    return line +
           (b->width < WORD_BITS ? bits & ((UINT64_C(1) << b->width) - 1) : bits);
}
