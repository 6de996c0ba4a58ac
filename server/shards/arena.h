/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file
 * Arenas: memory of the server's own that a snapshot publication's commits copy shards into, one
 * arena being published while the other one is filled. An arena has a part on the host and one on
 * each CUDA device that holds shards; a box lies at the same offset of its part in both.
 *
 * Which arena may be filled when is none of this file's business.
 */
#ifndef ARENA_H
#define ARENA_H

#include "clock.h"
#include "copy_list.h"
#include "gpu.h"
#include "shards/patch_maker.h"
#include "shards/shard.h"

#include <stdatomic.h>

#define ARENAS 2
#define ARENA_ALIGNMENT 512 /**< of each box */

typedef struct arena_part {
    fanin_memory memory;
    uint64_t length;
    uint8_t *base[ARENAS];
    gpu_range in[ARENAS]; /**< device memory: the allocation */
    gpu_stream *stream;   /**< device memory: what copies are queued on */
    /* for patches of device memory (publish/patches.c): */
    bool asked_for_room;
    struct patch_room *room; /**< NULL: there is none */
    void *scratch;           /**< of the kernels, on the device; likewise */
} arena_part;

/** Two arenas. Shared by the catalogs whose boxes lie in them. */
typedef struct arena_set {
    atomic_uint references;
    gpu *gpu; /**< NULL: no part is device memory */
    uint32_t n_parts;
    arena_part parts[GPU_MAX_DEVICES + 1];
} arena_set;

/** Entries of host memory that one thread copies in one go. */
typedef struct arena_batch {
    uint64_t first, count;
} arena_batch;

/** What a commit copies: from the shards' memory to offsets in the parts. Read-only but for
    `zeroed`. */
typedef struct arena_plan {
    arena_set *arenas; /**< with a reference */
    copy_list host;
    arena_batch *batches; /**< of host.entries */
    uint64_t n_batches;
    gpu_table *tables[GPU_MAX_DEVICES + 1]; /**< of the parts; NULL: host */
    bool zeroed[ARENAS];                    /**< device_patch_prepare() was there */
} arena_plan;

/**
 * Plans the copies of @p shards, F32 ones converted to @p cast unless that is 0, into the arenas
 * of @p before (may be NULL) if its parts are just as large, into new ones otherwise. *packed_out
 * gets what there is to publish: the same shards, packed, in arena 0; to be freed also on failure.
 * @p g may be NULL without device memory. Blocks for allocations and uploads, takes no lock.
 * FANIN_ERR_MEMORY names the device and the bytes; FANIN_ERR_TRANSPORT.
 */
fanin_status arena_plan_build(gpu *g, const shard_set *shards, fanin_dtype cast,
                              const arena_plan *before, shard_set *packed_out,
                              arena_plan **out, fanin_error *error);
/** Gives the reference to the arenas back; true: it was the last one. */
bool arena_plan_drop(arena_plan *plan);
/** After arena_plan_drop(). @p last as it said: frees the arenas too. Waits for queued copies. */
void arena_plan_free(arena_plan *plan, bool last);

/** What is to be added to @p address of arena 0 to get the same place of arena 1; *in_out: the
    allocation there, NULL: host memory. */
uint64_t arena_distance(const arena_set *arenas, uint64_t address,
                        const gpu_range **in_out);

/** Makes the patch from arena @p before to what arena_copy_host() copies, of at most @p most bytes;
    the arenas have a part on the host alone. NULL: no memory. */
patch_maker *arena_patch_maker(const arena_plan *plan, unsigned before, uint64_t most);
/** Copies the host's shards with a few threads, and shows @p patch (NULL: nobody) what was copied.
    On return all is copied, or *@p bad is the address of a byte that cannot be read (0: all can).
    Needs neither descriptors nor memory. */
void arena_copy_host(const arena_plan *plan, unsigned arena, patch_maker *patch,
                     uint64_t *bad);
/**
 * Queues the copies of one device part on its stream, behind what is on the caller's stream now;
 * @p after NULL: at once. Does not block.
 */
fanin_status arena_copy_part(const arena_plan *plan, uint32_t part, unsigned arena,
                             const fanin_stream *after, fanin_error *error);
/** Waits for what is queued. FANIN_ERR_TIMEOUT: it still is. */
fanin_status arena_wait(const arena_plan *plan, deadline at);

#endif
