/* SPDX-License-Identifier: Apache-2.0 */
/** @file What stands in a region's remote key on the path cuda_ipc (PROTOCOL.md, "Regions"). */
#ifndef IPC_KEY_H
#define IPC_KEY_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define IPC_KEY_SIZE 96

/** A stretch of an allocation that another process of this host may map. */
typedef struct ipc_key {
    uint8_t handle[64]; /**< CUipcMemHandle of the allocation */
    uint8_t uuid[16];   /**< of the GPU that holds it */
    uint64_t offset;    /**< bytes from the allocation's start to the region's */
    uint64_t length;    /**< bytes of the allocation */
} ipc_key;

void ipc_key_encode(const ipc_key *key, uint8_t out[IPC_KEY_SIZE]);
/** False: another size, or a region of @p region_length bytes does not fit the allocation. */
bool ipc_key_decode(const uint8_t *data, size_t size, uint64_t region_length,
                    ipc_key *out);

#endif
