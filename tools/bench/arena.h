/* SPDX-License-Identifier: Apache-2.0 */
/** @file Memory for a publication's tensors, or for parts of them laid out as an engine has them,
    and what a pull needs to fill it. */
#ifndef ARENA_H
#define ARENA_H

#include "fetch/mapping_file.h"
#include "trainer/device_shards.h"

#include <fanin/client.h>

typedef struct arena {
    int device;      /**< DEVICE_HOST, or the CUDA device whose memory it is */
    uint8_t *memory; /**< pre-faulted; one parameter after the other, well aligned */
    uint64_t size;
    uint64_t bytes;        /**< of the boxes */
    fanin_tensor *tensors; /**< that have boxes here */
    fanin_box *boxes;
    size_t count, capacity;
    fanin_destination *into; /**< the same, described once */
    fanin_dtype half;        /**< what F32 tensors are here; 0: F32 */
    uint8_t *copy;           /**< a device's memory as arena_read() left it */
    gpu *gpu;
    gpu_stream *stream;
} arena;

/** Reads the publication's catalog and makes memory for it: the host's, faulted in, or of
    @p device. @p half: tensors that are F32 there have that dtype here; 0: all as they are.
    @p mapping, a file, says where tensors go; NULL: every one whole and by itself. Errors are
    fanin_client_catalog()'s, FANIN_ERR_MEMORY, device_load()'s, gpu.h's, mapping_read()'s and
    engine_layout_of_mapping()'s. To be freed also after an error. */
fanin_status arena_make(fanin_client *client, const char *publication,
                        uint32_t timeout_ms, int device, fanin_dtype half,
                        const char *mapping, arena *out, fanin_error *error);
void arena_free(arena *a);

/** All of the memory, for the host to read until the next call; *@p out + (address of a box -
    memory) is where the box is. */
fanin_status arena_read(arena *a, const uint8_t **out, fanin_error *error);
/** Overwrites all of it, so that what is read later was written later. */
fanin_status arena_spoil(arena *a, fanin_error *error);

/** Anonymous memory with its pages in place; NULL without memory. */
void *arena_map(uint64_t size);

/** A box of a tensor and its place. */
typedef struct placed_box {
    size_t tensor;
    fanin_box box; /**< address NULL; strides all 0: packed */
    uint64_t at;   /**< from the first parameter's first byte on */
} placed_box;

typedef struct engine_layout {
    placed_box *boxes; /**< ascending by tensor */
    size_t count, capacity;
    uint64_t size; /**< of all parameters and what lies between them */
} engine_layout;

/**
 * The parameters that a mapping tells, one behind the other. A parameter that is wider than what is
 * published lies beside itself, as narrow. FANIN_ERR_MISMATCH: the tensors are not those that were
 * recorded, or a module needs the engine's loader; names it.
 */
fanin_status engine_layout_of_mapping(const fanin_tensor *tensors, size_t count,
                                      const mapping_file *m, engine_layout *out,
                                      fanin_error *error);
void engine_layout_free(engine_layout *l);

#endif
