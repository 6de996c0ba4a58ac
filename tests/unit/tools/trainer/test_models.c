/* SPDX-License-Identifier: Apache-2.0 */
/* Expansion of models to an adapter's tensors. */
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
        if (strcmp(list->tensors[i].name, name) == 0) {
            return &list->tensors[i];
        }
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
