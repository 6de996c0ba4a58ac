/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file
 * Reads safetensors files, strictly: what a careless writer got wrong is refused with a
 * sentence, not guessed. For tools that serve or check an adapter directory.
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
 * Opens @p path and parses its header. The tensors must tile the file's data without holes or
 * overlaps and agree with their dtypes and shapes; keys are unique; the header begins with a
 * brace, without blanks before it; at most FANIN_MAX_DIMS dimensions, 2^20 tensors and 100 MB
 * of header. Tensors need neither be sorted nor aligned.
 *
 * The caller owns *@p out and ends it with fanin_safetensors_close(). Blocks as long as
 * reading the header takes. Thread: any.
 *
 * Errors:
 * - FANIN_ERR_ARGUMENT: @p path or @p out is NULL.
 * - FANIN_ERR_NOT_FOUND: no such file.
 * - FANIN_ERR_IO: it cannot be read, or is no regular file; sys_errno says why.
 * - FANIN_ERR_MISMATCH: not a valid file: says what is wrong.
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
 * Tensor @p index, in order of offsets, up to entry->struct_size. False: no such index.
 */
FANIN_API bool fanin_safetensors_get(const fanin_safetensors *file, size_t index,
                                     fanin_safetensors_entry *entry);

/** Index of the tensor @p name, -1: none. Binary search. */
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
