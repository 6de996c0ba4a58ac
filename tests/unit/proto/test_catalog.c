/* SPDX-License-Identifier: Apache-2.0 */
/* Key, box and region tables: contents come back, other forms and lies are refused. */
#include "box_place.h"
#include "catalog.h"
#include "pack.h"
#include "random.h"
#include "recode.h"
#include "samples.h"
#include "testing.h"

static key_table *decode_keys(const buffer *b)
{
    key_table *table = NULL;
    fanin_error error = FANIN_ERROR_INIT;
    if (key_table_decode(b->data, b->size, NULL, &table, &error))
        fail_msg("%s", error.message);
    return table;
}

static void refuse_keys(const buffer *b, const char *message)
{
    key_table *table = (key_table *)b;
    fanin_error error = FANIN_ERROR_INIT;
    assert_false(b->failed);
    assert_int_equal(key_table_decode(b->data, b->size, NULL, &table, &error),
                     FANIN_ERR_PROTOCOL);
    assert_null(table);
    assert_string_equal(error.message, message);
}

/* ------------------------------------------------------------- key tables */

/* The head and the first key "name" of shape [4] u8, with what differs per test. */
static buffer one_key(uint32_t count, const char *name, size_t name_size)
{
    buffer b = {0};
    pack_uint(&b, count);
    pack_uint(&b, 0);
    pack_uint(&b, 0);
    pack_bin(&b, name, name_size);
    pack_uint(&b, FANIN_DTYPE_U8);
    pack_array(&b, 1);
    pack_uint(&b, 4);
    return b;
}

static void more_key(buffer *b, uint64_t shared, const char *tail)
{
    pack_uint(b, shared);
    pack_bin(b, tail, strlen(tail));
    pack_uint(b, FANIN_DTYPE_U8);
    pack_array(b, 0);
}

TEST(names_have_one_form)
{
    static const struct {
        uint64_t shared;
        const char *tail;
        const char *why; /* NULL: good */
    } rows[] = {
        {2, "d", NULL},
        {3, "a", NULL},
        {1, "c", NULL},
        {0, "b", NULL},
        {0, "abc.", "names are not ascending or share more than they say"},
        {1, "bd", "names are not ascending or share more than they say"},
        {2, "c", "names are not ascending or share more than they say"},
        {2, "b", "names are not ascending or share more than they say"},
        {0, "aa", "names are not ascending or share more than they say"},
        {4, "a", "a number is out of range"},
        {3, "", "a string's length is out of range"},
        {3, "\xff", "a name is not UTF-8 or holds a NUL"},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        buffer b = one_key(2, "abc", 3);
        more_key(&b, rows[i].shared, rows[i].tail);
        if (rows[i].why) {
            char message[200];
            snprintf(message, sizeof message, "key table, key 1: %s", rows[i].why);
            refuse_keys(&b, message);
        } else {
            key_table *t = decode_keys(&b);
            assert_int_equal(strlen(t->entries[1].name),
                             rows[i].shared + strlen(rows[i].tail));
            key_table_free(&t);
        }
        buffer_free(&b);
    }
}

/* What a name shares with the one before may end inside of a character. */
TEST(names_are_cut_anywhere)
{
    static const struct {
        uint64_t shared;
        const char *tail;
        bool good;
    } rows[] = {
        {2, "\xaa", true},          {1, "\xd0\xb0", true}, {3, "z", true},
        {3, "\xc3\xa9", true},      {2, "\xc4", false},    {2, "\xf0\x9f", false},
        {3, "\xa9", false},         {1, "\xc4", false},    {3, "\xe2\x82", false},
        {1, "\xed\xa0\x80", false}, {0, "\xbf", false},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        buffer b = one_key(2, "a\xc3\xa9", 3);
        more_key(&b, rows[i].shared, rows[i].tail);
        if (rows[i].good) {
            key_table *t = decode_keys(&b);
            key_table_free(&t);
        } else {
            refuse_keys(&b, "key table, key 1: a name is not UTF-8 or holds a NUL");
        }
        buffer_free(&b);
    }
}

