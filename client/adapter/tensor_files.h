/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file
 * Which tensors go into which safetensors file of a directory, and where each file begins in the
 * one range of addresses that a pull fills. Pure.
 */
#ifndef TENSOR_FILES_H
#define TENSOR_FILES_H

#include "catalog.h"
#include <fanin/safetensors.h>

#define SAFETENSORS_HEADER_MAX ((uint64_t)100 * 1000 * 1000)
#define SAFETENSORS_LENGTH 8 /**< bytes of the header's length in front of it */

/** A tensor that is to be written. */
typedef struct safetensors_item {
    const char *name;
    fanin_dtype dtype;
    uint32_t n_dims;
    const uint64_t *shape;
    uint64_t bytes;
} safetensors_item;

/** Where everything goes. */
typedef struct safetensors_layout {
    /** to be freed; its length, JSON and padding: what precedes the data */
    uint8_t *header;
    uint64_t header_size;
    uint64_t file_size;
} safetensors_layout;

/**
 * Lays out a file as the reference writer does: order by descending dtype, then by name;
 * compact JSON that begins with the metadata {"format":"pt"}; the header padded with blanks
 * to a multiple of 8. @p items ascend by name, without duplicates. offsets_out[i]: item i's
 * first byte in the file. Linear.
 *
 * FANIN_ERR_MISMATCH (a name that is not UTF-8 or that the format reserves, more than the
 * format's 100 MB of header; says which), FANIN_ERR_MEMORY.
 */
fanin_status safetensors_lay_out(const safetensors_item *items, size_t count,
                                 uint64_t *offsets_out, safetensors_layout *out,
                                 fanin_error *error);

/**
 * Parses a header: @p text is what follows the file's first eight bytes, @p size bytes,
 * @p file_size the whole file's. Bytes are not trusted; memory is bounded by a small multiple
 * of @p size. The result has no descriptor. FANIN_ERR_MISMATCH (not a strictly valid file;
 * says why), FANIN_ERR_MEMORY.
 */
fanin_status safetensors_parse(const char *text, size_t size, uint64_t file_size,
                               fanin_safetensors **out, fanin_error *error);

#define MODEL_FILE "model.safetensors"
#define MODEL_INDEX_FILE "model.safetensors.index.json"
#define MODEL_MAX_FILES 99999 /**< "model-00001-of-99999.safetensors" */
#define TENSOR_FILE_NAME 64   /**< bytes of a file's name, with its NUL */
/** Bytes of tensors in one file of a model, if nothing else is said. */
#define MODEL_FILE_BYTES ((uint64_t)5 * 1000 * 1000 * 1000)

/** One of the files. */
typedef struct tensor_file {
    char name[TENSOR_FILE_NAME];
    uint64_t at; /**< in the range; whole pages */
    safetensors_layout layout;
} tensor_file;

typedef struct tensor_files {
    tensor_file *files; /**< side by side, ascending by `at` */
    size_t count;
    uint64_t span;       /**< bytes of the range, up to the last file's end */
    uint64_t bytes;      /**< of the files together */
    uint64_t largest;    /**< bytes of the largest */
    uint64_t *to_of_key; /**< where in the range each key's bytes go */
    char *index;         /**< text of MODEL_INDEX_FILE; NULL: one file needs none */
    size_t index_size;
} tensor_files;

/**
 * One file @p name of all tensors of @p keys; names[i] is key i's in the file. @p order: the keys,
 * ascending by that name. FANIN_ERR_MISMATCH, FANIN_ERR_MEMORY, as safetensors_lay_out().
 */
fanin_status tensor_files_one(const key_table *keys, const char *name,
                              const char *const *names, const uint32_t *order,
                              tensor_files *out, fanin_error *error);

/**
 * A model's files as Hugging Face's writers cut them: tensors one after the other, layers in the
 * order of their numbers, a new file where one would have more than @p most bytes (0:
 * MODEL_FILE_BYTES) of tensors, a larger tensor alone. One file is MODEL_FILE; several are
 * "model-00001-of-00002.safetensors" and so on, with an index. @p page: what files begin at
 * multiples of.
 *
 * FANIN_ERR_LIMIT (more than MODEL_MAX_FILES), and those of tensor_files_one().
 */
fanin_status tensor_files_of_model(const key_table *keys, uint64_t most, uint64_t page,
                                   tensor_files *out, fanin_error *error);

void tensor_files_free(tensor_files *files);

/** Whether @p name is one that tensor_files_of_model() gives to a file of tensors. */
bool tensor_files_is_model(const char *name);

/** The file at @p offset of the range; offset < span. */
size_t tensor_files_at(const tensor_files *files, uint64_t offset);

#endif
