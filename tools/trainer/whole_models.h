/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file
 * Shapes of whole models, from their published configurations, and their expansion to the tensors
 * of a checkpoint as Hugging Face names them.
 */
#ifndef WHOLE_MODELS_H
#define WHOLE_MODELS_H

#include "trainer/models.h"

typedef struct whole_model {
    const char *name, *type; /**< type: model_type of config.json */
    const char *class_name;  /**< of Transformers */
    uint32_t layers, hidden, vocab;
    uint32_t heads, kv_heads, head_dim;
    uint32_t inner; /**< of dense layers' MLPs */
    bool tied, biases, qk_norms;
    /* experts; 0: all layers are dense */
    uint32_t experts, expert_inner, experts_a_token, shared, dense_layers;
    /* latent attention (head_dim and kv_heads do not count then); kv_rank 0: none */
    uint32_t q_rank, kv_rank, nope, rope, v_dim;
} whole_model;

extern const whole_model whole_models[];
extern const size_t n_whole_models;

/** NULL if unknown. */
const whole_model *whole_model_find(const char *name);

/** For small machines: the first @p layers (0: all), and every width, the vocabulary too, divided
    by
    @p shrink, but never to nothing. */
whole_model whole_model_scale(const whole_model *m, uint32_t layers, uint32_t shrink);

/** All tensors, in layer order; a router's bias is F32. FANIN_ERR_ARGUMENT (packed dtype),
    FANIN_ERR_MEMORY. */
fanin_status whole_model_expand(const whole_model *m, fanin_dtype dtype,
                                tensor_list *out, fanin_error *error);

/** config.json; malloc'ed, NULL: no memory. */
char *whole_model_config(const whole_model *m, fanin_dtype dtype);

#endif
