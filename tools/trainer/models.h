/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file
 * Shapes of public models, from their published configurations, and their expansion to the tensors
 * of an adapter as PEFT names them, or of a checkpoint as Hugging Face does.
 */
#ifndef MODELS_H
#define MODELS_H

#include <fanin/types.h>
#include <stddef.h>

typedef struct model {
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
} model;

/** An adapter that people compare by: a model, a rank, a layout. */
typedef struct adapter_shape {
    const char *name;
    const char *model;
    uint32_t r;
    bool fused;
} adapter_shape;

extern const model models[];
extern const size_t n_models;
extern const adapter_shape adapter_shapes[];
extern const size_t n_adapter_shapes;

/** NULL if unknown. */
const model *model_find(const char *name);
const adapter_shape *adapter_shape_find(const char *name);

/** One tensor to be served. */
typedef struct tensor_spec {
    const char *name;
    fanin_dtype dtype;
    uint32_t n_dims;
    uint64_t shape[FANIN_MAX_DIMS];
    uint64_t bytes;
    const uint8_t *data; /**< packed row-major bytes; NULL: the pattern */
} tensor_spec;

typedef struct tensor_list {
    tensor_spec *tensors;
    size_t count;
    uint64_t bytes;
    char *names; /**< storage of the names if the list owns them */
} tensor_list;

/**
 * The adapter of rank @p r on all linear layers of @p m, which has no latent attention, in layer
 * order. @p fused: the experts of a layer as one parameter each for gate_up and down (models with
 * experts only). FANIN_ERR_ARGUMENT, FANIN_ERR_MEMORY.
 */
fanin_status model_expand(const model *m, uint32_t r, bool fused, fanin_dtype dtype,
                          tensor_list *out, fanin_error *error);

void tensor_list_free(tensor_list *list);

/** The text of a PEFT configuration for a fused adapter; malloc'ed, NULL: no memory. */
char *model_fused_config(const model *m, uint32_t r);

/** For small machines: the first @p layers (0: all), and every width, the vocabulary too, divided
    by @p shrink, but never to nothing. */
model model_scale(const model *m, uint32_t layers, uint32_t shrink);

/** All tensors of a checkpoint, in layer order; a router's bias is F32. FANIN_ERR_ARGUMENT (packed
    dtype), FANIN_ERR_MEMORY. */
fanin_status whole_model_expand(const model *m, fanin_dtype dtype, tensor_list *out,
                                fanin_error *error);

/** config.json; malloc'ed, NULL: no memory. */
char *model_config(const model *m, fanin_dtype dtype);

#endif
