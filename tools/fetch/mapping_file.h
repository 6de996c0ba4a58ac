/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file
 * A recorded mapping, "fanin-mapping/1": which box of which published tensor goes where in which
 * parameter of one rank of an engine. docs/reference/mapping-file.md describes the format.
 */
#ifndef MAPPING_FILE_H
#define MAPPING_FILE_H

#include <fanin/types.h>
#include <jansson.h>

typedef struct mapping_box {
    uint64_t offset[FANIN_MAX_DIMS],
        extent[FANIN_MAX_DIMS];     /**< elements, of the source */
    uint64_t at;                    /**< bytes, from the parameter's first element */
    int64_t stride[FANIN_MAX_DIMS]; /**< bytes in the parameter */
} mapping_box;

/** What a parameter takes of a published tensor. */
typedef struct mapping_source {
    const char *name;
    fanin_dtype dtype;
    uint32_t n_dims;
    uint64_t shape[FANIN_MAX_DIMS];
    mapping_box *boxes;
    size_t n_boxes;
} mapping_source;

/** A parameter or buffer. */
typedef struct mapping_tensor {
    const char *name;
    fanin_dtype dtype;
    uint32_t n_dims;
    uint64_t shape[FANIN_MAX_DIMS], stride[FANIN_MAX_DIMS]; /**< elements; bytes */
    uint64_t span; /**< bytes from the first element's first to the last one's last */
    mapping_source *sources;
    size_t n_sources;
} mapping_tensor;

typedef struct mapping_module {
    const char *path;
    const char *fallback; /**< why the engine's loader has to fill it; NULL: boxes do */
    mapping_tensor *tensors;
    size_t n_tensors;
} mapping_module;

typedef struct mapping_file {
    mapping_module *modules;
    size_t n_modules;
    json_t *root; /**< whose the texts are */
} mapping_file;

/**
 * Reads and checks every field: no box lies outside of its tensors. FANIN_ERR_NOT_FOUND,
 * FANIN_ERR_IO, FANIN_ERR_MISMATCH (it is no such file, or a field is wrong, which is named). On
 * failure @p out is empty.
 */
fanin_status mapping_read(const char *path, mapping_file *out, fanin_error *error);
void mapping_free(mapping_file *m);

#endif
