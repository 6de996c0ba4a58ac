/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file
 * A rank that publishes a LoRA pair of F32, a proxy before it that strikes just before it is asked
 * for digests, and a client that only knows the proxy.
 */
#ifndef VERIFY_SCENE_H
#define VERIFY_SCENE_H

#include "rank_proxy.h"
#include <fanin/fanin.h>

#define SCENE_ROWS 24
#define SCENE_COLUMNS 700 /* rows are longer than a piece of the digest is as BF16 */
#define SCENE_FLOATS ((size_t)SCENE_ROWS * SCENE_COLUMNS) /* of lora_A, and of lora_B */
#define SCENE_BYTES (2 * SCENE_FLOATS * sizeof(float))
#define SCENE_A "base_model.model.layers.0.q_proj.lora_A.weight"
#define SCENE_B "base_model.model.layers.0.q_proj.lora_B.weight"

typedef struct verify_scene {
    void *memory;  /**< SCENE_BYTES that are published: A, then B */
    float *floats; /**< the same as the CPU sees it */
    fanin_server *server;
    rank_proxy proxy;
    fanin_client *client;
} verify_scene;

/** Publishes step 1. The memory stays the caller's. Fails the test. */
void scene_start(verify_scene *s, void *memory, float *floats, void (*trigger)(void *));
void scene_stop(verify_scene *s);
/** Fills the tensors as of @p step and commits it. */
void scene_publish(verify_scene *s, uint64_t step);
/** Triggers: a trainer that does not say that it writes; one that updates to step 2; none. */
void scene_write_in_silence(void *scene);
void scene_update(void *scene);
void scene_leave_alone(void *scene);

/** Pulls with verify. @p dtype 0: as published. */
fanin_status scene_pull(verify_scene *s, fanin_dtype dtype, void *to,
                        int64_t row_stride, fanin_result_info *info,
                        fanin_error *error);
fanin_status scene_pull_directory(verify_scene *s, const char *directory, bool verify,
                                  fanin_result_info *info, fanin_error *error);
/** The error is that of bytes that differ: names rank, address and @p key. */
void scene_assert_unequal(const verify_scene *s, fanin_status status, const char *key,
                          const fanin_error *error);

#endif
