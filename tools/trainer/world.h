/* SPDX-License-Identifier: Apache-2.0 */
/** @file The options that shape a world of stand-in ranks, shared by serve and bench. */
#ifndef WORLD_H
#define WORLD_H

#include "fetch/options.h"
#include "trainer/ranks.h"

enum { WORLD_OPTIONS = 16 };

typedef struct world_options {
    int world_size, base_port, replicate, shard_dim, lease_ms;
    int open, trusted, no_ucx;
    char *bind, *allow, *server_name, *world_id;
} world_options;

/** Defaults: -1 where a number was not given. */
void world_init(world_options *options);

/** Fills @p table, to be included. @p size: with --world-size and --no-ucx (which commands
    that connect have already). */
void world_table(world_options *options, bool size,
                 struct poptOption table[WORLD_OPTIONS]);

/** Checks and writes to @p out what it is about; a random world id if none is given. 0, or an
    exit status after a message. */
int world_resolve(const command *self, const world_options *options, rank_options *out);

#endif
