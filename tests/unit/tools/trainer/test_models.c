/* SPDX-License-Identifier: Apache-2.0 */
/* Expansion of models to an adapter's tensors, and to a checkpoint's. */
#include "trainer/models.h"
#include "testing.h"

#include <jansson.h>

typedef struct expectation {
    const char *shape;
    size_t tensors;
    uint64_t bytes; /* in bfloat16 */
} expectation;

TEST(shapes_have_known_sizes)
{
    static const expectation cases[] = {
        {"small", 336, 8798208},        {"dense", 448, 83886080},
        {"large", 1120, 1656750080},    {"moe", 37248, 1687683072},
        {"moe-fused", 576, 1989672960},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        const adapter_shape *shape = adapter_shape_find(cases[i].shape);
        fanin_error error = FANIN_ERROR_INIT;
        tensor_list list;
        assert_non_null(shape);
        assert_ok(model_expand(model_find(shape->model), shape->r, shape->fused,
                               FANIN_DTYPE_BF16, &list, &error),
                  error);
        assert_int_equal(list.count, cases[i].tensors);
        assert_int_equal(list.bytes, cases[i].bytes);
        tensor_list_free(&list);
    }
}

static const tensor_spec *find(const tensor_list *list, const char *name)
{
    for (size_t i = 0; i < list->count; i++) {
        if (strcmp(list->tensors[i].name, name) == 0)
            return &list->tensors[i];
    }
    fail_msg("no tensor %s", name);
    return NULL;
}

static void expect(const tensor_list *list, const char *name, uint64_t rows,
                   uint64_t columns)
{
    const tensor_spec *t = find(list, name);
    assert_int_equal(t->n_dims, 2);
    assert_int_equal(t->shape[0], rows);
    assert_int_equal(t->shape[1], columns);
}

TEST(dense_names_are_those_of_peft)
{
    tensor_list list;
    assert_works(model_expand(model_find("llama-3.1-8b"), 16, false, FANIN_DTYPE_F32,
                              &list, ERROR));
    expect(&list, "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight", 16,
           4096);
    expect(&list, "base_model.model.model.layers.31.self_attn.v_proj.lora_B.weight",
           1024, 16);
    expect(&list, "base_model.model.model.layers.31.mlp.down_proj.lora_A.weight", 16,
           14336);
    expect(&list, "base_model.model.model.layers.31.mlp.down_proj.lora_B.weight", 4096,
           16);
    assert_int_equal(find(&list, list.tensors[0].name)->bytes, 16 * 4096 * 4);
    tensor_list_free(&list);
}

TEST(experts_come_one_by_one_or_fused)
{
    const model *m = model_find("qwen3-30b-a3b");
    tensor_list list;
    assert_works(model_expand(m, 16, false, FANIN_DTYPE_BF16, &list, ERROR));
    expect(&list,
           "base_model.model.model.layers.47.mlp.experts.127.gate_proj.lora_A.weight",
           16, 2048);
    expect(&list,
           "base_model.model.model.layers.47.mlp.experts.127.down_proj.lora_B.weight",
           2048, 16);
    tensor_list_free(&list);
    assert_works(model_expand(m, 16, true, FANIN_DTYPE_BF16, &list, ERROR));
    expect(&list,
           "base_model.model.model.layers.0.mlp.experts.base_layer.lora_A.weight",
           2 * 16 * 128, 2048);
    expect(&list,
           "base_model.model.model.layers.0.mlp.experts.base_layer.lora_B.weight",
           2 * 768, 2 * 16 * 128);
    expect(&list, "base_model.model.model.layers.0.mlp.experts.lora_A.weight", 16 * 128,
           768);
    expect(&list, "base_model.model.model.layers.0.mlp.experts.lora_B.weight", 2048,
           16 * 128);
    tensor_list_free(&list);
}

TEST(fused_configuration_is_json)
{
    char *text = model_fused_config(model_find("qwen3-30b-a3b"), 16);
    json_t *config = json_loads(text, 0, NULL);
    assert_non_null(config);
    assert_int_equal(json_integer_value(json_object_get(config, "lora_alpha")), 32);
    assert_string_equal(json_string_value(json_object_get(config, "peft_type")),
                        "LORA");
    json_decref(config);
    free(text);
}

