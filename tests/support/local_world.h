/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file
 * A small world of servers inside the test's own process: real servers on ephemeral ports,
 * real sockets and paths, and full control over what each rank holds and does.
 */
#ifndef LOCAL_WORLD_H
#define LOCAL_WORLD_H

#include <fanin/fanin.h>

#define WORLD_MAX_RANKS 64

/** How tensors are cut over the ranks. */
typedef enum world_cut {
    CUT_CHUNK0,  /**< torch.chunk on dimension 0; trailing ranks may be empty */
    CUT_CHUNK1,  /**< the same on dimension 1 (dimension 0 of vectors) */
    CUT_GRID,    /**< two ranks on dimension 1 times the rest on 0 (FSDP + TP) */
    CUT_STRIDED, /**< dimension 0 dealt out in turn, so that a rank has several boxes */
    CUT_REPLICATE, /**< every rank holds everything */
    CUT_HSDP,      /**< two replicas of a CUT_CHUNK0 over half the ranks */
} world_cut;

typedef struct world_tensor {
    const char *name;
    fanin_dtype dtype;
    uint32_t n_dims;
    uint64_t shape[FANIN_MAX_DIMS];
} world_tensor;

typedef struct world_rank {
    fanin_server *server;
    uint8_t *memory; /**< all shards, 64-byte aligned each */
    size_t size;
    uint64_t step;
    int port_keeper; /**< of a stopped rank: no other test's rank gets its port; 0: none */
} world_rank;

typedef struct world {
    size_t size;
    world_cut cut;
    const world_tensor *tensors;
    size_t n_tensors;
    uint8_t id[16];
    world_rank ranks[WORLD_MAX_RANKS];
    char addresses[WORLD_MAX_RANKS][32];
    const char *address_list[WORLD_MAX_RANKS];
    uint32_t lease_ms, flags;
    uint32_t salt; /**< other bytes for the same steps */
    bool
        snapshots; /**< commits publish copies; the shards are overwritten after each */
    uint32_t
        deltas; /**< patches that snapshots keep; then a step changes one of some 400 bytes */
} world;

/** A few LoRA-like tensors of uneven shapes (10 x 33, vectors, an empty one, 3-d). */
extern const world_tensor world_lora[];
extern const size_t world_lora_count;

/** Starts @p size servers that have put everything, nothing committed. Fails the test. */
void world_start(world *w, size_t size, world_cut cut, const world_tensor *tensors,
                 size_t n_tensors);
/** The same of world_lora; unless @p step is 0 it is committed. */
void world_begin(world *w, size_t size, world_cut cut, uint64_t step);
/** Stops all; @p w is as it was before its start, of no settings. */
void world_stop(world *w);
/** Stops / starts again (new incarnation, same world id and, if it can, the same port) one rank. */
void world_stop_rank(world *w, size_t rank);
void world_restart_rank(world *w, size_t rank);

/** begin_update, bytes of @p step, commit on one rank / all ranks. */
void world_commit_rank(world *w, size_t rank, uint64_t step);
void world_commit(world *w, uint64_t step);
/** Writes one rank's shards as of @p step, without any protocol. */
void world_write(world *w, size_t rank, uint64_t step);

/** A tensor's row-major bytes at @p step, which the caller frees; and the one at @p offset. */
uint8_t *world_whole(const world *w, size_t tensor, uint64_t step);
uint8_t world_byte(const world *w, size_t tensor, uint64_t step, uint64_t offset);
uint64_t world_bytes(const world_tensor *t);
/** Fails the test unless @p bytes are the tensor at @p step. */
void world_check(const world *w, size_t tensor, uint64_t step, const uint8_t *bytes);

/** @p t, of which these boxes are meant. */
fanin_tensor world_boxes(const world_tensor *t, fanin_box *boxes, size_t n);

/** A connected client of @p path (fails the test). */
fanin_client *world_client(const world *w, fanin_path path);
fanin_client *world_client_with(const world *w, const fanin_client_config *config);

/** Pulls everything into fresh memory and checks every byte against result's step. */
fanin_status world_pull(const world *w, fanin_client *client,
                        const fanin_pull_options *options, fanin_result_info *info_out,
                        fanin_error *error);

/** The same by a rule. */
fanin_status world_pull_step(const world *w, fanin_client *client, fanin_step_rule rule,
                             uint64_t step, uint32_t timeout_ms, fanin_error *error);
/** The same, the step it has; fails the test if it has none in 20 s. */
uint64_t world_pulled(const world *w, fanin_client *client, fanin_step_rule rule,
                      uint64_t step);

/** Whether the kernel reads other processes here; prints why not. */
bool world_has_cma(void);
/** Whether there is a UCX. */
bool world_has_ucx(void);

#endif
