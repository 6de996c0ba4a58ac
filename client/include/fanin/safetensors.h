/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file
 * Reads safetensors files, strictly. The library refuses an invalid file and says what is wrong; it
 * does not guess. For tools that serve or check an adapter directory.
 */
#ifndef FANIN_SAFETENSORS_H
#define FANIN_SAFETENSORS_H

#include <fanin/types.h>

#ifdef __cplusplus
extern "C" {
#endif

/** An open file with its parsed header. Immutable: any threads may use it at once. */
typedef struct fanin_safetensors fanin_safetensors;

/** A tensor of the file. The strings belong to the fanin_safetensors. */
typedef struct fanin_safetensors_entry {
    size_t struct_size; /**< set by the caller: sizeof(fanin_safetensors_entry) */
    const char *name;
    fanin_dtype dtype;
    uint32_t n_dims;
    uint64_t shape[FANIN_MAX_DIMS];
    uint64_t offset; /**< of the first byte, from the start of the file */
    uint64_t bytes;
} fanin_safetensors_entry;

/**
 * Opens @p path and parses its header. Tensors need not be sorted or aligned. These rules hold:
 * - The tensors tile the file's data without holes or overlaps.
 * - The tensors' sizes agree with their dtypes and shapes.
 * - Keys are unique.
 * - The header begins with a brace, without blanks before it.
 * - The limits are FANIN_MAX_DIMS dimensions, 2^20 tensors and 100 MB of header.
 *
 * The caller owns *@p out and ends it with fanin_safetensors_close(). Blocks as long as reading the
 * header takes. Thread: any.
 *
 * Errors:
 * - FANIN_ERR_ARGUMENT: @p path or @p out is NULL.
 * - FANIN_ERR_NOT_FOUND: the file is missing.
 * - FANIN_ERR_IO: the file cannot be read, or is no regular file; sys_errno says why.
 * - FANIN_ERR_MISMATCH: the file is invalid; the message says what is wrong.
 * - FANIN_ERR_MEMORY: out of memory.
 */
FANIN_API FANIN_MUST_CHECK fanin_status fanin_safetensors_open(const char *path,
                                                               fanin_safetensors **out,
                                                               fanin_error *error);

/** Closes the file and frees. NULL and *file == NULL are fine. */
FANIN_API void fanin_safetensors_close(fanin_safetensors **file);

/** Number of tensors. */
FANIN_API size_t fanin_safetensors_count(const fanin_safetensors *file);

/**
 * Fills @p entry with tensor @p index, in order of offsets, up to entry->struct_size. Returns false
 * if there is no such index.
 */
FANIN_API bool fanin_safetensors_get(const fanin_safetensors *file, size_t index,
                                     fanin_safetensors_entry *entry);

/** Index of the tensor @p name, by binary search; -1: there is none. */
FANIN_API int64_t fanin_safetensors_find(const fanin_safetensors *file,
                                         const char *name);

/** The header's string pairs, ascending by key; they belong to @p file. */
FANIN_API size_t fanin_safetensors_metadata(const fanin_safetensors *file,
                                            const fanin_pair **pairs_out);

/** The open file, for reading or mapping at the entries' offsets; stays @p file's. */
FANIN_API int fanin_safetensors_descriptor(const fanin_safetensors *file);

#ifdef __cplusplus
}
#endif
#endif
