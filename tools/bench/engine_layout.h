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

/** How many ranks tensors are cut over, experts shared out to, and stages there are of layers. */
typedef struct engine_shape {
    uint32_t tp, ep, pp; /**< at least 1 */
} engine_shape;

/** "tp2", "ep4", "tp2,ep2", "tp2,pp2". False: it is none of these. */
bool engine_shape_parse(const char *text, engine_shape *out);
/** Ranks of the engine: the larger of tp and ep in each stage. */
uint32_t engine_shape_ranks(engine_shape shape);

/** What the layout needs to know of a model besides its tensors; 0: not known. */
typedef struct engine_model {
    uint64_t kv_heads;
} engine_model;

/** Of the text of a config.json, which may be NULL. */
engine_model engine_model_of(const char *config);

/** Tensor number @p i whole, in a parameter of its own; nothing of an empty one. */
void engine_layout_add_whole(engine_layout *l, const fanin_tensor *tensors, size_t i);

/**
 * The parameters of rank @p rank, as vLLM and SGLang have them of models with Hugging Face's names:
 * q, k and v one under the other, gate and up likewise, experts as [E, 2I, H] and [E, H, I]; rows
 * of these, of q_b, kv_b, embedding and lm_head cut over tp, columns of o and down; with ep > 1
 * whole experts shared out instead; all else whole. Where tp is larger than the heads of k and v
 * several ranks have the same one; rows of embedding and lm_head are padded to a multiple of 64
 * before they are cut. Stages have consecutive layers, as many each, what remains of the division
 * by the later ones but the last; the first has the embedding, the last one what comes behind the
 * layers, and the embedding too if that is the lm_head. Rank r is the one of stage r / max(tp, ep).
 */
void engine_layout_make(const fanin_tensor *tensors, size_t count, engine_shape shape,
                        engine_model model, uint32_t rank, engine_layout *out);

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
