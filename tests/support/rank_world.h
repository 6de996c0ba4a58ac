/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file
 * A world of rank processes (the tool's stand-in trainer, see lab.h) and pulls from it into memory,
 * judged by the bytes' pattern.
 */
#ifndef RANK_WORLD_H
#define RANK_WORLD_H

#include "trainer/models.h"
#include "trainer/ranks.h"
#include <fanin/fanin.h>

typedef struct rank_world {
    tensor_list tensors;
    rank_options options;
    ranks *ranks;
    char (*addresses)[32];
    const char **address_list;
    uint64_t *seeds; /**< of "lora:0:<name>" */
} rank_world;

/** A destination for everything. */
typedef struct landing {
    size_t size;
    uint8_t *arena;
    fanin_tensor *wanted;
    fanin_box *boxes;
} landing;

/** Sensible defaults for @p shape ("small", "dense", ...), of tensors of @p dtype. */
void rank_world_init(rank_world *w, const char *shape, fanin_dtype dtype,
                     uint32_t world_size);
/** Fills addresses and seeds for ranks that somebody else started (see lab.h). */
void rank_world_describe(rank_world *w, const char *host, const uint16_t *ports);
/** Seed of a tensor's pattern in run 0. */
uint64_t rank_world_seed(const tensor_spec *t);
void rank_world_free(rank_world *w);

void landing_make(const rank_world *w, landing *l);
void landing_free(landing *l);

/** Whether every byte is that of @p step; else prints the first that is not. */
bool landing_is_step(const rank_world *w, const landing *l, uint64_t step);

/** One pull of everything. */
fanin_status rank_world_pull(const rank_world *w, fanin_client *client,
                             const fanin_pull_options *options, const landing *l,
                             fanin_result_info *info_out, fanin_error *error);

#endif