TEST(names_have_limits)
{
    char name[FANIN_MAX_NAME + 1];
    memset(name, 'n', sizeof name);
    buffer b = one_key(1, name, FANIN_MAX_NAME);
    key_table *t = decode_keys(&b);
    assert_int_equal(strlen(t->entries[0].name), FANIN_MAX_NAME);
    key_table_free(&t);
    buffer_free(&b);
    b = one_key(1, name, FANIN_MAX_NAME + 1);
    refuse_keys(&b, "key table, key 0: a string's length is out of range");
    buffer_free(&b);
    b = one_key(2, name, FANIN_MAX_NAME);
    more_key(&b, FANIN_MAX_NAME, "x");
    refuse_keys(&b, "key table, key 1: a name is too long");
    buffer_free(&b);
    b = one_key(1, "a\0b", 3);
    refuse_keys(&b, "key table, key 0: a name is not UTF-8 or holds a NUL");
    buffer_free(&b);
    b = one_key(1, "", 0);
    refuse_keys(&b, "key table, key 0: a string's length is out of range");
    buffer_free(&b);
}

TEST(shapes_are_checked)
{
    static const struct {
        fanin_dtype dtype;
        uint32_t n_dims;
        uint64_t shape[3];
        const char *why;
    } rows[] = {
        {0, 1, {1}, "unknown dtype"},
        {FANIN_DTYPE_U64 + 1, 1, {1}, "unknown dtype"},
        {FANIN_DTYPE_F4, 1, {3}, "a shape does not fit its dtype or is too large"},
        {FANIN_DTYPE_F4, 0, {0}, "a shape does not fit its dtype or is too large"},
        {FANIN_DTYPE_F64,
         2,
         {UINT64_MAX, 2},
         "a shape does not fit its dtype or is too large"},
        {FANIN_DTYPE_U8, 9, {1}, "too many dimensions"},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        buffer b = {0};
        char message[200];
        pack_uint(&b, 1);
        pack_uint(&b, 0);
        pack_uint(&b, 0);
        pack_bin(&b, "k", 1);
        pack_uint(&b, (uint64_t)rows[i].dtype);
        pack_array(&b, rows[i].n_dims);
        for (uint32_t dim = 0; dim < rows[i].n_dims; dim++)
            pack_uint(&b, dim < 3 ? rows[i].shape[dim] : 1);
        snprintf(message, sizeof message, "key table, key 0: %s", rows[i].why);
        refuse_keys(&b, message);
        buffer_free(&b);
    }
    buffer b = {0};
    key_entry huge[2] = {
        {.name = "a", .dtype = FANIN_DTYPE_U8, .n_dims = 1, .shape = {UINT64_MAX}},
        {.name = "b", .dtype = FANIN_DTYPE_U8, .n_dims = 1, .shape = {1}}};
    key_table_encode(&b, huge, 2, NULL, 0);
    refuse_keys(&b, "key table, key 1: the tensors are too large in all");
    buffer_free(&b);
}

TEST(pairs_are_checked)
{
    static const fanin_pair twice[] = {{"a", "1"}, {"a", "2"}};
    static const fanin_pair unsorted[] = {{"b", "1"}, {"a", "2"}};
    static const fanin_pair unnamed[] = {{"", "1"}};
    buffer b = {0};
    key_table_encode(&b, NULL, 0, twice, 2);
    refuse_keys(&b, "key table, metadata pair 1: metadata keys are not ascending");
    b.size = 0;
    key_table_encode(&b, NULL, 0, unsorted, 2);
    refuse_keys(&b, "key table, metadata pair 1: metadata keys are not ascending");
    b.size = 0;
    key_table_encode(&b, NULL, 0, unnamed, 1);
    refuse_keys(&b, "key table, metadata pair 0: a string's length is out of range");

    char *text = malloc(LIMIT_METADATA + 1);
    memset(text, 'm', LIMIT_METADATA);
    text[LIMIT_METADATA] = '\0';
    fanin_pair large[] = {{"a", text}};
    b.size = 0;
    key_table_encode(&b, NULL, 0, large, 1);
    refuse_keys(&b, "key table, metadata pair 0: a string's length is out of range");
    text[LIMIT_METADATA - 1] = '\0';
    b.size = 0;
    key_table_encode(&b, NULL, 0, large, 1);
    key_table *t = decode_keys(&b);
    assert_int_equal(strlen(t->pairs[0].value), LIMIT_METADATA - 1);
    key_table_free(&t);
    free(text);
    buffer_free(&b);
}

