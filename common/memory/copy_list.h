/* SPDX-License-Identifier: Apache-2.0 */
/** @file Making copy entries from blocks, and carrying them out on the host. Pure. */
#ifndef COPY_LIST_H
#define COPY_LIST_H

#include "block.h"
#include "copy_entry.h"
#include "digest_kernel.h"
#include <stdbool.h>
#include <stddef.h>

/* What the digest kernel is told to read: from strided runs to pieces of 4 KiB. Pure. */

/** Digests, rows of pieces and entries in one stretch of memory. Zeroed: no room for any. */
typedef struct digest_list {
    uint64_t *digests; /**< of the pieces, by whoever carries the list out */
    digest_row *rows;
    copy_entry *entries;
    uint32_t n_pieces, n_rows, n_entries;
    uint32_t most_pieces, most_rows, most_entries;
    uint32_t filled; /**< bytes of the last piece; 0: the next byte begins one */
} digest_list;

/** An empty list in @p size bytes at @p memory, aligned to 16, with room for @p pieces in @p rows
    and as many entries as fit behind them. Of contiguous memory a row has up to DIGEST_KERNEL_ROW
    pieces, of short runs one. */
digest_list digest_list_in(void *memory, size_t size, uint32_t pieces, uint32_t rows);
/** The next byte begins a new piece: what is digested by itself begins. */
void digest_list_cut(digest_list *list);
/** @p runs of @p run bytes each, @p step from one to the next, the first at @p from; converted,
    and packed behind what is there. Conversions take whole elements, and all between two cuts or
    nothing. False: no room; the list is good for nothing then until it is cleared. */
bool digest_list_add(digest_list *list, uint64_t from, uint64_t run, uint64_t runs,
                     int64_t step, uint32_t convert);

/** A growing list. Zeroed: empty. */
typedef struct copy_list {
    copy_entry *entries;
    uint64_t n, capacity;
    bool failed;     /**< out of memory or stopped: what was added since is lost */
    work_stop *stop; /**< NULL: never stops */
} copy_list;

void copy_list_free(copy_list *list);
/** @p length contiguous bytes on both sides. */
void copy_list_add(copy_list *list, uint32_t base, uint64_t from, uint64_t to,
                   uint64_t length);
/** A view, from its first source element to its first destination one; the two innermost
    dimensions make one entry, the others as many as they have elements. */
void copy_list_add_view(copy_list *list, uint32_t base, uint64_t from, uint64_t to,
                        const strided *view);

/** What the kernel does, in the calling thread, for host memory. */
void copy_entries_run(const copy_entry *entries, uint64_t n, const uint64_t *bases,
                      uint64_t from_add, uint64_t to_add);

/* --------------------------------------------------------------------- units */

/* Cutting copy entries to what one warp of the copy kernel takes. Pure. */

/**
 * Writes entries of about COPY_UNIT_BYTES and at most COPY_UNIT_RUNS runs that together copy what
 * @p entry copies, and returns their number. @p out NULL: only counts. Cuts fall where the
 * source's address is aligned, as far as its offset tells.
 */
uint64_t copy_units_cut(const copy_entry *entry, copy_entry *out);

/** In how many shares to cut each of @p n uncut entries, so that @p warps warps have work: the
    `parts` of a copy_parameters. n > 0. */
uint32_t copy_units_parts(const copy_entry *entries, uint64_t n, uint64_t warps);

#endif
