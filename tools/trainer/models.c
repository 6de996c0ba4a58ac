/* SPDX-License-Identifier: Apache-2.0 */
#include "trainer/models.h"
#include "fetch/failure.h"
#include "fetch/output.h"

#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define QWEN3(layers, hidden, heads, kv, inner)                                        \
    "qwen3", "Qwen3ForCausalLM", layers, hidden, 151936, heads, kv, 128, inner
#define QWEN3_MOE(layers, hidden, heads, kv, inner)                                    \
    "qwen3_moe", "Qwen3MoeForCausalLM", layers, hidden, 151936, heads, kv, 128, inner
#define LLAMA(layers, hidden, heads, inner)                                            \
    "llama", "LlamaForCausalLM", layers, hidden, 128256, heads, 8, 128, inner
#define LATENT .q_rank = 1536, .kv_rank = 512, .nope = 128, .rope = 64, .v_dim = 128

const model models[] = {
    {"qwen2.5-0.5b", "qwen2", "Qwen2ForCausalLM", 24, 896, 151936, 14, 2, 64, 4864,
     .tied = true, .biases = true},
    {"llama-3.1-8b", LLAMA(32, 4096, 32, 14336), .tied = false},
    {"llama-3.3-70b", LLAMA(80, 8192, 64, 28672), .tied = false},
    {"qwen3-0.6b", QWEN3(28, 1024, 16, 8, 3072), .tied = true, .qk_norms = true},
    {"qwen3-8b", QWEN3(36, 4096, 32, 8, 12288), .qk_norms = true},
    {"qwen3-30b-a3b", QWEN3_MOE(48, 2048, 32, 4, 6144), .qk_norms = true,
     .experts = 128, .expert_inner = 768, .experts_a_token = 8},
    {"qwen3-235b-a22b", QWEN3_MOE(94, 4096, 64, 4, 12288), .qk_norms = true,
     .experts = 128, .expert_inner = 1536, .experts_a_token = 8},
    {"deepseek-v3", "deepseek_v3", "DeepseekV3ForCausalLM", 61, 7168, 129280, 128, 128,
     192, 18432, .experts = 256, .expert_inner = 2048, .experts_a_token = 8,
     .shared = 1, .dense_layers = 3, LATENT},
    {"kimi-k2", "kimi_k2", "DeepseekV3ForCausalLM", 61, 7168, 163840, 64, 64, 192,
     18432, .experts = 384, .expert_inner = 2048, .experts_a_token = 8, .shared = 1,
     .dense_layers = 1, LATENT},
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
    for (size_t i = 0; i < n_models; i++)
        if (strcmp(models[i].name, name) == 0)
            return &models[i];
    return NULL;
}

const adapter_shape *adapter_shape_find(const char *name)
{
    for (size_t i = 0; i < n_adapter_shapes; i++)
        if (strcmp(adapter_shapes[i].name, name) == 0)
            return &adapter_shapes[i];
    return NULL;
}

static fanin_status tensor_list_make(tensor_list *list, size_t count, fanin_dtype dtype,
                                     fanin_error *error)
{
    uint32_t bits = fanin_dtype_bits(dtype);
    if (bits < 8 || bits % 8 != 0)
        return failure_set(error, FANIN_ERR_ARGUMENT, "give --dtype bf16 or another",
                           "elements of packed or unknown dtype");
    list->tensors = output_require(calloc(count, sizeof list->tensors[0]));
    list->names = output_require(malloc(count * NAME_SIZE));
    return FANIN_OK;
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
    const uint32_t hidden = m->hidden, kv = m->kv_heads * m->head_dim;
    const uint32_t q = m->heads * m->head_dim;
    const uint32_t inner = m->experts > 0 ? m->expert_inner : m->inner;
    const struct {
        const char *name;
        uint32_t in, out;
    } attention[] = {{"q_proj", hidden, q},
                     {"k_proj", hidden, kv},
                     {"v_proj", hidden, kv},
                     {"o_proj", q, hidden}},
      mlp[] = {{"gate_proj", hidden, inner},
               {"up_proj", hidden, inner},
               {"down_proj", inner, hidden}};
    char module[64];
    for (size_t i = 0; i < 4; i++) {
        snprintf(module, sizeof module, "%u.self_attn.%s", layer, attention[i].name);
        append_pair(list, dtype, module, r, attention[i].in, attention[i].out);
    }
    if (fused) {
        uint64_t all = r * m->experts;
        snprintf(module, sizeof module, "%u.mlp.experts.base_layer", layer);
        append_pair(list, dtype, module, 2 * all, hidden, 2 * (uint64_t)inner);
        snprintf(module, sizeof module, "%u.mlp.experts", layer);
        append_pair(list, dtype, module, all, inner, hidden);
        return;
    }
    for (uint32_t expert = 0; expert < (m->experts > 0 ? m->experts : 1); expert++) {
        for (size_t i = 0; i < 3; i++) {
            if (m->experts > 0)
                snprintf(module, sizeof module, "%u.mlp.experts.%u.%s", layer, expert,
                         mlp[i].name);
            else
                snprintf(module, sizeof module, "%u.mlp.%s", layer, mlp[i].name);
            append_pair(list, dtype, module, r, mlp[i].in, mlp[i].out);
        }
    }
}

