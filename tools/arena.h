/* SPDX-License-Identifier: Apache-2.0 */
/** @file Memory for all tensors of a publication, and what a pull needs to fill it. */
#ifndef ARENA_H
#define ARENA_H

#include <fanin/client.h>

typedef struct arena {
    uint8_t *memory; /**< pre-faulted; one tensor after the other, 64-byte aligned */
    uint64_t size;
    uint64_t bytes; /**< of tensors */
    fanin_tensor *tensors;
    fanin_box *boxes;
    size_t count, capacity;
} arena;

/** Reads the publication's catalog and maps memory for it, faulted in. Errors are
    fanin_client_catalog()'s, and FANIN_ERR_MEMORY. To be freed also after an error. */
fanin_status arena_make(fanin_client *client, const char *publication,
                        uint32_t timeout_ms, arena *out, fanin_error *error);
void arena_free(arena *a);

/** Anonymous memory with its pages in place; NULL without memory. */
void *arena_map(uint64_t size);

#endif
