/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file
 * Columns of numbers in few bits: what workers and ranks keep of tables of millions of boxes. Of
 * each COLUMN_BLOCK numbers a line is kept, and how far each lies above it: numbers that grow
 * evenly, and those that hardly change, take no bits. Any 64-bit numbers are kept, the worst in all
 * of their bits.
 */
#ifndef NUMBER_COLUMN_H
#define NUMBER_COLUMN_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define COLUMN_BLOCK 128

typedef struct column_block {
    uint64_t base, slope; /**< the line: base + slope * index in the block */
    uint32_t first;       /**< of words */
    uint32_t width;       /**< bits of each number's distance above the line */
} column_block;

/** Zeroed: empty. */
typedef struct number_column {
    uint64_t count;
    column_block *blocks;
    uint64_t *words;
    size_t n_blocks, block_capacity, n_words, word_capacity;
    uint64_t *open; /**< numbers of the block that is being filled; NULL: none */
} number_column;

/** False: no memory. */
bool number_column_add(number_column *c, uint64_t number);
/** Nothing is added from here on, and all can be asked for. False: no memory. */
bool number_column_close(number_column *c);
/** Number @p at, below count, of a closed column. */
uint64_t number_column_get(const number_column *c, uint64_t at);
void number_column_free(number_column *c);

#endif
