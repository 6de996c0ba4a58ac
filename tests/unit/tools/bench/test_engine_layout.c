/* SPDX-License-Identifier: Apache-2.0 */
/* Where tensors go in an engine's fused parameters. */
#include "bench/engine_layout.h"
#include "testing.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MATRIX(text, rows, columns)                                                    \
    {                                                                                  \
        .struct_size = sizeof(fanin_tensor), .name = (text),                           \
        .dtype = FANIN_DTYPE_BF16, .n_dims = 2, .shape = {                             \
            (rows),                                                                    \
            (columns)                                                                  \
        }                                                                              \
    }

enum { HIDDEN = 8, Q = 16, KV = 4, INNER = 6, EXPERTS = 4 };

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

static const placed_box *box_of(const engine_layout *l, size_t tensor)
{
    for (size_t i = 0; i < l->count; i++) {
        if (l->boxes[i].tensor == tensor) {
            return &l->boxes[i];
        }
    }
    return NULL;
}

static void expect(const engine_layout *l, size_t tensor, const uint64_t offset[2],
                   const uint64_t extent[2], uint64_t at)
{
    const placed_box *b = box_of(l, tensor);
    assert_non_null(b);
    for (int d = 0; d < 2; d++) {
        assert_int_equal(b->box.offset[d], offset[d]);
        assert_int_equal(b->box.extent[d], extent[d]);
    }
    assert_int_equal(b->at, at);
}

static void shapes_are_read(void **state)
{
    (void)state;
    static const char *const wrong[] = {"",    "tp",   "tp0",     "2",       "tp2,",
                                        "xp2", "tp-1", "tp2,tp2", "tp2;ep2", "tp99999"};
    engine_shape shape;
    assert_true(engine_shape_parse("tp2", &shape));
    assert_int_equal(shape.tp, 2);
    assert_int_equal(shape.ep, 1);
    assert_true(engine_shape_parse("ep8,tp2", &shape));
    assert_int_equal(engine_shape_ranks(shape), 8);
    for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++) {
        assert_false(engine_shape_parse(wrong[i], &shape));
    }
}

static void rows_and_columns_are_cut_and_fused(void **state)
{
    (void)state;
    engine_layout l;
    engine_layout_make(attention, N_ATTENTION, (engine_shape){2, 1, 1},
                       (engine_model){0}, 1, &l);
    uint64_t row = HIDDEN * 2;
    /* q, k, v one under the other, though k comes first */
    expect(&l, 6, (uint64_t[]){Q / 2, 0}, (uint64_t[]){Q / 2, HIDDEN}, 0);
    expect(&l, 4, (uint64_t[]){KV / 2, 0}, (uint64_t[]){KV / 2, HIDDEN}, Q / 2 * row);
    expect(&l, 7, (uint64_t[]){KV / 2, 0}, (uint64_t[]){KV / 2, HIDDEN},
           (Q / 2 + KV / 2) * row);
    assert_int_equal(box_of(&l, 6)->parameter, box_of(&l, 4)->parameter);
    assert_int_equal(l.parameters[box_of(&l, 6)->parameter].bytes, (Q / 2 + KV) * row);
    expect(&l, 3, (uint64_t[]){INNER / 2, 0}, (uint64_t[]){INNER / 2, HIDDEN},
           INNER / 2 * row);
    assert_int_equal(box_of(&l, 2)->parameter, box_of(&l, 3)->parameter);
    expect(&l, 1, (uint64_t[]){0, INNER / 2}, (uint64_t[]){HIDDEN, INNER / 2}, 0);
    expect(&l, 5, (uint64_t[]){0, Q / 2}, (uint64_t[]){HIDDEN, Q / 2}, 0);
    assert_null(box_of(&l, 0)); /* padded to 64 rows, the first 32 are rank 0's */
    engine_layout_free(&l);
}