TEST(wrong_requests_are_refused)
{
    fanin_error error = FANIN_ERROR_INIT;
    tensor_list list;
    const model *dense = model_find("llama-3.1-8b");
    assert_null(model_find("llama"));
    assert_null(adapter_shape_find("tiny"));
    assert_int_equal(model_expand(dense, 0, false, FANIN_DTYPE_BF16, &list, &error),
                     FANIN_ERR_ARGUMENT);
    assert_int_equal(model_expand(dense, 16, true, FANIN_DTYPE_BF16, &list, &error),
                     FANIN_ERR_ARGUMENT);
    assert_int_equal(model_expand(dense, 16, false, FANIN_DTYPE_F4, &list, &error),
                     FANIN_ERR_ARGUMENT);
    assert_int_equal(model_expand(dense, 16, false, 0, &list, &error),
                     FANIN_ERR_ARGUMENT);
}

/* ------------------------------------------------------------- whole models */

/* What the published checkpoints have. */
TEST(models_have_known_sizes)
{
    static const struct {
        const char *name;
        size_t tensors;
        uint64_t parameters;
    } cases[] = {
        {"qwen2.5-0.5b", 290, 494032768},
        {"qwen3-0.6b", 310, 596049920},
        {"qwen3-8b", 399, UINT64_C(8190735360)},
        {"llama-3.1-8b", 291, UINT64_C(8030261248)},
        {"llama-3.3-70b", 723, UINT64_C(70553706496)},
        {"qwen3-30b-a3b", 18867, UINT64_C(30532122624)},
        {"qwen3-235b-a22b", 36945, UINT64_C(235093634560)},
        {"deepseek-v3", 45395, UINT64_C(671026419200)},
        {"kimi-k2", 69975, UINT64_C(1026408232448)},
    };
    assert_int_equal(n_models, sizeof cases / sizeof cases[0]);
    for (size_t i = 0; i < n_models; i++) {
        fanin_error error = FANIN_ERROR_INIT;
        tensor_list list;
        uint64_t parameters = 0;
        const model *m = model_find(cases[i].name);
        assert_non_null(m);
        assert_ok(whole_model_expand(m, FANIN_DTYPE_BF16, &list, &error), error);
        for (size_t j = 0; j < list.count; j++) {
            const tensor_spec *t = &list.tensors[j];
            parameters += t->bytes * 8 / fanin_dtype_bits(t->dtype);
        }
        if (list.count != cases[i].tensors || parameters != cases[i].parameters)
            fail_msg("%s: %zu tensors, %llu parameters", cases[i].name, list.count,
                     (unsigned long long)parameters);
        tensor_list_free(&list);
    }
    assert_null(model_find("qwen"));
}

TEST(names_are_those_of_checkpoints)
{
    tensor_list list;
    assert_works(
        whole_model_expand(model_find("deepseek-v3"), FANIN_DTYPE_BF16, &list, ERROR));
    const tensor_spec *t =
        find(&list, "model.layers.60.mlp.experts.255.down_proj.weight");
    assert_int_equal(t->shape[0], 7168);
    assert_int_equal(t->shape[1], 2048);
    t = find(&list, "model.layers.3.mlp.gate.e_score_correction_bias");
    assert_int_equal(t->dtype, FANIN_DTYPE_F32);
    assert_int_equal(t->n_dims, 1);
    assert_int_equal(find(&list, "model.layers.2.mlp.up_proj.weight")->shape[0], 18432);
    assert_int_equal(
        find(&list, "model.layers.0.self_attn.kv_a_proj_with_mqa.weight")->shape[0],
        576);
    tensor_list_free(&list);
}

TEST(a_model_is_made_small)
{
    tensor_list list;
    model m = model_scale(model_find("qwen3-30b-a3b"), 2, 16);
    assert_works(whole_model_expand(&m, FANIN_DTYPE_BF16, &list, ERROR));
    assert_int_equal(list.count, 2 * 393 + 3);
    assert_int_equal(find(&list, "model.layers.1.mlp.gate.weight")->shape[0], 128);
    assert_int_equal(find(&list, "model.layers.1.mlp.gate.weight")->shape[1], 128);
    assert_int_equal(find(&list, "lm_head.weight")->shape[0], 9496);
    tensor_list_free(&list);
    m = model_scale(model_find("kimi-k2"), 1, 65536);
    assert_int_equal(m.hidden, 1);
    assert_int_equal(m.vocab, 2);
}

TEST(the_configuration_says_the_shapes)
{
    char *text = model_config(model_find("deepseek-v3"), FANIN_DTYPE_BF16);
    json_t *o = json_loads(text, 0, NULL);
    free(text);
    assert_string_equal(json_string_value(json_object_get(o, "model_type")),
                        "deepseek_v3");
    assert_int_equal(json_integer_value(json_object_get(o, "kv_lora_rank")), 512);
    assert_int_equal(json_integer_value(json_object_get(o, "n_routed_experts")), 256);
    assert_int_equal(json_integer_value(json_object_get(o, "hidden_size")), 7168);
    json_decref(o);
}
