/* SPDX-License-Identifier: Apache-2.0 */
/** @file The tensors of a directory: of a PEFT adapter, or of a model in one file or in several.
    And lists of whole tensors, which are pulled to memory. */
#ifndef TENSOR_DIRECTORY_H
#define TENSOR_DIRECTORY_H

#include <fanin/client.h>
#include <fanin/error.h>
#include <fanin/safetensors.h>
#include <jansson.h>
#include <stddef.h>

#define TENSORS_OF_ADAPTER "adapter_model.safetensors"
#define TENSORS_OF_MODEL "model.safetensors"
#define TENSORS_INDEX "model.safetensors.index.json"

/** Where a tensor is. */
typedef struct tensor_place {
    size_t file;
    fanin_safetensors_entry entry; /**< its name lives as long as the directory */
} tensor_place;

typedef struct tensor_directory {
    char **names; /**< of the files, in order */
    fanin_safetensors **files;
    size_t n_files;
    tensor_place *tensors; /**< ascending by name */
    size_t count;
} tensor_directory;

/**
 * Opens the files. @p model: model.safetensors, beside which no others and no index may lie, else
 * those that the index names, whose tensors must be the index's and no others; otherwise the
 * adapter's. FANIN_ERR_NOT_FOUND (there is none of these files), FANIN_ERR_MISMATCH (what is there
 * is not what the format says, or more), FANIN_ERR_IO, FANIN_ERR_MEMORY. On failure @p out is
 * empty.
 */
fanin_status tensor_directory_open(const char *directory, bool model,
                                   tensor_directory *out, fanin_error *error);
void tensor_directory_close(tensor_directory *d);

/** NULL: there is none of that name. */
const tensor_place *tensor_directory_find(const tensor_directory *d, const char *name);

/** A file of the directory as JSON; NULL after filling @p error: FANIN_ERR_NOT_FOUND,
    FANIN_ERR_MISMATCH. */
json_t *tensor_directory_json(const char *directory, const char *name,
                              fanin_error *error);

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

/** All zero: empty. */
typedef struct whole_tensors {
    whole_tensor *list;
    size_t count, capacity;
    uint64_t bytes; /**< of all */
} whole_tensors;

/** Appends one that lies behind the others, in memory. */
whole_tensor *whole_tensors_add(whole_tensors *w, const char *name, fanin_dtype dtype,
                                uint32_t n_dims, const uint64_t *shape, uint64_t bytes);

/** Pulls @p list to @p memory, one tensor right behind the other. Errors are fanin_client_pull()'s.
    */
fanin_status whole_tensors_pull(fanin_client *client, const fanin_pull_options *options,
                                const whole_tensor *list, size_t count, uint8_t *memory,
                                fanin_result **result_out, fanin_error *error);

void whole_tensors_free(whole_tensors *w);

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
