/* SPDX-License-Identifier: Apache-2.0 */
/* What may be registered, and what is refused with which words. */
#include "server_peer.h"
#include "testing.h"

#include <time.h>

static uint8_t memory[4096];

static void expect_refused(const fanin_tensor *t, size_t count, fanin_status status,
                           const char *words)
{
    fanin_server *s = server_start(NULL);
    fanin_error error = FANIN_ERROR_INIT;
    assert_int_equal(fanin_server_put(s, RUN, t, count, false, &error), status);
    assert_int_equal(error.status, status);
    assert_says(error.message, words);
    assert_int_equal(server_stats(s).tensors, 0);
    server_stop(&s, 0);
}

SERVER_TEST(bad_names_are_refused)
{
    fanin_server *s = server_start(NULL);
    static const char *const names[] = {
        "",
        "lora:",
        "lora:.",
        "lora:..",
        "lora:a/b",
        "lora:a:b",
        "0",
        "other:0",
        "lora: 0",
        "LORA:0",
        "lora:a\nb",
        "lora:\xc3\xa4",
        "full:",
        "lora:01234567890123456789012345678901234567890123456789012345678901234"};
    fanin_box box;
    fanin_tensor t = byte_tensor("a", &box, memory, 1);
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        assert_int_equal(fanin_server_put(s, names[i], &t, 1, false, NULL),
                         FANIN_ERR_ARGUMENT);
    assert_int_equal(fanin_server_put(s, NULL, &t, 1, false, NULL), FANIN_ERR_ARGUMENT);
    static const char *const good[] = {
        "lora:0", "full:0", "lora:...", "lora:A-z_9.",
        "lora:0123456789012345678901234567890123456789012345678901234567890123"};
    for (size_t i = 0; i < sizeof good / sizeof *good; i++)
        assert_int_equal(fanin_server_put(s, good[i], &t, 1, false, NULL), FANIN_OK);
    server_stop(&s, 0);

    char longest[FANIN_MAX_NAME + 2];
    memset(longest, 'x', sizeof longest);
    longest[FANIN_MAX_NAME + 1] = '\0';
    static const char *const keys[] = {"",         "a\x01",        "a\x7f", "\xff",
                                       "\xc0\x80", "\xed\xa0\x80", NULL};
    for (size_t i = 0; i < sizeof keys / sizeof *keys; i++) {
        t.name = keys[i];
        expect_refused(&t, 1, FANIN_ERR_ARGUMENT, "name");
    }
    t.name = longest;
    expect_refused(&t, 1, FANIN_ERR_ARGUMENT, "512");
}