TEST(key_tables_are_whole_and_alone)
{
    samples all = samples_of_keys();
    buffer *b = &all.list[0].bytes;
    size_t size = b->size;
    for (b->size = 0; b->size < size; b->size++) {
        key_table *t;
        uint8_t *copy = malloc(b->size ? b->size : 1);
        memcpy(copy, b->data, b->size);
        assert_int_equal(key_table_decode(copy, b->size, NULL, &t, NULL),
                         FANIN_ERR_PROTOCOL);
        free(copy);
    }
    buffer_append(b, "\0", 1);
    refuse_keys(b, "key table, metadata pair 2: bytes after the table's end");
    samples_free(&all);

    static const uint8_t lie[] = {0xce, 0, 0x10, 0, 0, 0, 0, 0, 0, 0, 0};
    key_table *t;
    fanin_error error = FANIN_ERROR_INIT;
    assert_int_equal(key_table_decode(lie, sizeof lie, NULL, &t, &error),
                     FANIN_ERR_PROTOCOL);
    assert_string_equal(
        error.message,
        "key table, count 0: more entries are announced than bytes are there");
}

/* ------------------------------------------------------------- a large adapter */

#define MOE_KEYS 37248

/* The tensors of a mixture of experts with 48 layers and 128 experts, sorted by name. */
static char moe_names[MOE_KEYS][100];
static key_entry moe_keys[MOE_KEYS];

static int by_name(const void *a, const void *b)
{
    return strcmp(((const key_entry *)a)->name, ((const key_entry *)b)->name);
}

static uint32_t add_module(uint32_t n, const char *module, uint64_t in, uint64_t out)
{
    for (int b = 0; b < 2; b++) {
        key_entry *e = &moe_keys[n];
        snprintf(moe_names[n], sizeof *moe_names, "%s.lora_%c.weight", module, 'A' + b);
        *e = (key_entry){.name = moe_names[n],
                         .dtype = FANIN_DTYPE_BF16,
                         .n_dims = 2,
                         .shape = {b ? out : 16, b ? 16 : in}};
        e->bytes = 2 * e->shape[0] * e->shape[1];
        n++;
    }
    return n;
}

static int make_moe(void **state)
{
    static const char *const projections[] = {"gate_proj", "up_proj", "down_proj"};
    static const char *const attention[] = {"q_proj", "k_proj", "v_proj", "o_proj"};
    static const uint64_t outs[] = {4096, 512, 512, 2048};
    uint32_t n = 0;
    char module[80];
    for (int layer = 0; layer < 48; layer++) {
        for (int i = 0; i < 4; i++) {
            snprintf(module, sizeof module,
                     "base_model.model.model.layers.%d.self_attn.%s", layer,
                     attention[i]);
            n = add_module(n, module, i == 3 ? 4096 : 2048, outs[i]);
        }
        for (int i = 0; i < 3 * 128; i++) {
            snprintf(module, sizeof module,
                     "base_model.model.model.layers.%d.mlp.experts.%d.%s", layer, i / 3,
                     projections[i % 3]);
            n = add_module(n, module, i % 3 == 2 ? 768 : 2048, i % 3 == 2 ? 2048 : 768);
        }
    }
    qsort(moe_keys, n, sizeof *moe_keys, by_name);
    return n == MOE_KEYS ? 0 : -1;
}

