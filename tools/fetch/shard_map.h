/* SPDX-License-Identifier: Apache-2.0 */
/** @file Who holds what of a tensor: as a picture in a terminal, as an SVG, and in sums. */
#ifndef SHARD_MAP_H
#define SHARD_MAP_H

#include <fanin/client.h>
#include <stdio.h>

/** The first owner that holds the very box of owner @p index; @p index: it is the first. */
size_t shard_original(const fanin_entry *e, size_t index);

/** Bytes of boxes that are no other's replicas. */
uint64_t shard_distinct_bytes(const fanin_entry *e);

/** What is wrong with how a tensor is cut, in bytes. */
typedef struct shard_faults {
    uint64_t gaps;     /**< that no box holds */
    uint64_t overlaps; /**< that further boxes hold, but for those that are replicas */
} shard_faults;

/** Compares boxes, not their sums. After interrupt_requested() what it says is not whole. */
shard_faults shard_faults_of(const fanin_entry *e);

enum { SHARD_MAP_LEAST = 60 }; /**< columns that the picture needs */

/** How a terminal shows it. */
typedef struct shard_style {
    int columns; /**< at least SHARD_MAP_LEAST */
    bool utf8, color;
} shard_style;

/** What standard output is. @p no_color: whatever it is. */
shard_style shard_style_of(bool no_color);

/**
 * Draws the first dimension downwards and the second to the right (of a vector: its only one to the
 * right); of further ones the middle. A cell shows who holds its middle: '0' to '9', 'a' to 'z',
 * 'A' to 'Z', '#' for further ones; the first of several; '.' (in UTF-8 a middle dot): nobody.
 * Below it who is who.
 */
void shard_map_draw(FILE *stream, const fanin_entry *e, const shard_style *style);

/** The same as an SVG, to scale, each box by itself. */
void shard_map_svg(FILE *stream, const char *key, const fanin_entry *e);

#endif
