/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file
 * The plan: which bytes go from which rank to which place. Pure: no I/O, no clock.
 */
#ifndef PLAN_H
#define PLAN_H

#include "catalog.h"
#include "messages.h"
#include "worker_pool.h"

/** A rank whose boxes may be read. */
typedef struct plan_source {
    uint32_t rank;
    const box_table *boxes;
} plan_source;

/** One block to fill. to = base + address of its first element: the base is added by the
    reader of the plan, so that a plan outlives one mapping of its destination. */
typedef struct plan_target {
    uint32_t key;
    block block;
    uint64_t to;
    int64_t stride[FANIN_MAX_DIMS]; /**< bytes of the destination, all 0: packed */
    bool as_is;                     /**< stays F32 in a plan that converts F32 */
    uint32_t group; /**< the caller's number for what it is part of; pieces keep it */
} plan_target;

#define PIECE_MAX ((uint64_t)4 << 20)   /**< bytes of one piece */
#define PLAN_SPLIT ((uint64_t)64 << 20) /**< of a box that one holder serves */

/** A block of one box: its elements land together. */
typedef struct piece {
    uint32_t box; /**< ordinal in the source's box table */
    /** 0: contiguous at `to`, as it is; else plan->views[view - 1] says how. What is converted
        has a view, also if it is contiguous (n_dims 0) */
    uint32_t view;
    uint64_t offset; /**< packed row-major bytes of the box */
    /** likewise, from the first element to the end of the last one; <= PIECE_MAX. Between them
        may lie what nobody wants: piece_bytes() does not count that, a view steps over it, and
        whoever asks for bytes by ranges asks for piece_ranges_of() */
    uint32_t length;
    uint32_t group; /**< of its target; of whole tensors: the key */
    uint64_t to;
} piece;

/** The pieces of one source, ascending by (box, offset). */
typedef struct plan_rank {
    piece *pieces;
    uint64_t n_pieces, bytes; /**< bytes wanted of it */
} plan_rank;

/** How the pieces of a view are asked for by ranges of their box's bytes. */
typedef struct plan_reading {
    /** so many of the view's first dimensions lead from range to range; short gaps are read along.
        0: one range */
    uint32_t outer;
    /** as in piece: from the ranges, one behind the other, to the destination */
    uint32_t landing;
} plan_reading;

typedef struct plan {
    plan_rank *ranks; /**< as many as sources, same order; n_pieces 0: not needed */
    size_t n_ranks;
    /** from = in the piece's packed bytes (or span bytes), to = destination */
    strided *views;
    uint32_t n_views;
    plan_reading *readings; /**< one for each view that pieces have */
    uint64_t bytes;         /**< wanted, as they are published: before any conversion */
    uint64_t tensors;       /**< distinct keys */
    bool has_replicas;      /**< some source could be spared */
} plan;

/** What a plan heeds besides tables and targets; all 0: nothing. */
typedef struct plan_rules {
    /** F32 tensors land as FANIN_DTYPE_BF16 or FANIN_DTYPE_F16, all others as they are; 0: all do.
        Targets' addresses and strides, to_of_key, and `to` of pieces and views are then those of
        the destination's smaller elements; lengths and `from` stay the sources' */
    fanin_dtype dtype;
    /** the client's: which of several holders serves which tensors. Clients of different seeds
        take the same tensor from different ones; one seed always makes one plan */
    uint64_t seed;
    /** those that all tables have the boxes of, and no others are looked at; NULL: all */
    const key_set *keys;
    /** whether the plan is still wanted, FANIN_ERR_TIMEOUT if not; may be NULL */
    work_stop *stop;
} plan_rules;

/**
 * Proves that the sources' boxes tile every tensor of rules->keys exactly (also those that
 * no target names), chooses one holder for each box, balanced by bytes, keeping neighbouring
 * boxes of a source together, and maps targets to pieces. A box of which more than
 * PLAN_SPLIT bytes are wanted may be shared by several holders, each serving neighbouring
 * rows. If all sources follow chunk rules the proof and the choice are made once per rule,
 * not per box.
 *
 * @p n_targets 0: every tensor whole, packed, at to = to_of_key[key]; rules->keys is NULL then.
 *
 * FANIN_ERR_INCOMPLETE: hole or conflicting overlap; names key, range and ranks.
 * FANIN_ERR_LIMIT: a tensor is cut into too many boxes in too many dimensions.
 * FANIN_ERR_MEMORY, FANIN_ERR_ARGUMENT (a target outside its tensor, targets' units, a dtype
 * that F32 is not converted to).
 */
fanin_status plan_build(const key_table *keys, const plan_source *sources,
                        size_t n_sources, const plan_target *targets, size_t n_targets,
                        const uint64_t *to_of_key, const plan_rules *rules, plan **out,
                        fanin_error *error);
void plan_free(plan **plan);

/** Without what lies between a piece's runs. */
uint64_t piece_bytes(const plan *plan, const piece *p);

/* ---- pieces as ranges of bytes (plan_slice.c) ---- */

/** At most so many ranges make a piece: what one request may ask for. */
#define PIECE_RANGES 4096

/** What is asked for where bytes are asked for. */
typedef struct piece_ranges {
    uint64_t count, length; /**< of each, all alike */
    const strided *landing; /**< from all of them, in a row; NULL: as they are */
} piece_ranges;

piece_ranges piece_ranges_of(const plan *plan, const piece *p);
/** Where range @p index begins, as a piece's offset. */
uint64_t piece_range_at(const plan *plan, const piece *p, uint64_t index);

/* ---- parts of a plan (plan_slice.c) ---- */

/** Where a piece is in its plan. */
typedef struct plan_place {
    uint32_t source, piece;
} plan_place;

