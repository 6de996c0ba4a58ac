/* SPDX-License-Identifier: Apache-2.0 */
/* What is kept of an adapter's layout, and that one that was kept makes the same files. */
#include "adapter/adapter.h"
#include "testing.h"

static char root[64];
static logger nobody;

static key_entry entries[] = {
    {.name = "m.q.lora_A.default.weight",
     .dtype = FANIN_DTYPE_F32,
     .n_dims = 2,
     .shape = {8, 512},
     .bytes = 16384},
    {.name = "m.q.lora_B.default.weight",
     .dtype = FANIN_DTYPE_F32,
     .n_dims = 2,
     .shape = {64, 8},
     .bytes = 2048},
};
static fanin_pair pairs[] = {{"base_model_name_or_path", "org/model"},
                             {"lora_alpha", "16"}};

static int setup(void **state)
{
    strcpy(root, "/tmp/layout-fanin-XXXXXX");
    return mkdtemp(root) ? 0 : -1;
}

static int teardown(void **state)
{
    char command[100];
    snprintf(command, sizeof command, "rm -rf '%s'", root);
    return system(command);
}

#define CASE(name) TEST_WITH(name, setup, teardown)

/* Makes an adapter whose tensors hold @p fill. *laid_out: whether the layout was a kept one. */
static void make_adapter(const char *name, const key_table *keys, fanin_dtype dtype,
                         const char *publication, uint8_t fill, adapter_layout **kept,
                         bool *was_kept)
{
    char path[100];
    adapter *a;
    const uint64_t *to;
    uint64_t size;
    uint8_t *base;
    const adapter_layout_key key = {keys->id, dtype, false};
    adapter_identity identity = {
        .publication = publication, .step = fill, .dtype = dtype};
    snprintf(path, sizeof path, "%s/%s", root, name);
    assert_works(adapter_open(&(adapter_terms){.directory = path,
                                               .at = deadline_in_ms(20000),
                                               .log = nobody,
                                               .dtype = dtype,
                                               .layout = kept},
                              &a, ERROR));
    *was_kept = adapter_layout_fits(*kept, &key, publication);
    assert_works(adapter_prepare(a, keys, publication, &to, &size, ERROR));
    assert_false(adapter_layout_fits(*kept, &key, publication)); /* it is in use */
    assert_works(adapter_map(a, &base, ERROR));
    for (uint32_t i = 0; i < keys->count; i++) {
        uint64_t bytes = entries[i].bytes / (dtype ? 2 : 1);
        memset(base + to[i], fill, bytes);
        adapter_landed(a, to[i], bytes);
    }
    assert_works(adapter_publish(a, &identity, ERROR));
    adapter_close(&a);
    assert_true(adapter_layout_fits(*kept, &key, publication));
}

static void compare(const char *a, const char *b, const char *file)
{
    char command[300];
    snprintf(command, sizeof command, "cmp '%s/%s/%s' '%s/%s/%s'", root, a, file, root,
             b, file);
    assert_int_equal(system(command), 0);
}

CASE(a_kept_layout_makes_the_same_files)
{
    const key_table keys = {
        .entries = entries, .count = 2, .pairs = pairs, .n_pairs = 2, .id = {{1}}};
    adapter_layout *kept = NULL, *other = NULL;
    bool was_kept;
    make_adapter("first", &keys, 0, "lora:0", 3, &kept, &was_kept);
    assert_false(was_kept);
    make_adapter("second", &keys, 0, "lora:0", 3, &kept, &was_kept);
    assert_true(was_kept);
    make_adapter("fresh", &keys, 0, "lora:0", 3, &other, &was_kept);
    assert_false(was_kept);
    compare("first", "second", "adapter_model.safetensors");
    compare("first", "second", "adapter_config.json");
    compare("fresh", "second", "fanin.json");
    adapter_layout_free(&kept);
    adapter_layout_free(&other);
    adapter_layout_free(&other);
}

/* Other tables, types, publications are laid out anew. */
CASE(another_adapter_is_laid_out_anew)
{
    key_table keys = {
        .entries = entries, .count = 2, .pairs = pairs, .n_pairs = 2, .id = {{1}}};
    adapter_layout *kept = NULL;
    bool was_kept;
    make_adapter("a", &keys, 0, "lora:0", 1, &kept, &was_kept);
    make_adapter("b", &keys, FANIN_DTYPE_BF16, "lora:0", 1, &kept, &was_kept);
    assert_false(was_kept);
    make_adapter("c", &keys, FANIN_DTYPE_BF16, "lora:1", 1, &kept, &was_kept);
    assert_false(was_kept);
    keys.id = (digest){{2}};
    make_adapter("d", &keys, FANIN_DTYPE_BF16, "lora:1", 1, &kept, &was_kept);
    assert_false(was_kept);
    const adapter_layout_key trusted = {keys.id, FANIN_DTYPE_BF16, true};
    assert_false(adapter_layout_fits(kept, &trusted, "lora:1"));
    assert_false(adapter_layout_fits(NULL, &trusted, "lora:1"));
    adapter_layout_free(&kept);
}