fanin_status model_expand(const model *m, uint32_t r, bool fused, fanin_dtype dtype,
                          tensor_list *out, fanin_error *error)
{
    *out = (tensor_list){0};
    if (r == 0 || r > MAX_R)
        return failure_set(error, FANIN_ERR_ARGUMENT, "give --r 1 to 4096",
                           "an adapter of rank %u", r);
    if (fused && m->experts == 0)
        return failure_set(error, FANIN_ERR_ARGUMENT, "leave out --fused",
                           "%s has no experts", m->name);
    size_t modules = 4 + (fused ? 2 : 3 * (size_t)(m->experts > 0 ? m->experts : 1));
    fanin_status status = tensor_list_make(out, 2 * modules * m->layers, dtype, error);
    for (uint32_t layer = 0; layer < m->layers && status == FANIN_OK; layer++)
        append_layer(out, m, layer, r, fused, dtype);
    return status;
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

/* ------------------------------------------------------------- whole models */

static uint32_t divided(uint32_t width, uint32_t by)
{
    return width > by ? width / by : width > 0 ? 1 : 0;
}

model model_scale(const model *m, uint32_t layers, uint32_t shrink)
{
    model s = *m;
    uint32_t *widths[] = {&s.hidden, &s.vocab,   &s.head_dim, &s.inner, &s.expert_inner,
                          &s.q_rank, &s.kv_rank, &s.nope,     &s.rope,  &s.v_dim};
    for (size_t i = 0; shrink > 1 && i < sizeof widths / sizeof widths[0]; i++)
        *widths[i] = divided(*widths[i], shrink);
    s.layers = layers > 0 && layers < s.layers ? layers : s.layers;
    s.dense_layers = s.dense_layers < s.layers ? s.dense_layers : s.layers;
    return s;
}

/* What is being expanded; without room it only counts. */
typedef struct expansion {
    tensor_list *list;
    fanin_dtype dtype;
    bool counting;
    char place[64]; /* of the layer: "model.layers.3." */
} expansion;

/* @p columns 0: a vector. */
static void whole_add(expansion *e, const char *name, uint64_t rows, uint64_t columns)
{
    tensor_list *list = e->list;
    if (e->counting) {
        list->count++;
        return;
    }
    char *text = list->names + list->count * NAME_SIZE;
    tensor_spec *t = &list->tensors[list->count++];
    snprintf(text, NAME_SIZE, "%s%s", e->place, name);
    *t = (tensor_spec){.name = text, .dtype = e->dtype, .n_dims = columns > 0 ? 2 : 1};
    t->shape[0] = rows;
    t->shape[1] = columns;
    t->bytes = rows * (columns > 0 ? columns : 1) * fanin_dtype_bits(e->dtype) / 8;
    list->bytes += t->bytes;
}

static void add_attention(expansion *e, const model *m)
{
    uint32_t q = m->heads * m->head_dim;
    uint32_t kv = m->kv_heads * m->head_dim;
    whole_add(e, "self_attn.q_proj.weight", q, m->hidden);
    whole_add(e, "self_attn.k_proj.weight", kv, m->hidden);
    whole_add(e, "self_attn.v_proj.weight", kv, m->hidden);
    whole_add(e, "self_attn.o_proj.weight", m->hidden, q);
    if (m->biases) {
        whole_add(e, "self_attn.q_proj.bias", q, 0);
        whole_add(e, "self_attn.k_proj.bias", kv, 0);
        whole_add(e, "self_attn.v_proj.bias", kv, 0);
    }
    if (m->qk_norms) {
        whole_add(e, "self_attn.q_norm.weight", m->head_dim, 0);
        whole_add(e, "self_attn.k_norm.weight", m->head_dim, 0);
    }
}

static void add_latent_attention(expansion *e, const model *m)
{
    whole_add(e, "self_attn.q_a_proj.weight", m->q_rank, m->hidden);
    whole_add(e, "self_attn.q_a_layernorm.weight", m->q_rank, 0);
    whole_add(e, "self_attn.q_b_proj.weight", m->heads * (m->nope + m->rope),
              m->q_rank);
    whole_add(e, "self_attn.kv_a_proj_with_mqa.weight", m->kv_rank + m->rope,
              m->hidden);
    whole_add(e, "self_attn.kv_a_layernorm.weight", m->kv_rank, 0);
    whole_add(e, "self_attn.kv_b_proj.weight", m->heads * (m->nope + m->v_dim),
              m->kv_rank);
    whole_add(e, "self_attn.o_proj.weight", m->hidden, m->heads * m->v_dim);
}

/* @p where: "mlp.", "mlp.experts.7." */
static void add_mlp(expansion *e, const char *where, uint32_t inner, uint32_t hidden)
{
    char name[NAME_SIZE];
    snprintf(name, sizeof name, "%sgate_proj.weight", where);
    whole_add(e, name, inner, hidden);
    snprintf(name, sizeof name, "%sup_proj.weight", where);
    whole_add(e, name, inner, hidden);
    snprintf(name, sizeof name, "%sdown_proj.weight", where);
    whole_add(e, name, hidden, inner);
}

static void add_experts(expansion *e, const model *m)
{
    char where[48];
    fanin_dtype dtype = e->dtype;
    whole_add(e, "mlp.gate.weight", m->experts, m->hidden);
    if (m->kv_rank > 0) {
        e->dtype = FANIN_DTYPE_F32;
        whole_add(e, "mlp.gate.e_score_correction_bias", m->experts, 0);
        e->dtype = dtype;
    }
    for (uint32_t i = 0; i < m->experts; i++) {
        snprintf(where, sizeof where, "mlp.experts.%u.", i);
        add_mlp(e, where, m->expert_inner, m->hidden);
    }
    if (m->shared > 0)
        add_mlp(e, "mlp.shared_experts.", m->shared * m->expert_inner, m->hidden);
}

static void whole_add_all(expansion *e, const model *m)
{
    whole_add(e, "model.embed_tokens.weight", m->vocab, m->hidden);
    for (uint32_t layer = 0; layer < m->layers; layer++) {
        snprintf(e->place, sizeof e->place, "model.layers.%u.", layer);
        if (m->kv_rank > 0)
            add_latent_attention(e, m);
        else
            add_attention(e, m);
        if (m->experts > 0 && layer >= m->dense_layers)
            add_experts(e, m);
        else
            add_mlp(e, "mlp.", m->inner, m->hidden);
        whole_add(e, "input_layernorm.weight", m->hidden, 0);
        whole_add(e, "post_attention_layernorm.weight", m->hidden, 0);
    }
    e->place[0] = '\0';
    whole_add(e, "model.norm.weight", m->hidden, 0);
    if (!m->tied)
        whole_add(e, "lm_head.weight", m->vocab, m->hidden);
}

fanin_status whole_model_expand(const model *m, fanin_dtype dtype, tensor_list *out,
                                fanin_error *error)
{
    expansion e = {.list = out, .dtype = dtype, .counting = true};
    *out = (tensor_list){0};
    whole_add_all(&e, m);
    size_t count = out->count;
    out->count = 0;
    fanin_status status = tensor_list_make(out, count, dtype, error);
    e.counting = false;
    if (status == FANIN_OK)
        whole_add_all(&e, m);
    return status;
}

/* ----------------------------------------------------------- configuration */

static void set(json_t *o, const char *name, uint32_t value)
{
    json_object_set_new(o, name, json_integer(value));
}

static void set_experts(json_t *o, const model *m)
{
    bool latent = m->kv_rank > 0;
    set(o, "moe_intermediate_size", m->expert_inner);
    set(o, "num_experts_per_tok", m->experts_a_token);
    set(o, latent ? "n_routed_experts" : "num_experts", m->experts);
    if (latent) {
        set(o, "n_shared_experts", m->shared);
        set(o, "first_k_dense_replace", m->dense_layers);
        set(o, "q_lora_rank", m->q_rank);
        set(o, "kv_lora_rank", m->kv_rank);
        set(o, "qk_nope_head_dim", m->nope);
        set(o, "qk_rope_head_dim", m->rope);
        set(o, "v_head_dim", m->v_dim);
    } else {
        set(o, "decoder_sparse_step", 1);
    }
}

char *model_config(const model *m, fanin_dtype dtype)
{
    const char *name = dtype == FANIN_DTYPE_F32   ? "float32"
                       : dtype == FANIN_DTYPE_F16 ? "float16"
                                                  : "bfloat16";
    json_t *o = json_pack("{s:[s], s:s, s:s, s:b}", "architectures", m->class_name,
                          "model_type", m->type, "torch_dtype", name,
                          "tie_word_embeddings", (int)m->tied);
    if (o == NULL)
        return NULL;
    set(o, "num_hidden_layers", m->layers);
    set(o, "hidden_size", m->hidden);
    set(o, "vocab_size", m->vocab);
    set(o, "num_attention_heads", m->heads);
    set(o, "num_key_value_heads", m->kv_heads);
    set(o, "intermediate_size", m->inner);
    if (m->kv_rank == 0)
        set(o, "head_dim", m->head_dim);
    if (m->experts > 0)
        set_experts(o, m);
    char *text = json_dumps(o, JSON_SORT_KEYS | JSON_INDENT(2));
    json_decref(o);
    return text;
}
