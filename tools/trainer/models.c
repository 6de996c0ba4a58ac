/* SPDX-License-Identifier: Apache-2.0 */
#include "trainer/models.h"
#include "fetch/failure.h"

#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define ATTENTION(hidden, q, kv)                                                       \
    {                                                                                  \
        {"q_proj", hidden, q}, {"k_proj", hidden, kv}, {"v_proj", hidden, kv},         \
        {                                                                              \
            "o_proj", q, hidden                                                        \
        }                                                                              \
    }
#define MLP(hidden, inner)                                                             \
    {                                                                                  \
        {"gate_proj", hidden, inner}, {"up_proj", hidden, inner},                      \
        {                                                                              \
            "down_proj", inner, hidden                                                 \
        }                                                                              \
    }

const model models[] = {
    {"qwen2.5-0.5b", 24, ATTENTION(896, 896, 128), MLP(896, 4864), 0},
    {"llama-3.1-8b", 32, ATTENTION(4096, 4096, 1024), MLP(4096, 14336), 0},
    {"llama-3.3-70b", 80, ATTENTION(8192, 8192, 1024), MLP(8192, 28672), 0},
    {"qwen3-30b-a3b", 48, ATTENTION(2048, 4096, 512), MLP(2048, 768), 128},
    {"qwen3-235b-a22b", 94, ATTENTION(4096, 8192, 512), MLP(4096, 1536), 128},
};
const size_t n_models = sizeof models / sizeof models[0];

const adapter_shape adapter_shapes[] = {
    {"small", "qwen2.5-0.5b", 8, false},      {"dense", "llama-3.1-8b", 16, false},
    {"large", "llama-3.3-70b", 64, false},    {"moe", "qwen3-30b-a3b", 16, false},
    {"moe-fused", "qwen3-30b-a3b", 16, true},
};
const size_t n_adapter_shapes = sizeof adapter_shapes / sizeof adapter_shapes[0];

enum { NAME_SIZE = 112, MAX_R = 4096 };

const model *model_find(const char *name)
{
    for (size_t i = 0; i < n_models; i++) {
        if (strcmp(models[i].name, name) == 0) {
            return &models[i];
        }
    }
    return NULL;
}

const adapter_shape *adapter_shape_find(const char *name)
{
    for (size_t i = 0; i < n_adapter_shapes; i++) {
        if (strcmp(adapter_shapes[i].name, name) == 0) {
            return &adapter_shapes[i];
        }
    }
    return NULL;
}

/* Appends one matrix; the caller made room. */
static void models_append(tensor_list *list, fanin_dtype dtype, uint64_t rows,
                          uint64_t columns, const char *module, const char *suffix)
{
    char *name = list->names + list->count * NAME_SIZE;
    tensor_spec *t = &list->tensors[list->count++];
    snprintf(name, NAME_SIZE, "base_model.model.model.layers.%s.%s.weight", module,
             suffix);
    *t = (tensor_spec){.name = name, .dtype = dtype, .n_dims = 2};
    t->shape[0] = rows;
    t->shape[1] = columns;
    t->bytes = rows * columns * fanin_dtype_bits(dtype) / 8;
    list->bytes += t->bytes;
}

static void append_pair(tensor_list *list, fanin_dtype dtype, const char *module,
                        uint64_t r, uint64_t in, uint64_t out)
{
    models_append(list, dtype, r, in, module, "lora_A");
    models_append(list, dtype, out, r, module, "lora_B");
}

static void append_layer(tensor_list *list, const model *m, uint32_t layer, uint64_t r,
                         bool fused, fanin_dtype dtype)
{
    char module[64];
    for (size_t i = 0; i < 4; i++) {
        const linear *l = &m->attention[i];
        snprintf(module, sizeof module, "%u.self_attn.%s", layer, l->name);
        append_pair(list, dtype, module, r, l->in, l->out);
    }
    if (fused) {
        uint64_t all = r * m->experts;
        uint64_t hidden = m->mlp[0].in;
        uint64_t inner = m->mlp[0].out;
        snprintf(module, sizeof module, "%u.mlp.experts.base_layer", layer);
        append_pair(list, dtype, module, 2 * all, hidden, 2 * inner);
        snprintf(module, sizeof module, "%u.mlp.experts", layer);
        append_pair(list, dtype, module, all, inner, hidden);
        return;
    }
    for (uint32_t expert = 0; expert < (m->experts > 0 ? m->experts : 1); expert++) {
        for (size_t i = 0; i < 3; i++) {
            const linear *l = &m->mlp[i];
            if (m->experts > 0) {
                snprintf(module, sizeof module, "%u.mlp.experts.%u.%s", layer, expert,
                         l->name);
            } else {
                snprintf(module, sizeof module, "%u.mlp.%s", layer, l->name);
            }
            append_pair(list, dtype, module, r, l->in, l->out);
        }
    }
}

fanin_status model_expand(const model *m, uint32_t r, bool fused, fanin_dtype dtype,
                          tensor_list *out, fanin_error *error)
{
    *out = (tensor_list){0};
    uint32_t bits = fanin_dtype_bits(dtype);
    if (r == 0 || r > MAX_R) {
        return failure_set(error, FANIN_ERR_ARGUMENT, "give --r 1 to 4096",
                           "an adapter of rank %u", r);
    }
    if (bits < 8 || bits % 8 != 0) {
        return failure_set(error, FANIN_ERR_ARGUMENT, "give --dtype bf16 or another",
                           "elements of packed or unknown dtype");
    }
    if (fused && m->experts == 0) {
        return failure_set(error, FANIN_ERR_ARGUMENT, "leave out --fused",
                           "%s has no experts", m->name);
    }
    size_t modules = 4 + (fused ? 2 : 3 * (size_t)(m->experts > 0 ? m->experts : 1));
    size_t capacity = 2 * modules * m->layers;
    out->tensors = calloc(capacity, sizeof out->tensors[0]);
    out->names = malloc(capacity * NAME_SIZE);
    if (out->tensors == NULL || out->names == NULL) {
        tensor_list_free(out);
        return failure_memory(error, "names");
    }
    for (uint32_t layer = 0; layer < m->layers; layer++) {
        append_layer(out, m, layer, r, fused, dtype);
    }
    return FANIN_OK;
}

void tensor_list_free(tensor_list *list)
{
    free(list->tensors);
    free(list->names);
    *list = (tensor_list){0};
}

char *model_fused_config(const model *m, uint32_t r)
{
    json_t *config = json_pack(
        "{s:s, s:s, s:s, s:i, s:i, s:f, s:s, s:b, s:b, s:b, s:[ssss], s:[ss], s:{s:i}}",
        "peft_type", "LORA", "task_type", "CAUSAL_LM", "base_model_name_or_path",
        m->name, "r", (int)r, "lora_alpha", (int)(2 * r), "lora_dropout", 0.0, "bias",
        "none", "use_rslora", 0, "use_dora", 0, "inference_mode", 1, "target_modules",
        "k_proj", "o_proj", "q_proj", "v_proj", "target_parameters", "down_proj",
        "gate_up_proj", "rank_pattern", ".*\\.gate_up_proj", (int)(2 * r));
    char *text =
        config != NULL ? json_dumps(config, JSON_SORT_KEYS | JSON_INDENT(2)) : NULL;
    json_decref(config);
    return text;
}