SERVER_TEST(bad_tensors_are_refused)
{
    fanin_box box, boxes[2];
    const fanin_tensor good = byte_tensor("a", &box, memory, 8);
    fanin_tensor t = good;
    t.struct_size = 8;
    expect_refused(&t, 1, FANIN_ERR_ARGUMENT, "struct_size");
    t = good;
    t.dtype = 99;
    expect_refused(&t, 1, FANIN_ERR_ARGUMENT, "dtype");
    t = good;
    t.n_dims = 9;
    expect_refused(&t, 1, FANIN_ERR_ARGUMENT, "8 dimensions");
    t = good;
    t.n_dims = 2;
    t.shape[0] = UINT64_C(1) << 40;
    t.shape[1] = UINT64_C(1) << 40;
    expect_refused(&t, 1, FANIN_ERR_ARGUMENT, "too large");
    t = good;
    t.memory.kind = FANIN_MEMORY_CUDA;
    setenv("FANIN_CUDA_LIBRARY", "", 1);
    expect_refused(&t, 1, FANIN_ERR_UNSUPPORTED, "CUDA");
    t.memory.kind = 3;
    expect_refused(&t, 1, FANIN_ERR_ARGUMENT, "kind of memory");
    t = good;
    t.boxes = NULL;
    expect_refused(&t, 1, FANIN_ERR_ARGUMENT, "NULL");
    t = good;
    box.address = NULL;
    expect_refused(&t, 1, FANIN_ERR_ARGUMENT, "NULL");
    box.address = memory;
    box.offset[0] = 1;
    expect_refused(&t, 1, FANIN_ERR_ARGUMENT, "outside");
    box.offset[0] = UINT64_MAX;
    expect_refused(&t, 1, FANIN_ERR_ARGUMENT, "outside");
    box.offset[0] = 0;
    box.stride[0] = INT64_MAX;
    expect_refused(&t, 1, FANIN_ERR_ARGUMENT, "address space");
    box.stride[0] = INT64_MIN;
    expect_refused(&t, 1, FANIN_ERR_ARGUMENT, "address space");
    boxes[0] = (fanin_box){.extent = {5}, .address = memory};
    boxes[1] = (fanin_box){.offset = {4}, .extent = {4}, .address = memory + 100};
    t.boxes = boxes;
    t.n_boxes = 2;
    expect_refused(&t, 1, FANIN_ERR_ARGUMENT, "overlap");
    boxes[1].offset[0] = 5;
    boxes[1].extent[0] = 3;
    fanin_server *s = server_start(NULL);
    assert_int_equal(fanin_server_put(s, RUN, &t, 1, false, NULL), FANIN_OK);
    server_stop(&s, 0);
    fanin_tensor twice[2] = {good, good};
    box.stride[0] = 0;
    expect_refused(twice, 2, FANIN_ERR_ARGUMENT, "twice");
}

SERVER_TEST(packed_dtypes_need_whole_bytes)
{
    fanin_box box = {.offset = {0, 2}, .extent = {2, 4}, .address = memory};
    fanin_tensor t = {.struct_size = sizeof t,
                      .name = "f4",
                      .dtype = FANIN_DTYPE_F4,
                      .n_dims = 2,
                      .shape = {2, 8},
                      .boxes = &box,
                      .n_boxes = 1};
    fanin_server *s = server_start(NULL);
    assert_int_equal(fanin_server_put(s, RUN, &t, 1, false, NULL), FANIN_OK);
    server_stop(&s, 0);
    box.offset[1] = 1;
    expect_refused(&t, 1, FANIN_ERR_ARGUMENT, "begins inside a byte");
    box.offset[1] = 2;
    box.extent[1] = 3;
    expect_refused(&t, 1, FANIN_ERR_ARGUMENT, "ends inside a byte");
    box.extent[1] = 4;
    t.shape[1] = 7;
    expect_refused(&t, 1, FANIN_ERR_ARGUMENT, "byte");
}

SERVER_TEST(scalars_and_empty_shards)
{
    fanin_box scalar = {.address = memory}, nothing = {.extent = {0, 5}};
    fanin_tensor t[3] = {{.struct_size = sizeof *t,
                          .name = "scalar",
                          .dtype = FANIN_DTYPE_F32,
                          .boxes = &scalar,
                          .n_boxes = 1},
                         {.struct_size = sizeof *t,
                          .name = "empty-shard",
                          .dtype = FANIN_DTYPE_F32,
                          .n_dims = 2,
                          .shape = {4, 5}},
                         {.struct_size = sizeof *t,
                          .name = "empty-box",
                          .dtype = FANIN_DTYPE_F32,
                          .n_dims = 2,
                          .shape = {4, 5},
                          .boxes = &nothing,
                          .n_boxes = 1}};
    fanin_server *s = server_start(NULL);
    memcpy(memory, "abcd", 4);
    assert_works(fanin_server_put(s, RUN, t, 3, false, ERROR));
    server_commit(s, 1);
    puller r = puller_open(s);
    puller_begin(&r);
    key_table *keys;
    box_table *boxes;
    peer_catalog(&r.control, &r.grant, &keys, &boxes);
    assert_int_equal(keys->count, 3);
    assert_string_equal(keys->entries[0].name, "empty-box");
    assert_string_equal(keys->entries[2].name, "scalar");
    assert_int_equal(box_table_count(boxes), 1);
    char got[4];
    read_entry one = {.box = 0, .count = 1};
    peer_read(&r.data, &r.grant, &one, 1, got, 4);
    assert_memory_equal(got, "abcd", 4);
    box_table_free(&boxes);
    key_table_free(&keys);
    fanin_tensor two = t[0];
    fanin_box both[2] = {scalar, scalar};
    two.boxes = both;
    two.n_boxes = 2;
    expect_refused(&two, 1, FANIN_ERR_ARGUMENT, "two boxes");
}

