/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file
 * How the sources of a plan that are read by cuda_ipc are copied: for each device that holds some
 * of the destination one table that one kernel carries out; for host memory tables that gather
 * the bytes chunk by chunk in the memory of one or several devices, and what is to be copied where
 * from there. Made once and used by every pull, also when region tables were
 * fetched anew: tables name regions by number, the reader says where those are and sees that they
 * hold what is read of them.
 */
#ifndef DEVICE_PLAN_H
#define DEVICE_PLAN_H

#include "array.h"
#include "copy_list.h"
#include "path/path.h"
#include "plan/plan.h"

/* What one source is read by, for kernels: its pieces as copy entries, device by device, and
   those for host memory. Made of each source by itself, so that threads can; device_plan.h joins
   them. */

/** A region of which something is read. */
typedef struct read_region {
    uint32_t number; /**< as the box table counts: of the first arena */
    uint64_t reach;  /**< bytes from its beginning to the end of what is read */
} read_region;

/** What lands on one device. */
typedef struct device_copies {
    int device;
    copy_list list; /**< bases are indices of source_copies.regions */
    uint64_t bytes; /**< of the source */
} device_copies;

/** A piece that goes to host memory. */
typedef struct host_piece {
    uint64_t from, to;
    uint64_t length;     /**< of the source, if it is contiguous */
    const strided *view; /**< in source_copies.views; NULL: contiguous */
    uint32_t base;
} host_piece;

typedef struct host_pieces {
    host_piece *pieces;
    uint64_t n, capacity;
} host_pieces;

typedef struct source_copies {
    read_region *regions;
    uint32_t n_regions;
    device_copies *devices;
    size_t n_devices;
    host_pieces host;
    strided *views;
    uint64_t reads; /**< spans that it was made of */
} source_copies;

/** Where a plan's bytes go. */
typedef struct copies_target {
    uint8_t *base;
    const memory_range *ranges;
    size_t n_ranges;
} copies_target;

/** @p spans of a source with @p n_regions regions. Takes the spans' views, which stay theirs
    otherwise. FANIN_ERR_MEMORY, FANIN_ERR_TIMEOUT (stopped). Any thread. */
fanin_status source_copies_build(plan_spans *spans, uint32_t n_regions,
                                 const copies_target *target, work_stop *stop,
                                 source_copies **out, fanin_error *error);

/** A number that table entries use as their base: a region of a source, of which something is read.
    */
typedef struct device_base {
    size_t source;
    read_region region;
} device_base;

/** What lands on one device. */
typedef struct device_part {
    int device;
    gpu_table *table;    /**< NULL: entries */
    copy_entry *entries; /**< at most AREA_ENTRIES; of one read not uploaded */
    uint64_t n_entries;
    uint64_t bytes; /**< of the sources */
} device_part;

/** A stretch of a chunk and where it goes in host memory. */
typedef struct host_landing {
    uint64_t offset; /**< in the chunk */
    uint64_t length; /**< contiguous bytes, if view is 0 */
    uint64_t to;     /**< without the base, as in the plan */
    uint32_t view;   /**< 1 + a view of the plan's, from chunk to destination */
} host_landing;

typedef struct host_chunk {
    uint64_t first_entry, n_entries; /**< of its device's table; `to` is an offset in
                                        the chunk */
    uint64_t first_landing, n_landings;
    uint64_t lead;   /**< bytes at its beginning that are nobody's */
    uint64_t length; /**< bytes behind them */
    uint64_t to;     /**< of those, if the destination is contiguous */
} host_chunk;

/** What one device gathers of host memory. */
typedef struct gather_part {
    int device;
    gpu_table *table;
    uint64_t first_chunk, n_chunks; /**< ascending by their landings */
} gather_part;

typedef struct device_plan {
    size_t n_sources;
    device_base *bases;
    uint32_t n_bases;
    device_part *parts;
    size_t n_parts;
    /* host memory */
    gather_set wanted; /**< what it was made for; empty: no host memory */
    /** A chunk is a copy of what the destination shall hold at `to`; pieces of the destination's
        digest (DIGEST_PIECE) lie at the same multiples in it. */
    bool contiguous;
    uint64_t chunk_bytes;
    gather_part gathers[GATHER_DEVICES];
    size_t n_gathers;   /**< fewer than wanted if there are few chunks */
    host_chunk *chunks; /**< part by part */
    uint64_t n_chunks;
    host_landing *landings;
    strided *views;
    bool of_source[]; /**< whether a source is part of it */
} device_plan;

/** What it is made from: the plan, and the copies of those sources that are read by the reader. */
typedef struct device_plan_parts {
    const path_plan *plan;
    const path_reader *reader; /**< its sources are part of it */
    void *const *copies;       /**< source_copies, one a source */
    gather_set gather;
    work_stop *stop;
} device_plan_parts;

/** Whether @p d (may be NULL) is what device_plan_build() would make again. */
bool device_plan_fits(const device_plan *d, const device_plan_parts *parts);
/** Uploads the tables; blocks for that. FANIN_ERR_MEMORY, FANIN_ERR_TIMEOUT (stopped), errors of
    gpu_table_create(). */
fanin_status device_plan_build(gpu *g, const device_plan_parts *parts,
                               device_plan **out, fanin_error *error);
/** No kernel may be under way. *d NULL is fine. */
void device_plan_free(device_plan **d);

/** Fills the host part of @p d, which knows what is wanted; @p pieces are sorted by the way. The
    copies are added to @p list, in the order of chunks, whose entries are counted from the list's
    beginning. FANIN_ERR_MEMORY, FANIN_ERR_TIMEOUT (the list's stop). */
fanin_status device_plan_lay_out_host(device_plan *d, host_pieces *pieces,
                                      copy_list *list, fanin_error *error);

/** Why a step did not succeed: FANIN_ERR_TIMEOUT if the work was stopped, else FANIN_ERR_MEMORY. */
static inline fanin_status device_plan_broken_off(const work_stop *stop,
                                                  fanin_error *error)
{
    return work_broken_off(stop, "plan", "copies were listed", error);
}

#endif
