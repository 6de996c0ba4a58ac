/* SPDX-License-Identifier: Apache-2.0 */
/* How a model is cut into files, its index, and its configuration. */
#include "adapter/adapter.h"
#include "adapter/tensor_files.h"
#include "testing.h"

#include <jansson.h>

enum { PAGE = 4096 };

#define TENSOR(text, n)                                                                \
    {                                                                                  \
        .name = (text), .dtype = FANIN_DTYPE_BF16, .n_dims = 1, .shape = {(n) / 2},    \
        .bytes = (n)                                                                   \
    }

/* In the order of bytes, as a key table has them. */
static key_entry entries[] = {
    TENSOR("lm_head.weight", 400),   TENSOR("model.layers.0.w", 100),
    TENSOR("model.layers.1.w", 100), TENSOR("model.layers.10.w", 100),
    TENSOR("model.layers.2.w", 100), TENSOR("model.norm", 20),
};
static const key_table keys = {.entries = entries, .count = 6};

static tensor_files cut(const key_table *table, uint64_t most)
{
    tensor_files files;
    assert_works(tensor_files_of_model(table, most, PAGE, &files, ERROR));
    return files;
}

/* The file that a key's bytes go into. */
static size_t file_of(const tensor_files *files, uint32_t key)
{
    return tensor_files_at(files, files->to_of_key[key]);
}

TEST(what_fits_is_one_file)
{
    tensor_files files = cut(&keys, 0);
    assert_int_equal(files.count, 1);
    assert_string_equal(files.files[0].name, "model.safetensors");
    assert_null(files.index);
    assert_int_equal(files.span, files.files[0].layout.file_size);
    assert_int_equal(files.bytes, files.span);
    for (uint32_t i = 0; i < keys.count; i++)
        assert_true(files.to_of_key[i] >= files.files[0].layout.header_size);
    tensor_files_free(&files);
}

/* lm_head alone, being larger; layers 0, 1, 2, then 10 and the norm. */
TEST(files_are_cut_in_the_order_of_layers)
{
    static const size_t expected[] = {0, 1, 1, 2, 1, 2};
    tensor_files files = cut(&keys, 300);
    assert_int_equal(files.count, 3);
    for (uint32_t i = 0; i < keys.count; i++)
        assert_int_equal(file_of(&files, i), expected[i]);
    uint64_t bytes = 0;
    for (size_t i = 0; i < files.count; i++) {
        char name[64];
        snprintf(name, sizeof name, "model-%05zu-of-00003.safetensors", i + 1);
        assert_string_equal(files.files[i].name, name);
        assert_true(tensor_files_is_model(name));
        assert_int_equal(files.files[i].at % PAGE, 0);
        assert_true(i == 0 ||
                    files.files[i].at >=
                        files.files[i - 1].at + files.files[i - 1].layout.file_size);
        bytes += files.files[i].layout.file_size;
    }
    assert_int_equal(files.bytes, bytes);
    tensor_files_free(&files);
}

TEST(a_file_is_filled_to_the_last_byte)
{
    tensor_files files = cut(&keys, 400);
    assert_int_equal(files.count, 3);
    assert_int_equal(file_of(&files, 3), 1); /* layers 0, 1, 2, 10: 400 bytes */
    assert_int_equal(file_of(&files, 5), 2);
    tensor_files_free(&files);
}

TEST(the_index_names_every_tensors_file)
{
    tensor_files files = cut(&keys, 300);
    assert_non_null(files.index);
    assert_int_equal(strlen(files.index), files.index_size);
    assert_int_equal(files.index[files.index_size - 1], '\n');
    json_t *root = json_loads(files.index, 0, NULL);
    const json_t *map = json_object_get(root, "weight_map");
    assert_int_equal(json_object_size(map), keys.count);
    for (uint32_t i = 0; i < keys.count; i++)
        assert_string_equal(json_string_value(json_object_get(map, entries[i].name)),
                            files.files[file_of(&files, i)].name);
    const json_t *metadata = json_object_get(root, "metadata");
    assert_int_equal(json_integer_value(json_object_get(metadata, "total_size")), 820);
    json_decref(root);
    tensor_files_free(&files);
}

