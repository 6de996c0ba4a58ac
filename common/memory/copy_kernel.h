/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file
 * The copy kernel's interface: its name and its one parameter. Plain C, shared by the kernel's
 * source, its caller, and whatever else carries it out.
 */
#ifndef COPY_KERNEL_H
#define COPY_KERNEL_H

#include "copy_entry.h"

#define COPY_KERNEL_NAME "fanin_copy_units"

/** Threads of a block; every warp of them takes entries of its own. */
#define COPY_KERNEL_THREADS 256
#define COPY_KERNEL_WARPS (COPY_KERNEL_THREADS / 32)

/** What entries that stay on a device are cut to (bytes of source, and runs): little enough for
    one warp, so that all multiprocessors are busy, and enough to hide the cost of starting. */
#define COPY_UNIT_BYTES 16384
#define COPY_UNIT_RUNS 2048

/**
 * The only parameter of the kernel, by value. For each of the `count` entries, in any order and
 * with no order between them, runs are copied as copy_entries_run() does: from
 * bases[base] + from + from_add (+ i * from_step) to to + to_add (+ i * to_step).
 */
typedef struct copy_parameters {
    const copy_entry *entries; /**< device memory or pinned host memory */
    const uint64_t *bases;     /**< device memory; NULL: all bases are 0 */
    uint64_t count;
    uint64_t from_add, to_add;
    /** Each entry is cut in that many shares, for as many warps; >= 1. Changes nothing in what is
        copied. */
    uint32_t parts;
    /** The entries are that many sections, of which one each is taken in turn (copy_entry_of());
        >= 1. Changes nothing in what is copied. */
    uint32_t ways;
} copy_parameters;

/** How many turns it takes to come by all of @p count entries: at least as many. */
CONVERT_CODE uint64_t copy_turns(uint64_t count, uint32_t ways)
{
    return (count + ways - 1) / ways * ways;
}

/** The entry whose turn it is, each once; from @p count on: nobody's. */
CONVERT_CODE uint64_t copy_entry_of(uint64_t turn, uint64_t count, uint32_t ways)
{
    return turn % ways * ((count + ways - 1) / ways) + turn / ways;
}

#endif
