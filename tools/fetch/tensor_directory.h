/* SPDX-License-Identifier: Apache-2.0 */
/** @file The tensors of a directory: of a PEFT adapter, or of a model in one file or in several. */
#ifndef TENSOR_DIRECTORY_H
#define TENSOR_DIRECTORY_H

#include <fanin/safetensors.h>
#include <jansson.h>

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

#endif
