/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file
 * A stand-in trainer: a world of rank processes, forked from this one before it uses the
 * library, that publish tensors and rewrite them in place. They end with their parent.
 */
#ifndef RANKS_H
#define RANKS_H

#include "fetch/options.h"
#include "fetch/output.h"
#include "trainer/models.h"

#include <fanin/server.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <sys/types.h>

/** How ranks publish, and in which memory. All zero: host memory, by reference. */
typedef struct rank_publishing {
    const int *devices; /**< DEVICE_HOST or a CUDA device; NULL: host memory */
    size_t n_devices;   /**< rank r has devices[r * n_devices / world_size] */
    bool snapshot;
    fanin_dtype cast; /**< of snapshots; 0: none */
    bool no_stream;   /**< wait for the device, then commit without a stream */
    bool timed; /**< all else done, each commit waits for its effect: ranks_commits() */
} rank_publishing;

typedef struct rank_options {
    uint32_t world_size;
    uint32_t
        replicate; /**< divides world_size; rank r holds part r mod (world/replicate) */
    uint32_t shard_dim;
    uint16_t base_port;                     /**< 0: ephemeral ports */
    const char *bind, *allow, *server_name; /**< NULL: the library's defaults */
    credential_files credentials;
    uint32_t flags; /**< FANIN_SERVER_... */
    uint32_t lease_ms, data_threads;
    int32_t nice; /**< added to that of the threads that serve */
    uint8_t world_id[FANIN_WORLD_ID_SIZE];
    bool full; /**< they publish whole models, "full:R" */
    char **
        runs; /**< "R", or with the kind before it; checked by trainer_runs_resolve() */
    size_t n_runs;
    const tensor_list *tensors;
    const fanin_pair *pairs;
    size_t n_pairs;
    uint64_t first_step;
    uint64_t steps;          /**< commits; 0: endless */
    int64_t update_every_ms; /**< how long a step stays; negative: for ever */
    bool uncoupled;          /**< no barrier between ranks */
    bool keep_going;         /**< the others go on when a rank dies */
    bool extents;     /**< tell the parent where shards lie, see ranks_extents() */
    fanin_log_fn log; /**< of the servers; NULL: none */
    void *log_cookie;
    bool
        readers_gone; /**< at the end all readers have closed: the ranks wait to see it */
    rank_publishing publishing;
} rank_options;

/** A shard's memory in a rank's process; of the first run. */
typedef struct rank_extent {
    uint64_t address, bytes;
} rank_extent;

enum { RANK_COMMITS = 64 };

/** What a rank tells its parent and the other ranks. */
typedef struct rank_slot {
    _Atomic uint32_t alive;   /**< 0: the process ended */
    _Atomic uint32_t ready;   /**< the first step is committed */
    _Atomic uint64_t arrived; /**< barriers that the rank has come to */
    _Atomic uint64_t step;    /**< last committed */
    pid_t pid;
    uint16_t port;
    uint64_t commit_ns[RANK_COMMITS]; /**< a ring of the last ones */
    _Atomic uint32_t commits;
    /* Written before the process ends, read after it ended. */
    bool failed, has_stats;
    fanin_error error;
    fanin_server_stats stats; /**< has_stats */
} rank_slot;

typedef struct ranks ranks;

/**
 * Forks the ranks. SIGINT, SIGTERM and SIGCHLD are blocked in this process from now on.
 * @p options and what it points to must live until ranks_stop(). 0, or an exit status
 * after a message (*ranks_out is then NULL).
 */
int ranks_start(const rank_options *options, ranks **ranks_out);

/** Waits until every rank committed its first step: 0, or an exit status after a message. */
int ranks_wait_ready(ranks *r, uint32_t timeout_ms);

/** Until SIGINT or SIGTERM (returns 0) or a rank's death (its exit status, told). */
int ranks_serve(ranks *r);

/** Ends all ranks, lets their readers end for at most the lease; kills what does not end.
    ranks_slot() works afterwards. Returns 0 or an exit status after a message. */
int ranks_stop(ranks *r);
/** NULL and *r == NULL are fine. Stops first if that was not done. */
void ranks_free(ranks **r);

/** What the rank tells; until ranks_free(). */
const rank_slot *ranks_slot(const ranks *r, uint32_t rank);
/** Where they listen: all of them, one, and all as the text of a target, to be freed. */
const char *ranks_host(const ranks *r);
output_text ranks_address(const ranks *r, uint32_t rank);
char *ranks_target(const ranks *r);
/** One entry a tensor. */
const rank_extent *ranks_extents(const ranks *r, uint32_t rank);
/** Until every rank has committed @p step: 0, or an exit status after a message. */
int ranks_wait_step(ranks *r, uint64_t step, uint32_t timeout_ms);

/** How long the rank's last timed commits took, from the call to the effect; their number. */
uint32_t ranks_commits(const ranks *r, uint32_t rank, uint64_t out[RANK_COMMITS]);

#endif