typedef struct names {
    char text[256];
    size_t most;
} names;

static bool append(void *cookie, const char *name)
{
    names *n = cookie;
    strcat(strcat(n->text, name), " ");
    return --n->most > 0;
}

static const char *listed(fanin_server *s, const char *publication, size_t most)
{
    static names n;
    n = (names){.most = most};
    assert_int_equal(fanin_server_list(s, publication, append, &n, NULL), FANIN_OK);
    return n.text;
}

SERVER_TEST(put_is_all_or_nothing)
{
    fanin_server *s = server_start(NULL);
    fanin_box box[3];
    fanin_tensor t[3] = {byte_tensor("m", &box[0], memory, 1),
                         byte_tensor("c", &box[1], memory + 1, 1),
                         byte_tensor("x", &box[2], memory + 2, 1)};
    assert_int_equal(fanin_server_put(s, RUN, t, 1, false, NULL), FANIN_OK);
    fanin_error error = FANIN_ERROR_INIT;
    assert_int_equal(fanin_server_put(s, RUN, t, 3, false, &error), FANIN_ERR_EXISTS);
    assert_string_equal(error.key, RUN ":m");
    assert_string_equal(listed(s, RUN, 99), "m ");
    assert_int_equal(fanin_server_put(s, RUN, t, 3, true, NULL), FANIN_OK);
    assert_string_equal(listed(s, RUN, 99), "c m x ");
    assert_string_equal(listed(s, RUN, 2), "c m ");
    server_put(s, RUN, "a", memory + 3, 1);
    server_put(s, RUN, "n", memory + 4, 1);
    server_put(s, RUN, "z", memory + 5, 1);
    assert_string_equal(listed(s, RUN, 99), "a c m n x z ");
    assert_int_equal(fanin_server_remove(s, RUN, "m", NULL), FANIN_OK);
    assert_string_equal(listed(s, RUN, 99), "a c n x z ");
    server_put(s, "lora:1", "q", memory, 1);
    assert_string_equal(listed(s, NULL, 99), "lora:0 lora:1 ");
    assert_int_equal(fanin_server_remove(s, RUN, NULL, NULL), FANIN_OK);
    assert_string_equal(listed(s, NULL, 99), "lora:1 ");
    assert_int_equal(fanin_server_list(s, RUN, append, NULL, NULL),
                     FANIN_ERR_NOT_FOUND);
    assert_int_equal(fanin_server_put(s, RUN, NULL, 0, false, NULL), FANIN_OK);
    assert_string_equal(listed(s, NULL, 99), "lora:0 lora:1 ");
    fanin_server_stats stats = server_stats(s);
    assert_int_equal(stats.publications, 2);
    assert_int_equal(stats.tensors, 1);
}