TEST(a_model_of_nothing_is_an_empty_file)
{
    const key_table none = {.entries = NULL};
    tensor_files files = cut(&none, 0);
    assert_int_equal(files.count, 1);
    assert_int_equal(files.span, files.files[0].layout.header_size);
    tensor_files_free(&files);
}

TEST(too_many_files_are_refused)
{
    enum { COUNT = MODEL_MAX_FILES + 1 };
    key_entry *many = calloc(COUNT, sizeof many[0]);
    char(*names)[16] = calloc(COUNT, sizeof names[0]);
    for (uint32_t i = 0; i < COUNT; i++) {
        snprintf(names[i], sizeof names[i], "t%07u", i);
        many[i] = (key_entry)TENSOR(names[i], 8);
    }
    const key_table table = {.entries = many, .count = COUNT};
    tensor_files files;
    fanin_error error = FANIN_ERROR_INIT;
    assert_int_equal(tensor_files_of_model(&table, 1, PAGE, &files, &error),
                     FANIN_ERR_LIMIT);
    assert_says(error.message, "100000");
    free(many);
    free(names);
}

TEST(a_name_that_no_file_can_hold_is_named)
{
    key_entry one = TENSOR("a\xff", 8);
    const key_table table = {.entries = &one, .count = 1};
    tensor_files files;
    fanin_error error = FANIN_ERROR_INIT;
    assert_int_equal(tensor_files_of_model(&table, 0, PAGE, &files, &error),
                     FANIN_ERR_MISMATCH);
    assert_null(files.files);
}

TEST(names_of_files_are_known)
{
    static const char *const others[] = {
        "model-00001-of-00003.safetensors.index.json",
        "model-00004-of-00003.safetensors",
        "model-00000-of-00003.safetensors",
        "model-1-of-x.safetensors",
        "amodel.safetensors",
        "model.bin",
    };
    assert_true(tensor_files_is_model("model.safetensors"));
    assert_true(tensor_files_is_model("model-00003-of-00003.safetensors"));
    for (size_t i = 0; i < sizeof others / sizeof others[0]; i++)
        assert_false(tensor_files_is_model(others[i]));
}

/* ---------------------------------------------------------------- configuration */

static fanin_status configure(const char *text, bool trusted, peft_config *out,
                              fanin_error *error)
{
    char copy[512];
    snprintf(copy, sizeof copy, "%s", text);
    fanin_pair pairs[] = {{"config", copy}, {"format", "pt"}};
    const key_table table = {.pairs = pairs, .n_pairs = 2};
    return model_config_make(&table, trusted, out, error);
}

TEST(a_configuration_stays_as_it_is)
{
    static const char text[] = "{\"rms_norm_eps\": 1e-06,\n \"layers\": [1, 2]}";
    peft_config config;
    assert_works(configure(text, false, &config, ERROR));
    assert_string_equal(config.text, text);
    assert_int_equal(config.size, strlen(text));
    assert_null(config.dropped);
    peft_config_free(&config);
}

TEST(code_of_others_is_left_out)
{
    static const char text[] = "{\"a\": 1, \"auto_map\": {\"AutoConfig\": \"x.Y\"}, "
                               "\"parts\": [{\"custom_pipelines\": {}, \"b\": 2}]}";
    peft_config config;
    assert_works(configure(text, true, &config, ERROR));
    assert_string_equal(config.text, text);
    peft_config_free(&config);
    assert_works(configure(text, false, &config, ERROR));
    assert_null(strstr(config.text, "auto_map"));
    assert_null(strstr(config.text, "custom_pipelines"));
    assert_says(config.text, "\"b\": 2");
    assert_says(config.dropped, "auto_map");
    assert_says(config.dropped, "custom_pipelines");
    peft_config_free(&config);
}

TEST(what_is_no_object_is_refused)
{
    static const char *const wrong[] = {"[1]", "{", "", "{\"a\": 1, \"a\": 2}"};
    peft_config config;
    for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++) {
        fanin_error error = FANIN_ERROR_INIT;
        assert_int_equal(configure(wrong[i], false, &config, &error),
                         FANIN_ERR_MISMATCH);
        assert_null(config.text);
    }
}

TEST(without_a_configuration_there_is_none)
{
    const key_table none = {.n_pairs = 0};
    peft_config config;
    assert_works(model_config_make(&none, false, &config, ERROR));
    assert_null(config.text);
}
