/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file
 * The writing side of the safetensors format, and the parser behind fanin/safetensors.h.
 * Pure: no files.
 */
#ifndef SAFETENSORS_H
#define SAFETENSORS_H

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

#endif
