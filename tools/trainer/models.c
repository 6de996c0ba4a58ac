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

/* ------------------------------------------------------ adapters, whole models */

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
    uint32_t r; /**< of an adapter; 0: a whole model */
    bool fused, counting;
    char place[64]; /* of the layer: "model.layers.3." */
} expansion;

/* @p columns 0: a vector. */
static void model_add(expansion *e, const char *name, uint64_t rows, uint64_t columns)
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

/* What adapters leave as it is: all but linear layers. */
static void add_frozen(expansion *e, const char *name, uint64_t rows, uint64_t columns)
{
    if (e->r == 0)
        model_add(e, name, rows, columns);
}

/* A pair of @p r rows and columns. */
static void model_add_pair(expansion *e, const char *module, uint64_t r, uint64_t out,
                           uint64_t in)
{
    char name[NAME_SIZE];
    snprintf(name, sizeof name, "%s.lora_A.weight", module);
    model_add(e, name, r, in);
    snprintf(name, sizeof name, "%s.lora_B.weight", module);
    model_add(e, name, out, r);
}

/* The layer's weight, or the adapter of it. @p where: "self_attn.", "mlp.experts.7." */
static void add_linear(expansion *e, const char *where, const char *name, uint64_t out,
                       uint64_t in)
{
    char module[NAME_SIZE - 16]; /* before what model_add_pair() appends */
    snprintf(module, sizeof module, "%s%s%s", where, name, e->r > 0 ? "" : ".weight");
    if (e->r > 0)
        model_add_pair(e, module, e->r, out, in);
    else
        model_add(e, module, out, in);
}

static void add_attention(expansion *e, const model *m)
{
    uint32_t q = m->heads * m->head_dim;
    uint32_t kv = m->kv_heads * m->head_dim;
    add_linear(e, "self_attn.", "q_proj", q, m->hidden);
    add_linear(e, "self_attn.", "k_proj", kv, m->hidden);
    add_linear(e, "self_attn.", "v_proj", kv, m->hidden);
    add_linear(e, "self_attn.", "o_proj", m->hidden, q);
    if (m->biases) {
        add_frozen(e, "self_attn.q_proj.bias", q, 0);
        add_frozen(e, "self_attn.k_proj.bias", kv, 0);
        add_frozen(e, "self_attn.v_proj.bias", kv, 0);
    }
    if (m->qk_norms) {
        add_frozen(e, "self_attn.q_norm.weight", m->head_dim, 0);
        add_frozen(e, "self_attn.k_norm.weight", m->head_dim, 0);
    }
}

static void add_latent_attention(expansion *e, const model *m)
{
    model_add(e, "self_attn.q_a_proj.weight", m->q_rank, m->hidden);
    model_add(e, "self_attn.q_a_layernorm.weight", m->q_rank, 0);
    model_add(e, "self_attn.q_b_proj.weight", m->heads * (m->nope + m->rope),
              m->q_rank);
    model_add(e, "self_attn.kv_a_proj_with_mqa.weight", m->kv_rank + m->rope,
              m->hidden);
    model_add(e, "self_attn.kv_a_layernorm.weight", m->kv_rank, 0);
    model_add(e, "self_attn.kv_b_proj.weight", m->heads * (m->nope + m->v_dim),
              m->kv_rank);
    model_add(e, "self_attn.o_proj.weight", m->hidden, m->heads * m->v_dim);
}

/* @p where: "mlp.", "mlp.experts.7." */
static void add_mlp(expansion *e, const char *where, uint32_t inner, uint32_t hidden)
{
    add_linear(e, where, "gate_proj", inner, hidden);
    add_linear(e, where, "up_proj", inner, hidden);
    add_linear(e, where, "down_proj", hidden, inner);
}

static void add_experts(expansion *e, const model *m)
{
    char where[48];
    fanin_dtype dtype = e->dtype;
    if (e->fused) { /* a layer's as one parameter each: gate and up, down */
        uint64_t all = (uint64_t)e->r * m->experts, inner = m->expert_inner;
        model_add_pair(e, "mlp.experts.base_layer", 2 * all, 2 * inner, m->hidden);
        model_add_pair(e, "mlp.experts", all, m->hidden, inner);
        return;
    }
    add_frozen(e, "mlp.gate.weight", m->experts, m->hidden);
    if (m->kv_rank > 0) {
        e->dtype = FANIN_DTYPE_F32;
        add_frozen(e, "mlp.gate.e_score_correction_bias", m->experts, 0);
        e->dtype = dtype;
    }
    for (uint32_t i = 0; i < m->experts; i++) {
        snprintf(where, sizeof where, "mlp.experts.%u.", i);
        add_mlp(e, where, m->expert_inner, m->hidden);
    }
    if (m->shared > 0)
        add_mlp(e, "mlp.shared_experts.", m->shared * m->expert_inner, m->hidden);
}

static void model_add_all(expansion *e, const model *m)
{
    add_frozen(e, "model.embed_tokens.weight", m->vocab, m->hidden);
    for (uint32_t layer = 0; layer < m->layers; layer++) {
        snprintf(e->place, sizeof e->place, "%smodel.layers.%u.",
                 e->r > 0 ? "base_model.model." : "", layer);
        if (m->kv_rank > 0)
            add_latent_attention(e, m);
        else
            add_attention(e, m);
        if (m->experts > 0 && layer >= m->dense_layers)
            add_experts(e, m);
        else
            add_mlp(e, "mlp.", m->inner, m->hidden);
        add_frozen(e, "input_layernorm.weight", m->hidden, 0);
        add_frozen(e, "post_attention_layernorm.weight", m->hidden, 0);
    }
    e->place[0] = '\0';
    add_frozen(e, "model.norm.weight", m->hidden, 0);
    if (!m->tied)
        add_frozen(e, "lm_head.weight", m->vocab, m->hidden);
}

/* @p e: without its list. */
static fanin_status model_make(const model *m, expansion e, tensor_list *out,
                               fanin_error *error)
{
    *out = (tensor_list){0};
    e.list = out;
    e.counting = true;
    model_add_all(&e, m);
    size_t count = out->count;
    out->count = 0;
    fanin_status status = tensor_list_make(out, count, e.dtype, error);
    e.counting = false;
    if (status == FANIN_OK)
        model_add_all(&e, m);
    return status;
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
    return model_make(m, (expansion){.dtype = dtype, .r = r, .fused = fused}, out,
                      error);
}

fanin_status whole_model_expand(const model *m, fanin_dtype dtype, tensor_list *out,
                                fanin_error *error)
{
    return model_make(m, (expansion){.dtype = dtype}, out, error);
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