SERVER_TEST(metadata_travel_with_the_keys)
{
    fanin_server *s = server_start(NULL);
    fanin_pair pairs[] = {{"r", "16"}, {"lora_alpha", "32"}, {"base", "\xc3\xa4"}};
    assert_int_equal(fanin_server_set_metadata(s, RUN, pairs, 3, NULL), FANIN_OK);
    server_commit(s, 1);
    peer p = peer_open(s);
    grant g = peer_newest(&p);
    key_table *keys;
    box_table *boxes;
    peer_catalog(&p, &g, &keys, &boxes);
    assert_int_equal(keys->n_pairs, 3);
    assert_string_equal(keys->pairs[0].key, "base");
    assert_string_equal(keys->pairs[1].key, "lora_alpha");
    assert_string_equal(keys->pairs[1].value, "32");
    box_table_free(&boxes);
    key_table_free(&keys);
    pairs[1].key = "r";
    assert_int_equal(fanin_server_set_metadata(s, RUN, pairs, 2, NULL),
                     FANIN_ERR_ARGUMENT);
    pairs[1].key = "\xff";
    assert_int_equal(fanin_server_set_metadata(s, RUN, pairs, 2, NULL),
                     FANIN_ERR_ARGUMENT);
    char *large = malloc((1 << 20) + 1);
    memset(large, 'x', 1 << 20);
    large[1 << 20] = '\0';
    pairs[1] = (fanin_pair){"large", large};
    assert_int_equal(fanin_server_set_metadata(s, RUN, pairs, 2, NULL),
                     FANIN_ERR_ARGUMENT);
    free(large);
}

/* Work, not time: another process may have its turn at any moment. */
static uint64_t cpu_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
    return (uint64_t)now.tv_sec * 1000000000 + (uint64_t)now.tv_nsec;
}

/* As many shards as a mixture-of-experts adapter has, each an allocation of its own. */
#define MANY 37248

SERVER_TEST(many_shards_are_put_and_committed_fast)
{
    fanin_tensor *t = calloc(MANY, sizeof *t);
    fanin_box *boxes = calloc(MANY, sizeof *boxes);
    char(*name)[64] = calloc(MANY, sizeof *name);
    void **blocks = calloc(MANY, sizeof *blocks);
    assert_true(t && boxes && name && blocks);
    for (size_t i = 0; i < MANY; i++) {
        snprintf(name[i], sizeof name[i], "model.layers.%zu.experts.%zu.lora_A.weight",
                 i % 48, i / 48);
        blocks[i] = malloc(1000 + i % 700);
        assert_non_null(blocks[i]);
        t[i] = byte_tensor(name[i], &boxes[i], blocks[i], 1000);
    }
    fanin_server *s = server_start(NULL);
    uint64_t start = cpu_ns();
    assert_works(fanin_server_put(s, RUN, t, MANY, false, ERROR));
    uint64_t put = cpu_ns();
    server_commit(s, 1);
    uint64_t first = cpu_ns(), later = UINT64_MAX;
    /* The least of several: in one of them another thread may have had something to do. */
    for (uint64_t step = 2; step < 12; step++) {
        uint64_t before = cpu_ns();
        server_begin(s);
        server_commit(s, step);
        uint64_t took = cpu_ns() - before;
        later = took < later ? took : later;
    }
    print_message("# put %.1f ms, first commit %.1f ms, later ones %.3f ms\n",
                  (double)(put - start) / 1e6, (double)(first - put) / 1e6,
                  (double)later / 1e6);
    /* Without a change of the catalog a commit does nothing that grows with it. */
    assert_true(later < (first - start) / 4);
    peer p = peer_open(s);
    grant g = peer_newest(&p);
    region_table *regions = peer_regions(&p, &g, WIRE_PATH_STREAM);
    print_message("# %u regions\n", regions->count);
    assert_true(regions->count < MANY / 100);
    region_table_free(&regions);
    for (size_t i = 0; i < MANY; i += 2)
        assert_int_equal(fanin_server_remove(s, RUN, name[i], NULL), FANIN_OK);
    for (size_t i = 0; i < MANY; i += 2)
        assert_works(fanin_server_put(s, RUN, &t[i], 1, false, ERROR));
    assert_int_equal(server_stats(s).tensors, MANY);
    server_stop(&s, 0);
    for (size_t i = 0; i < MANY; i++)
        free(blocks[i]);
    free(blocks);
    free(name);
    free(boxes);
    free(t);
}
