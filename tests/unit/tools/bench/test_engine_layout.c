/* SPDX-License-Identifier: Apache-2.0 */
/* Where tensors go in an engine's parameters. */
#include "bench/arena.h"
#include "testing.h"

#define MATRIX(text, rows, columns)                                                    \
    {                                                                                  \
        .struct_size = sizeof(fanin_tensor), .name = (text),                           \
        .dtype = FANIN_DTYPE_BF16, .n_dims = 2, .shape = {                             \
            (rows),                                                                    \
            (columns)                                                                  \
        }                                                                              \
    }

enum { HIDDEN = 8, Q = 16, KV = 4, INNER = 6 };

static const fanin_tensor attention[] = {
    MATRIX("lm_head.weight", 10, HIDDEN),
    MATRIX("model.layers.0.mlp.down_proj.weight", HIDDEN, INNER),
    MATRIX("model.layers.0.mlp.gate_proj.weight", INNER, HIDDEN),
    MATRIX("model.layers.0.mlp.up_proj.weight", INNER, HIDDEN),
    MATRIX("model.layers.0.self_attn.k_proj.weight", KV, HIDDEN),
    MATRIX("model.layers.0.self_attn.o_proj.weight", HIDDEN, Q),
    MATRIX("model.layers.0.self_attn.q_proj.weight", Q, HIDDEN),
    MATRIX("model.layers.0.self_attn.v_proj.weight", KV, HIDDEN),
};
enum { N_ATTENTION = sizeof attention / sizeof attention[0] };

static mapping_box transposed = {
    .extent = {HIDDEN, INNER}, .at = 1024, .stride = {4, 4 * HIDDEN}};
static mapping_source source = {.name = "model.layers.0.mlp.down_proj.weight",
                                .dtype = FANIN_DTYPE_BF16,
                                .n_dims = 2,
                                .shape = {HIDDEN, INNER},
                                .boxes = &transposed,
                                .n_boxes = 1};
static mapping_tensor wide = {.name = "w",
                              .dtype = FANIN_DTYPE_F32,
                              .span = 1024 + 4 * HIDDEN * INNER,
                              .sources = &source,
                              .n_sources = 1};
static mapping_module module = {.path = "model.a", .tensors = &wide, .n_tensors = 1};
static const mapping_file mapping = {.modules = &module, .n_modules = 1};

TEST(a_mapping_says_where)
{
    engine_layout l;
    assert_works(engine_layout_of_mapping(attention, N_ATTENTION, &mapping, &l, ERROR));
    assert_int_equal(l.count, 1);
    assert_int_equal(l.boxes[0].tensor, 1);
    /* BF16 beside a parameter of F32: half as wide */
    assert_int_equal(l.boxes[0].at, 512);
    assert_int_equal(l.boxes[0].box.stride[0], 2);
    assert_int_equal(l.boxes[0].box.stride[1], 2 * HIDDEN);
    assert_int_equal(l.size, 1024); /* 608 and what lies behind it */
    engine_layout_free(&l);
}

TEST(a_mapping_of_something_else_is_refused)
{
    engine_layout l;
    fanin_error error = FANIN_ERROR_INIT;
    assert_int_equal(engine_layout_of_mapping(attention, 1, &mapping, &l, &error),
                     FANIN_ERR_MISMATCH);
    assert_says(error.message, "not published");
    source.shape[0]++;
    assert_int_equal(
        engine_layout_of_mapping(attention, N_ATTENTION, &mapping, &l, &error),
        FANIN_ERR_MISMATCH);
    assert_says(error.message, "another shape");
    source.shape[0]--;
    module.fallback = "it computes";
    assert_int_equal(
        engine_layout_of_mapping(attention, N_ATTENTION, &mapping, &l, &error),
        FANIN_ERR_MISMATCH);
    assert_says(error.message, "it computes");
    module.fallback = NULL;
}