TEST(large_key_tables_are_small)
{
    buffer b = {0};
    key_table_encode(&b, moe_keys, MOE_KEYS, NULL, 0);
    assert_true(b.size < MOE_KEYS * 32);
    key_table *t = decode_keys(&b);
    assert_int_equal(t->count, MOE_KEYS);
    for (uint32_t i = 0; i < MOE_KEYS; i++) {
        assert_string_equal(t->entries[i].name, moe_keys[i].name);
        assert_int_equal(t->entries[i].bytes, moe_keys[i].bytes);
        assert_int_equal(key_table_find(t, moe_keys[i].name), i);
    }
    key_table_free(&t);
    buffer_free(&b);
}

/* In any order, with names between that are not there: what the plain search finds. */
TEST(names_are_found_near_the_last_one)
{
    static const uint32_t steps[] = {1, 3, 63, 64, 65, 20000, MOE_KEYS - 1};
    buffer b = {0};
    key_table_encode(&b, moe_keys, MOE_KEYS, NULL, 0);
    key_table *t = decode_keys(&b);
    uint32_t near = 0, at = 0;
    char absent[160];
    for (uint32_t i = 0; i < MOE_KEYS; i++) {
        at = (at + steps[i % 7]) % MOE_KEYS;
        const char *name = moe_keys[at].name;
        snprintf(absent, sizeof absent, "%s~", name);
        assert_int_equal(key_table_find_near(t, name, &near), at);
        assert_int_equal(key_table_find_near(t, absent, &near), -1);
    }
    assert_int_equal(key_table_find_near(t, moe_keys[MOE_KEYS - 1].name, &near),
                     MOE_KEYS - 1);
    assert_int_equal(key_table_find_near(t, "~", &near), -1);
    assert_int_equal(key_table_find_near(t, "", &near), -1);
    assert_int_equal(key_table_find_near(t, moe_keys[0].name, &near), 0);
    key_table_free(&t);
    buffer_free(&b);
    key_table_encode(&b, NULL, 0, NULL, 0);
    t = decode_keys(&b);
    near = 0;
    assert_int_equal(key_table_find_near(t, "a", &near), -1);
    key_table_free(&t);
    buffer_free(&b);
}

/* The chunk boxes of a rank, laid out by @p step: equally spaced, or in heaps as an
   allocator leaves them. */
static box_record *moe_boxes(uint32_t rank, uint64_t align, uint64_t gap,
                             uint64_t *count_out)
{
    box_record *boxes = calloc(MOE_KEYS, sizeof *boxes);
    uint64_t at = gap, count = 0;
    assert_non_null(boxes);
    for (uint32_t key = 0; key < MOE_KEYS; key++) {
        box_record *r = &boxes[count];
        uint64_t elements;
        r->key = key;
        r->block = block_chunk(2, moe_keys[key].shape, 0, 8, rank);
        block_volume(&r->block, &elements);
        r->place.packed = true;
        r->place.offset = at;
        at = (at + 2 * elements + align - 1) / align * align + gap;
        count++;
    }
    *count_out = count;
    return boxes;
}