static void ranks_together_hold_everything_once(void **state)
{
    (void)state;
    for (uint32_t tp = 1; tp <= 4; tp++) {
        uint64_t elements[N_ATTENTION] = {0};
        for (uint32_t rank = 0; rank < tp; rank++) {
            engine_layout l;
            engine_layout_make(attention, N_ATTENTION, (engine_shape){tp, 1, 1},
                               (engine_model){0}, rank, &l);
            for (size_t i = 0; i < l.count; i++) {
                const placed_box *b = &l.boxes[i];
                elements[b->tensor] += b->box.extent[0] * b->box.extent[1];
            }
            engine_layout_free(&l);
        }
        for (size_t i = 0; i < N_ATTENTION; i++) {
            assert_int_equal(elements[i],
                             attention[i].shape[0] * attention[i].shape[1]);
        }
    }
}

#define EXPERT(e)                                                                      \
    MATRIX("model.layers.1.mlp.experts." #e ".down_proj.weight", HIDDEN, INNER),       \
        MATRIX("model.layers.1.mlp.experts." #e ".gate_proj.weight", INNER, HIDDEN),   \
        MATRIX("model.layers.1.mlp.experts." #e ".up_proj.weight", INNER, HIDDEN)

static const fanin_tensor experts[] = {EXPERT(0), EXPERT(1), EXPERT(2), EXPERT(3)};
enum { PIECES = 3 * EXPERTS };

static void experts_are_shared_out(void **state)
{
    (void)state;
    engine_layout l;
    uint64_t one = INNER * HIDDEN * 2;
    engine_layout_make(experts, PIECES, (engine_shape){1, 2, 1}, (engine_model){0}, 1,
                       &l);
    assert_int_equal(l.count, 6);
    assert_null(box_of(&l, 3)); /* expert 1 */
    expect(&l, 6, (uint64_t[]){0, 0}, (uint64_t[]){HIDDEN, INNER}, 0);
    expect(&l, 9, (uint64_t[]){0, 0}, (uint64_t[]){HIDDEN, INNER}, one);
    expect(&l, 7, (uint64_t[]){0, 0}, (uint64_t[]){INNER, HIDDEN}, 0);
    expect(&l, 8, (uint64_t[]){0, 0}, (uint64_t[]){INNER, HIDDEN}, one);
    expect(&l, 10, (uint64_t[]){0, 0}, (uint64_t[]){INNER, HIDDEN}, 2 * one);
    assert_int_equal(l.n_parameters, 2);
    assert_int_equal(l.parameters[box_of(&l, 7)->parameter].bytes, 4 * one);
    assert_int_equal(l.parameters[box_of(&l, 6)->parameter].bytes, 2 * one);
    engine_layout_free(&l);
}

static void experts_are_cut_without_ep(void **state)
{
    (void)state;
    engine_layout l;
    engine_layout_make(experts, PIECES, (engine_shape){2, 1, 1}, (engine_model){0}, 1,
                       &l);
    assert_int_equal(l.count, PIECES);
    uint64_t half = INNER / 2 * HIDDEN * 2;
    expect(&l, 4, (uint64_t[]){INNER / 2, 0}, (uint64_t[]){INNER / 2, HIDDEN},
           2 * half);
    expect(&l, 5, (uint64_t[]){INNER / 2, 0}, (uint64_t[]){INNER / 2, HIDDEN},
           3 * half);
    expect(&l, 3, (uint64_t[]){0, INNER / 2}, (uint64_t[]){HIDDEN, INNER / 2}, half);
    engine_layout_free(&l);
}

/* ---------------------------------------------------------------- a mapping */

static mapping_box transposed = {
    .extent = {HIDDEN, INNER}, .at = 64, .stride = {4, 4 * HIDDEN}};
static mapping_source source = {.name = "model.layers.0.mlp.down_proj.weight",
                                .dtype = FANIN_DTYPE_BF16,
                                .n_dims = 2,
                                .shape = {HIDDEN, INNER},
                                .boxes = &transposed,
                                .n_boxes = 1};
static mapping_tensor wide = {.name = "w",
                              .dtype = FANIN_DTYPE_F32,
                              .span = 64 + 4 * HIDDEN * INNER,
                              .sources = &source,
                              .n_sources = 1};
static mapping_module module = {
    .path = "model.a", .kind = "A", .tensors = &wide, .n_tensors = 1};
static const mapping_file mapping = {.modules = &module, .n_modules = 1};

static void a_mapping_says_where(void **state)
{
    (void)state;
    engine_layout l;
    fanin_error error = FANIN_ERROR_INIT;
    assert_ok(engine_layout_of_mapping(attention, N_ATTENTION, &mapping, &l, &error),
              error);
    assert_int_equal(l.count, 1);
    assert_int_equal(l.boxes[0].tensor, 1);
    /* BF16 beside a parameter of F32: half as wide */
    assert_int_equal(l.boxes[0].at, 32);
    assert_int_equal(l.boxes[0].box.stride[0], 2);
    assert_int_equal(l.boxes[0].box.stride[1], 2 * HIDDEN);
    assert_int_equal(l.parameters[0].bytes, 32 + 2 * HIDDEN * INNER);
    engine_layout_free(&l);
}

static void a_mapping_of_something_else_is_refused(void **state)
{
    (void)state;
    engine_layout l;
    fanin_error error = FANIN_ERROR_INIT;
    assert_int_equal(engine_layout_of_mapping(experts, PIECES, &mapping, &l, &error),
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

/* ------------------------------------------------- heads, words and stages */

static const fanin_tensor layers[] = {
    MATRIX("model.embed_tokens.weight", 500, HIDDEN),
    MATRIX("model.layers.0.self_attn.k_proj.weight", 4 * KV, HIDDEN),
    MATRIX("model.layers.0.self_attn.v_proj.weight", 4 * KV, HIDDEN),
    MATRIX("model.layers.1.mlp.down_proj.weight", HIDDEN, INNER),
    MATRIX("model.layers.2.mlp.down_proj.weight", HIDDEN, INNER),
    MATRIX("model.layers.3.mlp.down_proj.weight", HIDDEN, INNER),
    MATRIX("model.layers.4.mlp.down_proj.weight", HIDDEN, INNER),
    MATRIX("model.norm.weight", HIDDEN, 1),
};
enum { N_LAYERS = sizeof layers / sizeof layers[0] };

static void ranks_beyond_the_heads_share_them(void **state)
{
    (void)state;
    engine_layout l;
    engine_model model =
        engine_model_of("{\"num_attention_heads\": 8, \"num_key_value_heads\": 4}");
    assert_int_equal(engine_model_of(NULL).kv_heads, 0);
    assert_int_equal(engine_model_of("{\"num_attention_heads\": 8}").kv_heads, 8);
    for (uint32_t rank = 0; rank < 8; rank++) {
        engine_layout_make(layers, N_LAYERS, (engine_shape){8, 1, 1}, model, rank, &l);
        uint64_t first = rank / 2 * (uint64_t)KV;
        expect(&l, 1, (uint64_t[]){first, 0}, (uint64_t[]){KV, HIDDEN}, 0);
        expect(&l, 2, (uint64_t[]){first, 0}, (uint64_t[]){KV, HIDDEN},
               KV * HIDDEN * 2);
        engine_layout_free(&l);
    }
}

static void the_vocabulary_is_padded_and_cut(void **state)
{
    (void)state;
    engine_layout l;
    engine_layout_make(layers, N_LAYERS, (engine_shape){8, 1, 1}, (engine_model){0}, 7,
                       &l);
    expect(&l, 0, (uint64_t[]){448, 0}, (uint64_t[]){52, HIDDEN}, 0);
    assert_int_equal(l.parameters[box_of(&l, 0)->parameter].bytes, 64 * HIDDEN * 2);
    engine_layout_free(&l);
}

/* Five layers over three stages: 2, 2, 1. The embedding is the lm_head, which is not there. */
static void stages_have_layers(void **state)
{
    (void)state;
    static const bool has[3][N_LAYERS] = {
        {true, true, true, true, false, false, false, false},
        {false, false, false, false, true, true, false, false},
        {true, false, false, false, false, false, true, true},
    };
    for (uint32_t stage = 0; stage < 3; stage++) {
        engine_layout l;
        engine_layout_make(layers, N_LAYERS, (engine_shape){2, 1, 3}, (engine_model){0},
                           2 * stage, &l);
        for (size_t i = 0; i < N_LAYERS; i++) {
            assert_int_equal(box_of(&l, i) != NULL, has[stage][i]);
        }
        engine_layout_free(&l);
    }
}

/* ----------------------------------------------- what an engine's loader did */

/* Qwen3 with 3 layers, 8 heads, 4 of k and v, 500 words: record_mapping.py's files. */
#define RECORDED "/tests/support/mappings/qwen3-small"

typedef struct published {
    json_t *root;
    fanin_tensor *tensors;
    size_t count;
} published;

static void path_of(const char *rest, char out[512])
{
    const char *checkout = getenv("FANIN_SOURCE_DIR");
    assert_non_null(checkout);
    snprintf(out, 512, "%s" RECORDED "%s", checkout, rest);
}

static void read_published(published *out)
{
    char path[512];
    path_of(".json", path);
    out->root = json_load_file(path, 0, NULL);
    assert_non_null(out->root);
    out->count = json_array_size(out->root);
    out->tensors = calloc(out->count, sizeof out->tensors[0]);
    assert_non_null(out->tensors);
    for (size_t i = 0; i < out->count; i++) {
        const json_t *entry = json_array_get(out->root, i);
        const json_t *shape = json_object_get(entry, "shape");
        fanin_tensor *t = &out->tensors[i];
        *t = (fanin_tensor){.struct_size = sizeof *t,
                            .name = json_string_value(json_object_get(entry, "name")),
                            .dtype = FANIN_DTYPE_BF16,
                            .n_dims = (uint32_t)json_array_size(shape)};
        for (uint32_t d = 0; d < t->n_dims; d++) {
            t->shape[d] = (uint64_t)json_integer_value(json_array_get(shape, d));
        }
    }
}

/* Which boxes of a tensor, and where in its parameter. */
static void same_boxes(const engine_layout *ours, const engine_layout *theirs)
{
    assert_int_equal(ours->count, theirs->count);
    for (size_t i = 0; i < ours->count; i++) {
        const placed_box *a = &ours->boxes[i], *b = &theirs->boxes[i];
        assert_int_equal(a->tensor, b->tensor);
        assert_memory_equal(a->box.offset, b->box.offset, sizeof a->box.offset);
        for (int d = 0; d < FANIN_MAX_DIMS; d++) {
            uint64_t x = a->box.extent[d], y = b->box.extent[d];
            assert_int_equal(x ? x : 1, y ? y : 1);
        }
        assert_int_equal(a->at, b->at);
        assert_int_equal(ours->parameters[a->parameter].bytes,
                         theirs->parameters[b->parameter].bytes);
    }
}

static void the_layout_is_what_an_engine_recorded(void **state)
{
    static const struct {
        const char *file;
        engine_shape shape;
        uint32_t rank;
    } ranks[] = {
        {"-pp2-0.json", {1, 1, 2}, 0},
        {"-pp2-1.json", {1, 1, 2}, 1},
    };
    published p;
    engine_model model = {.kv_heads = 4};
    read_published(&p);
    for (size_t i = 0; i < sizeof ranks / sizeof ranks[0]; i++) {
        char path[512];
        mapping_file m;
        engine_layout ours, theirs;
        fanin_error error = FANIN_ERROR_INIT;
        path_of(ranks[i].file, path);
        assert_ok(mapping_read(path, &m, &error), error);
        assert_ok(engine_layout_of_mapping(p.tensors, p.count, &m, &theirs, &error),
                  error);
        engine_layout_make(p.tensors, p.count, ranks[i].shape, model, ranks[i].rank,
                           &ours);
        same_boxes(&ours, &theirs);
        engine_layout_free(&ours);
        engine_layout_free(&theirs);
        mapping_free(&m);
    }
    free(p.tensors);
    json_decref(p.root);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(shapes_are_read),
        cmocka_unit_test(rows_and_columns_are_cut_and_fused),
        cmocka_unit_test(ranks_together_hold_everything_once),
        cmocka_unit_test(experts_are_shared_out),
        cmocka_unit_test(experts_are_cut_without_ep),
        cmocka_unit_test(a_mapping_says_where),
        cmocka_unit_test(a_mapping_of_something_else_is_refused),
        cmocka_unit_test(ranks_beyond_the_heads_share_them),
        cmocka_unit_test(the_vocabulary_is_padded_and_cut),
        cmocka_unit_test(stages_have_layers),
        cmocka_unit_test(the_layout_is_what_an_engine_recorded),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
