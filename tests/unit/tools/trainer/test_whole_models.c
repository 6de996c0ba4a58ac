/* SPDX-License-Identifier: Apache-2.0 */
/* Expansion of whole models to a checkpoint's tensors. */
#include "trainer/whole_models.h"
#include "testing.h"

#include <jansson.h>

typedef struct expectation {
    const char *name;
    size_t tensors;
    uint64_t parameters;
} expectation;

/* What the published checkpoints have. */
TEST(models_have_known_sizes)
{
    (void)state;
    static const expectation cases[] = {
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
    assert_int_equal(n_whole_models, sizeof cases / sizeof cases[0]);
    for (size_t i = 0; i < n_whole_models; i++) {
        fanin_error error = FANIN_ERROR_INIT;
        tensor_list list;
        uint64_t parameters = 0;
        const whole_model *m = whole_model_find(cases[i].name);
        assert_non_null(m);
        assert_ok(whole_model_expand(m, FANIN_DTYPE_BF16, &list, &error), error);
        for (size_t j = 0; j < list.count; j++) {
            const tensor_spec *t = &list.tensors[j];
            parameters += t->bytes * 8 / fanin_dtype_bits(t->dtype);
        }
        if (list.count != cases[i].tensors || parameters != cases[i].parameters) {
            fail_msg("%s: %zu tensors, %llu parameters", cases[i].name, list.count,
                     (unsigned long long)parameters);
        }
        tensor_list_free(&list);
    }
    assert_null(whole_model_find("qwen"));
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

TEST(names_are_those_of_checkpoints)
{
    (void)state;
    tensor_list list;
    assert_works(whole_model_expand(whole_model_find("deepseek-v3"), FANIN_DTYPE_BF16,
                                    &list, ERROR));
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
    (void)state;
    tensor_list list;
    whole_model m = whole_model_scale(whole_model_find("qwen3-30b-a3b"), 2, 16);
    assert_works(whole_model_expand(&m, FANIN_DTYPE_BF16, &list, ERROR));
    assert_int_equal(list.count, 2 * 393 + 3);
    assert_int_equal(find(&list, "model.layers.1.mlp.gate.weight")->shape[0], 128);
    assert_int_equal(find(&list, "model.layers.1.mlp.gate.weight")->shape[1], 128);
    assert_int_equal(find(&list, "lm_head.weight")->shape[0], 9496);
    tensor_list_free(&list);
    m = whole_model_scale(whole_model_find("kimi-k2"), 1, 65536);
    assert_int_equal(m.hidden, 1);
    assert_int_equal(m.vocab, 2);
}

TEST(the_configuration_says_the_shapes)
{
    (void)state;
    char *text = whole_model_config(whole_model_find("deepseek-v3"), FANIN_DTYPE_BF16);
    json_t *o = json_loads(text, 0, NULL);
    free(text);
    assert_string_equal(json_string_value(json_object_get(o, "model_type")),
                        "deepseek_v3");
    assert_int_equal(json_integer_value(json_object_get(o, "kv_lora_rank")), 512);
    assert_int_equal(json_integer_value(json_object_get(o, "n_routed_experts")), 256);
    assert_int_equal(json_integer_value(json_object_get(o, "hidden_size")), 7168);
    json_decref(o);
}