TEST(large_box_tables_are_small)
{
    buffer b = {0}, k = {0};
    uint64_t n;
    box_record *boxes = moe_boxes(5, 64, 128, &n);
    key_table_encode(&k, moe_keys, MOE_KEYS, NULL, 0);
    key_table *keys = decode_keys(&k);
    box_table_encode(&b, moe_keys, MOE_KEYS, boxes, n, 5, 8);
    assert_true(b.size <= 4 * n);
    box_table *t;
    assert_int_equal(box_table_decode(b.data, b.size, keys, NULL, &t, NULL), FANIN_OK);
    uint32_t dim, world, index;
    assert_int_equal(box_table_rule(t, &dim, &world, &index), BOXES_CHUNK);
    assert_int_equal(dim, 0);
    assert_int_equal(world, 8);
    assert_int_equal(index, 5);
    assert_int_equal(box_table_count(t), n);
    assert_int_equal(box_table_regions(t), 1);
    for (uint64_t i = 0; i < n; i++) {
        uint32_t key;
        block blk;
        box_place place;
        box_table_get(t, i, &key, &blk, &place);
        assert_int_equal(key, boxes[i].key);
        assert_true(block_equal(&blk, &boxes[i].block));
        assert_memory_equal(&place, &boxes[i].place, sizeof place);
    }
    box_table_free(&t);
    key_table_free(&keys);
    buffer_free(&b);
    buffer_free(&k);
    free(boxes);
}

/* ------------------------------------------------------------- box tables */

typedef struct world {
    buffer blob;
    key_table *keys;
} world;

static world make_world(const key_entry *entries, uint32_t count)
{
    world w = {0};
    key_table_encode(&w.blob, entries, count, NULL, 0);
    w.keys = decode_keys(&w.blob);
    return w;
}

static void end_world(world *w)
{
    key_table_free(&w->keys);
    buffer_free(&w->blob);
}

static const key_entry matrices[] = {
    {.name = "m", .dtype = FANIN_DTYPE_F16, .n_dims = 2, .shape = {10, 6}},
    {.name = "n", .dtype = FANIN_DTYPE_F32, .n_dims = 2, .shape = {2, 12}},
};

static box_rule rule_for(const box_record *boxes, uint64_t n, uint32_t rank,
                         uint32_t world_size, uint32_t out[3])
{
    world w = make_world(matrices, 2);
    buffer b = {0};
    box_table *t = NULL;
    box_table_encode(&b, matrices, 2, boxes, n, rank, world_size);
    assert_int_equal(box_table_decode(b.data, b.size, w.keys, NULL, &t, NULL),
                     FANIN_OK);
    assert_int_equal(box_table_count(t), n);
    box_rule rule = box_table_rule(t, &out[0], &out[1], &out[2]);
    box_table_free(&t);
    buffer_free(&b);
    end_world(&w);
    return rule;
}

static uint64_t chunks(box_record out[2], uint32_t dim, uint32_t parts, uint32_t index)
{
    uint64_t n = 0;
    for (uint32_t key = 0; key < 2; key++) {
        block b = block_chunk(2, matrices[key].shape, dim, parts, index);
        if (!block_is_empty(&b))
            out[n++] = (box_record){
                .key = key,
                .block = b,
                .place = {.region = key, .offset = 1000 * key + 24, .packed = true}};
    }
    return n;
}

TEST(chunk_rules_are_found)
{
    box_record boxes[3];
    uint32_t got[3];
    /* Each rank of a world of 8: all, or replicated in groups of 4, on either dimension. */
    for (uint32_t dim = 0; dim < 2; dim++)
        for (uint32_t parts = 1; parts <= 8; parts *= 2)
            for (uint32_t rank = 0; rank < 8; rank++) {
                uint64_t n = chunks(boxes, dim, parts, rank % parts);
                assert_int_equal(rule_for(boxes, n, rank, 8, got), BOXES_CHUNK);
                block a = block_chunk(2, matrices[0].shape, got[0], got[1], got[2]);
                block b = block_chunk(2, matrices[0].shape, dim, parts, rank % parts);
                assert_true(block_is_empty(&b) ? block_is_empty(&a)
                                               : block_equal(&a, &b));
            }
    uint64_t n = chunks(boxes, 1, 4, 3);
    assert_int_equal(rule_for(boxes, n, 7, 8, got), BOXES_CHUNK);
    assert_memory_equal(got, ((uint32_t[]){1, 4, 3}), sizeof got);
}

