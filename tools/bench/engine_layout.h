/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file
 * Where a pull's tensors go in the fused parameters of one rank of an engine: by the rules that
 * engines have in common, or as a recorded mapping says. Pure.
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
    uint32_t slot; /**< of several that a parameter has one after the other */
} placed_box;

typedef struct placed_parameter {
    uint64_t bytes;
    uint64_t slots[3]; /**< bytes of each */
} placed_parameter;

typedef struct engine_layout {
    placed_box *boxes; /**< ascending by tensor */
    size_t count, capacity;
    placed_parameter *parameters;
    size_t n_parameters, parameter_capacity;
} engine_layout;

/** How many ranks tensors are cut over, and experts shared out to. */
typedef struct engine_shape {
    uint32_t tp, ep; /**< at least 1 */
} engine_shape;

/** "tp2", "ep4", "tp2,ep2". False: it is none of these. */
bool engine_shape_parse(const char *text, engine_shape *out);
/** Ranks of the engine: the larger of both. */
uint32_t engine_shape_ranks(engine_shape shape);

/** Tensor number @p i whole, in a parameter of its own; nothing of an empty one. */
void engine_layout_add_whole(engine_layout *l, const fanin_tensor *tensors, size_t i);

/**
 * The parameters of rank @p rank, as vLLM and SGLang have them of models with Hugging Face's names:
 * q, k and v one under the other, gate and up likewise, experts as [E, 2I, H] and [E, H, I]; rows of
 * these, of q_b, kv_b, embedding and lm_head cut over tp, columns of o and down; with ep > 1 whole
 * experts shared out instead; all else whole. Cut in even pieces: what engines do besides (heads that
 * are doubled, padding) is left out.
 */
void engine_layout_make(const fanin_tensor *tensors, size_t count, engine_shape shape,
                        uint32_t rank, engine_layout *out);

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
