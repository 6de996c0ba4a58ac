/* SPDX-License-Identifier: Apache-2.0 */
/** @file Proof that bytes are the pattern's. */
#ifndef CHECK_H
#define CHECK_H

#include <fanin/client.h>

/** Whether the publication says that it follows the pattern; asks the ranks. Errors are
    fanin_client_metadata()'s. */
fanin_status check_follows_pattern(fanin_client *client, const char *publication,
                                   uint32_t timeout_ms, bool *follows_out,
                                   fanin_error *error);

/**
 * Compares a whole tensor of @p step, read through @p read in pieces of at most 1 MiB.
 * FANIN_ERR_MISMATCH names key, offset and, where it can be told, the step that the wrong
 * bytes are of.
 */
typedef bool (*check_read_fn)(void *cookie, uint64_t offset, uint8_t *to, size_t size);
fanin_status check_tensor(const char *publication, const char *name, uint64_t step,
                          uint64_t bytes, check_read_fn read, void *cookie,
                          fanin_error *error);

/** The same of a tensor in memory. */
fanin_status check_memory(const char *publication, const char *name, uint64_t step,
                          const uint8_t *memory, uint64_t bytes, fanin_error *error);

/** Every tensor of @p directory's adapter_model.safetensors. FANIN_ERR_MISMATCH, FANIN_ERR_IO,
    FANIN_ERR_CANCELLED (the user interrupted). */
fanin_status check_directory(const char *directory, const char *publication,
                             uint64_t step, uint64_t *bytes_out, fanin_error *error);

#endif