/** A plan's pieces by group. */
typedef struct plan_index {
    size_t n_groups;
    uint64_t *first;    /**< n_groups + 1: of places */
    plan_place *places; /**< of a group ascending by source and piece */
} plan_index;

/** @p n_groups: more than the largest group of @p plan. Linear in pieces. @p stop as in
    plan_build(). FANIN_ERR_MEMORY, FANIN_ERR_LIMIT: 2^32 pieces of one source. */
fanin_status plan_index_build(const plan *plan, size_t n_groups, work_stop *stop,
                              plan_index *out, fanin_error *error);
void plan_index_free(plan_index *index);

/** Groups [first, first + count). */
typedef struct group_run {
    size_t first, count;
} group_run;

/**
 * What fills the groups of @p runs, which ascend and have none twice: a plan of the same sources,
 * which uses the views of @p whole and goes before it. Takes as long as what it holds. Its
 * `tensors` are groups that have pieces. @p stop as in plan_build(). FANIN_ERR_MEMORY.
 */
fanin_status plan_slice_build(const plan *whole, const plan_index *index,
                              const group_run *runs, size_t n_runs, work_stop *stop,
                              plan **out, fanin_error *error);
void plan_slice_free(plan **slice);
/** The piece's first byte in the destination, and the one after its last (as `to`: without a base).
    */
void plan_piece_reach(const plan *plan, const piece *p, uint64_t *low, uint64_t *high);

/** Whether those sources with use[i] tile everything (the proof alone; of rules->keys); false also
    if rules->stop stops it. @p rules may be NULL. */
bool plan_sufficient(const key_table *keys, const plan_source *sources,
                     size_t n_sources, const bool *use, const plan_rules *rules);

/* ---- one-sided reads ---- */

/** A piece inside a span. */
typedef struct span_piece {
    uint64_t offset; /**< bytes from the span's start to the piece's first element */
    uint64_t length; /**< contiguous bytes, if view is 0 */
    uint64_t to;
    /** as in piece, but `from` strides are those of the remote memory */
    uint32_t view;
} span_piece;

typedef struct span {
    uint32_t region;
    uint64_t offset, length; /**< bytes in the region; length <= the max given */
    uint64_t first, count;   /**< of plan_spans.pieces */
    bool direct;             /**< one piece, contiguous on both sides: no staging */
} span;

typedef struct plan_spans {
    span *spans;
    uint64_t n_spans;
    span_piece *pieces;
    uint64_t n_pieces;
    strided *views;
    uint32_t n_views;
} plan_spans;

typedef struct span_rule {
    uint64_t max_length; /**< of a span */
    uint64_t max_gap;    /**< bytes read for nothing to save one operation */
    /** a piece of at least so many contiguous bytes is a span of its own */
    uint64_t direct_from;
    /** shorter runs are read with the gaps between them, and sorted afterwards; 0: direct_from */
    uint64_t short_run;
    /** its reader walks views in the remote memory: pieces are not cut, whatever lies between their
        runs, and the other limits are of no account */
    bool walks_views;
} span_rule;

/**
 * Cuts what source @p index must bring into one-sided reads, ascending by region and
 * offset. Never leaves a region (@p regions gives lengths: a box outside of its region is
 * FANIN_ERR_PROTOCOL naming key and rank). Gaps are crossed only inside one region. @p stop: as
 * in plan_build().
 */
fanin_status plan_spans_build(const plan *plan, const key_table *keys,
                              const plan_source *sources, size_t index,
                              const region_table *regions, const span_rule *rule,
                              work_stop *stop, plan_spans **out, fanin_error *error);
void plan_spans_free(plan_spans **spans);

/* ------------------------------- telling a destination (plan_cut.c) ---- */

/** So many bytes at @p to (as in pieces, without the base) are about to be written; anything but
    FANIN_OK: they must not be. Called by who reads, which may be several threads at once. */
typedef fanin_status (*need_fn)(void *cookie, uint64_t to, uint64_t length,
                                fanin_error *error);
/** So many bytes at @p to are in place. Likewise. */
typedef void (*landed_fn)(void *cookie, uint64_t to, uint64_t length);
/** DIGEST_PIECE bytes are final at @p to, a multiple of that: instead of landed_fn. Thread: the
    pulling one. */
typedef void (*digested_fn)(void *cookie, uint64_t to, const digest *known);

/** Tells of every byte of a view whose first one is at @p to; neighbouring runs are told as
    one, so that tiny runs cost few calls. */
void landed_view(landed_fn landed, void *cookie, const strided *view, uint64_t to);

/* -------------- A source's pieces as the read requests that ask for them. */

/** A group of pieces that one read request asks for. */
typedef struct read_request {
    uint64_t first_piece;
    uint32_t n_pieces;
    uint32_t n_entries; /**< of the message */
    uint64_t first_entry;
    uint64_t bytes;
    /** some pieces are several ranges: read_list_spread() makes the entries of the message of those
        that are kept, one a piece or for several that are whole boxes */
    bool spread;
} read_request;

/** How one source of a plan is read by stream: made once, used by every pull. */
typedef struct read_list {
    read_request *requests;
    uint64_t n_requests;
    read_entry *entries;
} read_list;

/** Requests for the pieces of source @p index: neighbouring whole boxes become one entry. Linear.
    @p boxes and @p keys NULL: they are of no table, and each request is of one box. */
fanin_status read_list_build(const plan *plan, size_t index, const box_table *boxes,
                             const key_table *keys, work_stop *stop, read_list *out,
                             fanin_error *error);
/** @p out: r->n_entries of them. */
void read_list_spread(const read_list *list, const read_request *r, const plan *plan,
                      const plan_rank *pieces, read_entry *out);

#endif