TEST(other_cuts_are_explicit)
{
    box_record boxes[3];
    uint32_t got[3];
    uint64_t n = chunks(boxes, 0, 4, 1);
    assert_int_equal(rule_for(boxes, n, 1, 6, got), BOXES_EXPLICIT); /* 4 is no part */
    assert_int_equal(rule_for(boxes, n, 2, 4, got),
                     BOXES_EXPLICIT); /* another's rows */
    assert_int_equal(rule_for(boxes, n, 1, 4, got), BOXES_CHUNK);
    assert_int_equal(rule_for(boxes, n - 1, 1, 4, got), BOXES_EXPLICIT);
    boxes[0].block.offset[0]--;
    assert_int_equal(rule_for(boxes, n, 1, 4, got), BOXES_EXPLICIT);
    boxes[0].block.offset[0]++;
    boxes[0].place.packed = false;
    boxes[0].place.stride[0] = 12;
    boxes[0].place.stride[1] = 2;
    assert_int_equal(rule_for(boxes, n, 1, 4, got), BOXES_CHUNK); /* packed in fact */
    boxes[0].place.stride[0] = 16;
    assert_int_equal(rule_for(boxes, n, 1, 4, got), BOXES_EXPLICIT);
    n = chunks(boxes, 0, 4, 1);
    boxes[2] = boxes[1]; /* twice */
    assert_int_equal(rule_for(boxes, n + 1, 1, 4, got), BOXES_EXPLICIT);
}

/* Tables written by hand for one key "m" of 10 x 6 F16. */
typedef struct words {
    int64_t list[32]; /* ARRAY(n): an array's head; others: integers */
    size_t count;
} words;
#define ARRAY(n) (INT64_MIN + (n))

static buffer written(const words *w)
{
    buffer b = {0};
    for (size_t i = 0; i < w->count; i++) {
        if (w->list[i] < INT64_MIN + 16)
            pack_array(&b, (size_t)(w->list[i] - INT64_MIN));
        else
            pack_int(&b, w->list[i]);
    }
    return b;
}

