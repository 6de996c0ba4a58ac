/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file
 * A small world for tests of the planner: tensors, ranks with boxes in simulated memory,
 * and an executor that does by memcpy what a plan says. Failures end the test.
 */
#ifndef PLAN_WORLD_H
#define PLAN_WORLD_H

#include "dtype.h"
#include "plan/plan.h"

#define WORLD_RANKS 16
#define WORLD_REGIONS 3

typedef struct world_rank {
    box_record *records;
    uint64_t n_records, capacity;
    uint8_t *memory[WORLD_REGIONS];
    uint64_t used[WORLD_REGIONS];
    box_table *boxes;
} world_rank;

typedef struct world {
    key_entry *entries;
    uint32_t n_keys;
    key_table *keys;
    world_rank ranks[WORLD_RANKS];
    uint32_t n_ranks;
    plan_source sources[WORLD_RANKS]; /**< in rank order */
    size_t n_sources;
    uint64_t random;
    uint64_t seed; /**< of plans */
} world;

uint64_t world_random(world *w, uint64_t below);

void world_init(world *w, uint32_t n_ranks, uint64_t seed);
void world_free(world *w);
/** Keys are named in the order in which they are added. All before the first box. */
uint32_t world_key(world *w, fanin_dtype dtype, uint32_t n_dims, const uint64_t *shape);

typedef enum world_layout {
    LAYOUT_PACKED,
    LAYOUT_ROWS, /* rows with room between them */
    LAYOUT_MIXED /* permuted dimensions, negative strides */
} world_layout;

/** Adds a box (elements) behind what the rank holds of a region; keys ascend. */
void world_hold(world *w, uint32_t rank, uint32_t key, const block *b, uint32_t region,
                uint64_t gap, world_layout layout);
/** chunk @p index of @p parts on @p dim of every key, if not empty. */
void world_hold_chunks(world *w, uint32_t rank, uint32_t dim, uint32_t parts,
                       uint32_t index);
/** Makes the tables, fills the memory. Ranks with leave_out[i] are no sources then. */
void world_seal(world *w, const bool *leave_out);
uint8_t world_byte(uint32_t key, uint64_t index); /**< of a tensor's packed bytes */

/** A destination: bytes and the targets in it. */
typedef struct landing {
    uint8_t *bytes;
    uint64_t size;
    plan_target *targets;
    size_t n_targets;
    uint64_t *to_of_key; /* instead of targets */
    fanin_dtype dtype;   /* of what is published as F32; 0: F32 */
    bool as_is;          /* what is added from now on is not converted */
} landing;

/** @p dtype: as landing.dtype. */
void landing_whole(landing *l, const world *w, fanin_dtype dtype);
/** Nothing yet: for landing_add(). */
void landing_init(landing *l, fanin_dtype dtype);
/** A block of @p key, with random strides if @p strided, appended to the landing. */
void landing_add(landing *l, world *w, uint32_t key, const block *b, bool strided);
void landing_free(landing *l);
/** Marks all bytes as untouched. */
void landing_clear(landing *l);
/** Whether every byte is what must have landed, and the others are untouched. */
void landing_compare(const world *w, const landing *l);

fanin_status world_plan(const world *w, const landing *l, plan **out,
                        fanin_error *error);
/** Checks the plan's promises. */
void world_check_plan(const world *w, const landing *l, const plan *p);
/** Fills l->bytes by the plan's pieces and compares every byte. */
void world_execute(const world *w, landing *l, const plan *p);
/** The same by slices of random targets each (whole tensors: keys). */
void world_execute_slices(world *w, landing *l, const plan *p);
/** The same by one-sided spans. */
void world_execute_spans(const world *w, landing *l, const plan *p,
                         const span_rule *rule);

#endif
