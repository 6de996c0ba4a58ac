/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file
 * LoRA-relevant shapes of public models, and their expansion to the tensors of an adapter
 * as PEFT names them.
 */
#ifndef MODELS_H
#define MODELS_H

#include <fanin/types.h>
#include <stddef.h>

typedef struct linear {
    const char *name;
    uint32_t in, out;
} linear;

typedef struct model {
    const char *name;
    uint32_t layers;
    linear attention[4]; /**< q, k, v, o */
    linear mlp[3];       /**< gate, up, down; in each expert if there are experts */
    uint32_t experts;    /**< 0: dense */
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
 * The adapter of rank @p r on all linear layers of @p m, in layer order. @p fused: the
 * experts of a layer as one parameter each for gate_up and down (models with experts
 * only). FANIN_ERR_ARGUMENT, FANIN_ERR_MEMORY.
 */
fanin_status model_expand(const model *m, uint32_t r, bool fused, fanin_dtype dtype,
                          tensor_list *out, fanin_error *error);

void tensor_list_free(tensor_list *list);

/** The text of a PEFT configuration for a fused adapter; malloc'ed, NULL: no memory. */
char *model_fused_config(const model *m, uint32_t r);

#endif