TEST(other_forms_are_refused)
{
    static const struct {
        const char *why; /* NULL: good */
        words w;
    } rows[] = {
        {NULL, {{0, 3, 1, 0, ARRAY(4), 0, 0, 10, 6, 1}, 10}},
        {NULL, {{1, 0, 0, 2, 1, 0}, 6}},
        {NULL, {{1, 3, 1, 2, 1, 5}, 6}},
        {NULL, {{0, 0, 1, 0, ARRAY(4), 0, 0, 10, 6, ARRAY(2), 1, 0}, 12}},
        {NULL, {{0, 2, 1, 0, ARRAY(4), 0, 0, 10, 6, ARRAY(4), 0, 5, 14, 2}, 14}},
        /* parts: of the one key, whose box is the sixth of all */
        {NULL, {{3, 3, 1, 2, 1, 1, 0, 1, 5, 5}, 10}},
        {NULL, {{2, 3, 1, 1, 0, 1, 5, 0, ARRAY(4), 0, 0, 10, 6, 1}, 14}},
        {NULL, {{2, 0, 0, 1, 0, 1, 5}, 7}},
        {"box 0: a part of no keys", {{3, 0, 0, 2, 1, 0}, 6}},
        {"box 0: a number is out of range",
         {{3, 0, 0, 2, 1, LIMIT_KEY_RANGES + 1, 0, 1, 0}, 9}},
        {"box 0: a number is out of range", {{3, 0, 0, 2, 1, 1, 0, 2, 0, 0}, 10}},
        {"box 0: a number is out of range", {{3, 0, 0, 2, 1, 1, 2, 0, 0, 0}, 10}},
        {"box 0: a number is out of range",
         {{3, 0, 0, 2, 1, 1, 0, 1, LIMIT_BOXES + 1, 0}, 10}},
        {"box 0: ranges of keys that are empty or touch",
         {{3, 0, 0, 2, 1, 1, 0, 0, 0, 0}, 10}},
        {"box 0: ranges of keys that are empty or touch",
         {{3, 0, 0, 2, 1, 2, 0, 1, 0, 0, 0, 0}, 12}},
        {"box 0: a number is out of range", {{4, 0}, 2}},
        {"box 0: a number is out of range", {{0, 13}, 2}},
        {"box 0: a chunk rule that makes no sense", {{1, 0, 0, 2, 2, 0}, 6}},
        {"box 0: a chunk rule that makes no sense", {{1, 0, 0, 0, 0, 0}, 6}},
        {"box 0: a chunk rule on a dimension that a key lacks",
         {{1, 0, 2, 2, 1, 0}, 6}},
        {"box 0: the alignment is not that of the offsets", {{1, 2, 1, 2, 1, 6}, 6}},
        {"box 0: the alignment is not that of the offsets", {{1, 1, 1, 2, 1, 0}, 6}},
        {"box 0: bytes after the table's end", {{1, 0, 0, 2, 1, 0, 0}, 7}},
        {"box 0: an object is missing", {{1, 0, 0, 2, 1}, 5}},
        {"box 0: a box begins below its region", {{1, 0, 0, 2, 1, -1}, 6}},
        {"box 0: a number is out of range",
         {{1, 0, 0, 2, 1, (INT64_C(1) << 61) + 1}, 6}},
        {"box 0: a box does not fit its region or its dtype",
         {{1, 0, 0, 2, 1, INT64_C(1) << 61}, 6}},
        {"box 0: a region is named again", {{1, 0, 0, 2, 1, ARRAY(2), 0, 0}, 8}},
        {"box 0: a number is out of range", {{1, 0, 0, 2, 1, ARRAY(2), -1, 0}, 8}},
        {"box 0: a number is out of range",
         {{1, 0, 0, 2, 1, ARRAY(2), LIMIT_BOXES, 0}, 8}},
        {"box 0: a place has a wrong number of parts",
         {{1, 0, 0, 2, 1, ARRAY(3), 0, 0, 2}, 9}},
        {"box 0: strides of a packed box",
         {{0, 0, 1, 0, ARRAY(4), 0, 0, 10, 6, ARRAY(4), 0, 0, 12, 2}, 14}},
        {"box 0: strides under a chunk rule, whose boxes are packed",
         {{1, 3, 1, 2, 1, ARRAY(4), 0, 5, 14, 2}, 10}},
        {"box 0: a box does not fit its region or its dtype",
         {{0, 0, 1, 0, ARRAY(4), 0, 0, 10, 6, ARRAY(4), 0, 0, -12, 2}, 14}},
        {"box 0: a box does not fit its region or its dtype",
         {{0, 0, 1, 0, ARRAY(4), 0, 0, 10, 6, ARRAY(4), 0, 0, INT64_MAX, 2}, 14}},
        {"box 0: a box of a key that is not there",
         {{0, 0, 1, 1, ARRAY(4), 0, 0, 10, 6, 0}, 10}},
        {"box 0: a block is empty or reaches beyond its tensor",
         {{0, 0, 1, 0, ARRAY(4), 0, 0, 11, 6, 0}, 10}},
        {"box 0: a block is empty or reaches beyond its tensor",
         {{0, 0, 1, 0, ARRAY(4), 5, 0, 6, 6, 0}, 10}},
        {"box 0: a block is empty or reaches beyond its tensor",
         {{0, 0, 1, 0, ARRAY(4), 0, 0, 10, 0, 0}, 10}},
        {"box 0: a block has another number of dimensions than its key",
         {{0, 0, 1, 0, ARRAY(2), 0, 10, 0}, 8}},
        {"box 0: more boxes are announced than bytes are there",
         {{0, 0, 2, 0, 0, 0, 0}, 7}},
        {"box 0: a number is out of range", {{0, 0, LIMIT_BOXES + 1}, 3}},
    };
    world w = make_world(matrices, 1);
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        buffer b = written(&rows[i].w);
        box_table *t = NULL;
        fanin_error error = FANIN_ERROR_INIT;
        fanin_status status =
            box_table_decode(b.data, b.size, w.keys, NULL, &t, &error);
        if (!rows[i].why) {
            if (status)
                fail_msg("row %zu: %s", i, error.message);
            box_table_free(&t);
        } else {
            char message[200];
            snprintf(message, sizeof message, "box table, %s", rows[i].why);
            assert_int_equal(status, FANIN_ERR_PROTOCOL);
            assert_null(t);
            assert_string_equal(error.message, message);
        }
        buffer_free(&b);
    }
    end_world(&w);
}

