/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file
 * Where a pull's tensors go in the parameters of one rank of an engine, as a mapping says. Pure.
 */
#ifndef ENGINE_LAYOUT_H
#define ENGINE_LAYOUT_H

#include "fetch/mapping_file.h"

/** A box of a tensor and its place. */
typedef struct placed_box {
    size_t tensor;
    fanin_box box;    /**< address NULL; strides all 0: packed */
    size_t parameter; /**< where it is, and from which byte on */
    uint64_t at;
} placed_box;

typedef struct placed_parameter {
    uint64_t bytes;
} placed_parameter;

typedef struct engine_layout {
    placed_box *boxes; /**< ascending by tensor */
    size_t count, capacity;
    placed_parameter *parameters;
    size_t n_parameters, parameter_capacity;
} engine_layout;

/** Bytes of so many of the tensor's elements, packed. */
uint64_t engine_tensor_bytes(const fanin_tensor *t, const uint64_t *extent);

/** Tensor number @p i whole, in a parameter of its own; nothing of an empty one. */
void engine_layout_add_whole(engine_layout *l, const fanin_tensor *tensors, size_t i);

/**
 * The parameters that a mapping tells. A parameter that is wider than what is published lies beside
 * itself, as narrow. FANIN_ERR_MISMATCH: the tensors are not those that were recorded, or a module
 * needs the engine's loader; names it.
 */
fanin_status engine_layout_of_mapping(const fanin_tensor *tensors, size_t count,
                                      const mapping_file *m, engine_layout *out,
                                      fanin_error *error);
void engine_layout_free(engine_layout *l);

#endif
