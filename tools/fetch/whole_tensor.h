/* SPDX-License-Identifier: Apache-2.0 */
/** @file Whole tensors that are pulled to memory, or lie in a file. */
#ifndef WHOLE_TENSOR_H
#define WHOLE_TENSOR_H

#include <fanin/client.h>
#include <fanin/error.h>
#include <stddef.h>

typedef struct whole_tensor {
    char *name; /**< owned */
    fanin_dtype dtype;
    uint32_t n_dims;
    uint64_t shape[FANIN_MAX_DIMS];
    int descriptor;         /**< of its file; -1: it is in memory */
    uint64_t bytes, offset; /**< in the file, or in the memory */
} whole_tensor;

/** What of it a pull fills: all, at @p memory. @p out refers to @p box and the tensor's name. */
void whole_tensor_describe(const whole_tensor *t, uint8_t *memory, fanin_box *box,
                           fanin_tensor *out);

/** Pulls @p list to @p memory, one tensor right behind the other. Errors are fanin_client_pull()'s.
    */
fanin_status whole_tensors_pull(fanin_client *client, const fanin_pull_options *options,
                                const whole_tensor *list, size_t count, uint8_t *memory,
                                fanin_result **result_out, fanin_error *error);

/** Frees the names and the list. */
void whole_tensors_free(whole_tensor *list, size_t count);

/** Pages of @p bytes for what is pulled, given back by munmap(); NULL after filling @p error. */
uint8_t *whole_tensors_memory(uint64_t bytes, size_t *mapped_out, fanin_error *error);

/* --------------------------------------------------------------------- files */

/**
 * Makes @p path, mode 0600, whole or not at all, and on the disk: never over what is there, nor
 * through a link. FANIN_ERR_EXISTS, FANIN_ERR_IO.
 */
fanin_status whole_file_write(const char *path, const void *bytes, size_t size,
                              fanin_error *error);

#endif