TEST(packed_dtypes_are_cut_at_whole_bytes)
{
    static const key_entry packed = {
        .name = "p", .dtype = FANIN_DTYPE_F4, .n_dims = 1, .shape = {6}};
    world w = make_world(&packed, 1);
    words cut = {{1, 0, 0, 2, 1, 0}, 6}; /* elements 3..5 begin inside a byte */
    buffer b = written(&cut);
    box_table *t;
    assert_int_equal(box_table_decode(b.data, b.size, w.keys, NULL, &t, NULL),
                     FANIN_ERR_PROTOCOL);
    b.data[3] = 3; /* a third, the second one: 2..3 */
    assert_int_equal(box_table_decode(b.data, b.size, w.keys, NULL, &t, NULL),
                     FANIN_OK);
    box_table_free(&t);
    buffer_free(&b);
    end_world(&w);
}

/* ------------------------------------------------------------- regions */

TEST(regions_come_back)
{
    samples all = samples_of_regions();
    region_table *t;
    assert_int_equal(region_table_decode(all.list[0].bytes.data, all.list[0].bytes.size,
                                         NULL, &t, NULL),
                     FANIN_OK);
    assert_int_equal(t->count, 2);
    assert_int_equal(t->entries[1].id, 1);
    assert_true(t->entries[0].base == UINT64_C(0x7f0012345000));
    assert_int_equal(t->entries[0].device, -1);
    assert_int_equal(t->entries[0].rkey_size, 6);
    buffer_free(&all.list[0].bytes); /* the table owns its bytes */
    assert_memory_equal(t->entries[0].rkey, "rkey-0", 6);
    assert_int_equal(t->entries[1].memory, FANIN_MEMORY_CUDA);
    assert_int_equal(t->entries[1].rkey_size, 0);
    region_table_free(&t);
    assert_null(t);
    samples_free(&all);
}

TEST(wrong_regions_are_refused)
{
    static const uint8_t rkey[LIMIT_RKEY + 1];
    const region_entry good = {
        .base = 4096, .length = 1, .memory = FANIN_MEMORY_HOST, .device = -1};
    region_entry bad[6] = {good, good, good, good, good, good};
    bad[0].length = 0;
    bad[1].base = UINT64_MAX;
    bad[2].memory = FANIN_MEMORY_DETECT;
    bad[3].memory = 3;
    bad[4].device = -2;
    bad[5].rkey = rkey;
    bad[5].rkey_size = sizeof rkey;
    for (size_t i = 0; i < 6; i++) {
        region_entry two[2] = {good, bad[i]};
        buffer b = {0};
        region_table *t;
        fanin_error error = FANIN_ERROR_INIT;
        region_table_encode(&b, two, 2);
        assert_int_equal(region_table_decode(b.data, b.size, NULL, &t, &error),
                         FANIN_ERR_PROTOCOL);
        assert_null(t);
        assert_non_null(strstr(error.message, "entry 1"));
        for (size_t size = 0; size < b.size; size++)
            assert_int_equal(region_table_decode(b.data, size, NULL, &t, NULL),
                             FANIN_ERR_PROTOCOL);
        buffer_free(&b);
    }
}

TESTS_BETWEEN(make_moe, NULL)
