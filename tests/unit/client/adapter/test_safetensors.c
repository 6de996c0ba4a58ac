/* SPDX-License-Identifier: Apache-2.0 */
/* The file format: what the writer lays out, and what the strict reader accepts. */
#include "adapter/tensor_files.h"
#include "testing.h"

#include <jansson.h>
#include <malloc.h>

static const uint64_t shape_23[] = {2, 3};
static const uint64_t shape_4[] = {4};

/* ------------------------------------------------------------- writer */

TEST(header_is_that_of_the_reference_writer)
{
    const safetensors_item items[] = {
        {"a", FANIN_DTYPE_BF16, 2, shape_23, 12},
        {"b", FANIN_DTYPE_F32, 1, shape_4, 16},
        {"c", FANIN_DTYPE_BF16, 0, NULL, 2},
        {"d", FANIN_DTYPE_U8, 1, shape_4, 4},
    };
    static const char json[] =
        "{\"__metadata__\":{\"format\":\"pt\"},"
        "\"b\":{\"dtype\":\"F32\",\"shape\":[4],\"data_offsets\":[0,16]},"
        "\"a\":{\"dtype\":\"BF16\",\"shape\":[2,3],\"data_offsets\":[16,28]},"
        "\"c\":{\"dtype\":\"BF16\",\"shape\":[],\"data_offsets\":[28,30]},"
        "\"d\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[30,34]}}";
    uint64_t offsets[4];
    safetensors_layout layout;
    fanin_error error = FANIN_ERROR_INIT;
    assert_int_equal(safetensors_lay_out(items, 4, offsets, &layout, &error), FANIN_OK);
    uint64_t padded = (sizeof json - 1 + 7) / 8 * 8;
    assert_int_equal(layout.header_size, 8 + padded);
    assert_int_equal(layout.header[0] | layout.header[1] << 8, padded);
    assert_memory_equal(layout.header + 8, json, sizeof json - 1);
    for (uint64_t i = 8 + sizeof json - 1; i < layout.header_size; i++)
        assert_int_equal(layout.header[i], ' ');
    assert_int_equal(offsets[0], layout.header_size + 16);
    assert_int_equal(offsets[1], layout.header_size);
    assert_int_equal(offsets[2], layout.header_size + 28);
    assert_int_equal(offsets[3], layout.header_size + 30);
    assert_int_equal(layout.file_size, layout.header_size + 34);
    free(layout.header);
}

TEST(names_are_escaped_as_serde_does)
{
    const safetensors_item item = {
        "\"\\/\b\f\n\r\t\x01\x1f\x7f\xc3\xa9\xf0\x9f\x99\x82", FANIN_DTYPE_U8, 1,
        shape_4, 4};
    static const char wanted[] = ",\"\\\"\\\\/\\b\\f\\n\\r\\t\\u0001\\u001f\x7f"
                                 "\xc3\xa9\xf0\x9f\x99\x82\":{";
    uint64_t offset;
    safetensors_layout layout;
    assert_int_equal(safetensors_lay_out(&item, 1, &offset, &layout, NULL), FANIN_OK);
    assert_non_null(
        memmem(layout.header, layout.header_size, wanted, sizeof wanted - 1));
    free(layout.header);
}

TEST(bad_names_are_refused)
{
    static const char *const names[] = {"__metadata__", "a\xff", "\xc0\x80",
                                        "\xed\xa0\x80"};
    for (size_t i = 0; i < sizeof(names) / sizeof names[0]; i++) {
        const safetensors_item item = {names[i], FANIN_DTYPE_U8, 1, shape_4, 4};
        uint64_t offset;
        safetensors_layout layout;
        fanin_error error = FANIN_ERROR_INIT;
        assert_int_equal(safetensors_lay_out(&item, 1, &offset, &layout, &error),
                         FANIN_ERR_MISMATCH);
        assert_true(error.message[0] != '\0');
    }
}

TEST(an_empty_file_has_only_metadata)
{
    safetensors_layout layout;
    assert_int_equal(safetensors_lay_out(NULL, 0, NULL, &layout, NULL), FANIN_OK);
    assert_int_equal(layout.header_size, 8 + 32);
    assert_int_equal(layout.file_size, 8 + 32);
    assert_memory_equal(layout.header + 8, "{\"__metadata__\":{\"format\":\"pt\"}}",
                        32);
    free(layout.header);
}

/* ------------------------------------------------------------- reader */

static fanin_status parse(const char *json, uint64_t data, fanin_safetensors **out,
                          fanin_error *error)
{
    return safetensors_parse(json, strlen(json), 8 + strlen(json) + data, out, error);
}

TEST(good_headers_are_read)
{
    static const struct {
        const char *json;
        uint64_t data;
        size_t count;
    } cases[] = {
        {"{}", 0, 0},
        {"{}   \n", 0, 0},
        {"{\"__metadata__\":{\"format\":\"pt\"}}", 0, 0},
        {"{\"\":{\"dtype\":\"U8\",\"shape\":[],\"data_offsets\":[0,1]}}", 1, 1},
        /* unaligned and unsorted */
        {"{\"b\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[1,5]},"
         "\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]}}",
         5, 2},
        /* empty tensors at the running offset */
        {"{\"b\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]},"
         "\"a\":{\"dtype\":\"F32\",\"shape\":[0,7],\"data_offsets\":[0,0]},"
         "\"c\":{\"dtype\":\"F32\",\"shape\":[0],\"data_offsets\":[4,4]}}",
         4, 3},
        {"{\"a\":{\"dtype\":\"F4\",\"shape\":[3,2],\"data_offsets\":[0,3]}}", 3, 1},
        /* whitespace wherever it may be, metadata in the middle */
        {"{\n \"a\"\t:\r {\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]} ,\n"
         " \"__metadata__\" : {} , \"b\":{\"dtype\":\"U8\",\"shape\":[1],"
         "\"data_offsets\":[1,2]}\n}  ",
         2, 2},
        {"{\"a\\u00e9\\n\":{\"shape\":[1,1,1,1,1,1,1,2],\"data_offsets\":[0,4],"
         "\"dtype\":\"BF16\"}}",
         4, 1},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        fanin_safetensors *file = NULL;
        fanin_error error = FANIN_ERROR_INIT;
        if (parse(cases[i].json, cases[i].data, &file, &error) != FANIN_OK)
            fail_msg("%s: %s", cases[i].json, error.message);
        assert_int_equal(fanin_safetensors_count(file), cases[i].count);
        fanin_safetensors_close(&file);
        assert_null(file);
    }
}

#define U8_AT(name, begin, end)                                                        \
    "\"" name "\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[" begin "," end "]}"

TEST(bad_headers_are_refused)
{
    static const struct {
        const char *json, *why;
        uint64_t data;
    } cases[] = {
        {"", "brace", 0},
        {" {}", "brace", 0},
        {"[]", "brace", 0},
        {"{", "brace", 0},
        {"{} x", "JSON", 0},
        {"{} {}", "JSON", 0},
        {"{}}", "JSON", 0},
        {"{,}", "JSON", 0},
        {"{\"a\"}", "JSON", 0},
        {"{\"a\":}", "JSON", 0},
        {"{\"a\":", "JSON", 0},
        {"{\"a", "JSON", 0},
        {"{a:1}", "JSON", 0},
        {"{1:1}", "JSON", 0},
        {"{[]:1}", "JSON", 0},
        {"{\"a\" 1}", "JSON", 0},
        {"{\"a\"::1}", "JSON", 0},
        {"{\"a\":tru}", "JSON", 0},
        {"{" U8_AT("a", "0", "1"), "',' or '}'", 1},
        {"{" U8_AT("a", "0", "1") ",", "a name", 1},
        {"{" U8_AT("a", "0", "1") ",}", "a name", 1},
        {"{," U8_AT("a", "0", "1") "}", "a name", 1},
        {"{" U8_AT("a", "0", "1") " " U8_AT("b", "1", "2") "}", "',' or '}'", 2},
        {"{" U8_AT("a", "0", "1") ",," U8_AT("b", "1", "2") "}", "a name", 2},
        {"{" U8_AT("a", "0", "1") "]", "',' or '}'", 1},
        {"{" U8_AT("a", "0", "1") "," U8_AT("a", "1", "2") "}", "same name", 2},
        {"{" U8_AT("a", "0", "1") "," U8_AT("a", "0", "1") "}", "same name", 1},
        {"{" U8_AT("a", "0", "1") "," U8_AT("b", "1", "2") "," U8_AT("\\u0061", "2",
                                                                     "3") "}",
         "same name", 3},
        {"{\"a\":{\"dtype\":\"U8\",\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,"
         "1]}}",
         "duplicate", 1},
        {"{\"__metadata__\":{\"x\":\"1\",\"x\":\"1\"}}", "duplicate", 0},
        {"{\"__metadata__\":{},\"__metadata__\":{}}", "twice", 0},
        {"{\"__metadata__\":{},\"__metadata\\u005f_\":{}}", "twice", 0},
        {"{\"a\\u0000\":{}}", "JSON", 0},
        {"{\"a\xff\":{}}", "JSON", 0},
        {"{\"__metadata__\":null}", "__metadata__", 0},
        {"{\"__metadata__\":{\"a\":1}}", "__metadata__", 0},
        {"{\"a\":1}", "entry", 0},
        {"{\"a\":{\"dtype\":\"U8\",\"shape\":[1]}}", "entry", 1},
        {"{\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1],\"x\":1}}",
         "entry", 1},
        {"{\"a\":{\"dtype\":\"U9\",\"shape\":[1],\"data_offsets\":[0,1]}}", "dtype", 1},
        {"{\"a\":{\"dtype\":8,\"shape\":[1],\"data_offsets\":[0,1]}}", "dtype", 1},
        {"{\"a\":{\"dtype\":\"U8\",\"shape\":1,\"data_offsets\":[0,1]}}", "array", 1},
        {"{\"a\":{\"dtype\":\"U8\",\"shape\":[1.0],\"data_offsets\":[0,1]}}", "integer",
         1},
        {"{\"a\":{\"dtype\":\"U8\",\"shape\":[1e0],\"data_offsets\":[0,1]}}", "integer",
         1},
        {"{\"a\":{\"dtype\":\"U8\",\"shape\":[-0],\"data_offsets\":[0,0]}}", "negative",
         0},
        {"{\"a\":{\"dtype\":\"U8\",\"shape\":[01],\"data_offsets\":[0,1]}}", "JSON", 1},
        {"{\"a\":{\"dtype\":\"U8\",\"shape\":[1,1,1,1,1,1,1,1,1],\"data_offsets\":[0,1]"
         "}}",
         "dimensions", 1},
        {"{\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1,2]}}",
         "dimensions", 1},
        {"{\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0]}}", "outside", 1},
        {"{\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[1,0]}}", "outside",
         1},
        {"{" U8_AT("a", "0", "2") "}", "contradict", 2},
        {"{\"a\":{\"dtype\":\"F4\",\"shape\":[3],\"data_offsets\":[0,2]}}",
         "contradict", 2},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[4611686018427387904,4],"
         "\"data_offsets\":[0,0]}}",
         "contradict", 0},
        {"{" U8_AT("a", "0", "1") "}", "follow", 2},
        {"{" U8_AT("a", "0", "1") "}", "outside", 0},
        {"{" U8_AT("a", "0", "1") "," U8_AT("b", "2", "3") "}", "hole", 3},
        {"{" U8_AT("a", "1", "2") "}", "hole", 2},
        {"{" U8_AT("a", "0", "1") "," U8_AT("b", "0", "1") "}", "overlap", 1},
        {"{" U8_AT("a", "0", "1") ",\"b\":{\"dtype\":\"U8\",\"shape\":[0],"
                                  "\"data_offsets\":[0,0]}," U8_AT("c", "2", "3") "}",
         "hole", 3},
        {"{\"a\":[[[[[[[[[[]]]]]]]]]]}", "more than tensors", 0},
        {"{\"a\":{\"b\":{\"c\":{\"d\":{}}}}}", "more than tensors", 0},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        fanin_safetensors *file = NULL;
        fanin_error error = FANIN_ERROR_INIT;
        fanin_status status = parse(cases[i].json, cases[i].data, &file, &error);
        if (status != FANIN_ERR_MISMATCH || !strstr(error.message, cases[i].why))
            fail_msg("%s: %d, '%s', not '%s'", cases[i].json, status, error.message,
                     cases[i].why);
        assert_null(file);
    }
}

/* Wherever it is: no byte of JSON is one. */
TEST(nul_bytes_are_refused)
{
    static const char json[] = "{" U8_AT("a", "0", "1") "," U8_AT("b", "1", "2") "}";
    for (size_t i = 1; i <= sizeof json - 1; i++) {
        char with[sizeof json];
        memcpy(with, json, i);
        with[i] = '\0';
        memcpy(with + i + 1, json + i, sizeof json - 1 - i);
        fanin_safetensors *file = NULL;
        fanin_error error = FANIN_ERROR_INIT;
        assert_int_equal(
            safetensors_parse(with, sizeof json, 8 + sizeof json + 2, &file, &error),
            FANIN_ERR_MISMATCH);
        assert_non_null(strstr(error.message, "NUL"));
        assert_null(file);
    }
}

TEST(errors_tell_where)
{
    fanin_safetensors *file = NULL;
    fanin_error error = FANIN_ERROR_INIT;
    static const char json[] = "{" U8_AT("a", "0", "1") ",  \"b\" 5}";
    char where[32];
    snprintf(where, sizeof where, "at byte %zu", strlen(json) - 2);
    assert_int_equal(parse(json, 1, &file, &error), FANIN_ERR_MISMATCH);
    assert_non_null(strstr(error.message, where));
    /* in a member: counted from the header's first byte too */
    static const char member[] = "{" U8_AT("a", "0", "1") ",\"b\":{x}}";
    snprintf(where, sizeof where, "at byte %zu", strlen(member) - 2);
    assert_int_equal(parse(member, 1, &file, &error), FANIN_ERR_MISMATCH);
    assert_non_null(strstr(error.message, where));
    assert_int_equal(
        parse("{" U8_AT("x", "0", "1") "," U8_AT("x", "1", "2") "}", 2, &file, &error),
        FANIN_ERR_MISMATCH);
    assert_string_equal(error.key, "x");
}

static size_t tree_bytes, tree_most;

static void *tree_malloc(size_t size)
{
    void *at = malloc(size);
    tree_bytes += at ? malloc_usable_size(at) : 0;
    tree_most = tree_bytes > tree_most ? tree_bytes : tree_most;
    return at;
}

static void tree_free(void *at)
{
    tree_bytes -= at ? malloc_usable_size(at) : 0;
    free(at);
}

TEST(trees_are_of_one_member_each)
{
    enum { COUNT = 20000 };
    char *json = malloc((size_t)COUNT * 100);
    assert_non_null(json);
    size_t size = (size_t)sprintf(json, "{\"__metadata__\":{\"format\":\"pt\"}");
    for (int i = 0; i < COUNT; i++)
        size += (size_t)sprintf(
            json + size,
            ",\"t%d\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[%d,%d]}", i, i,
            i + 1);
    json[size++] = '}';
    fanin_safetensors *file = NULL;
    json_malloc_t malloc_before;
    json_free_t free_before;
    json_get_alloc_funcs(&malloc_before, &free_before);
    json_set_alloc_funcs(tree_malloc, tree_free);
    fanin_status status = safetensors_parse(json, size, 8 + size + COUNT, &file, NULL);
    assert_int_equal(status, FANIN_OK);
    assert_int_equal(fanin_safetensors_count(file), COUNT);
    assert_true(fanin_safetensors_find(file, "t19999") >= 0);
    fanin_safetensors_close(&file);
    json_set_alloc_funcs(malloc_before, free_before);
    free(json);
    assert_int_equal(tree_bytes, 0);
    assert_in_range(tree_most, 1, 16 * 1024);
}

TEST(what_is_written_is_read)
{
    const safetensors_item items[] = {
        {"a\n\"", FANIN_DTYPE_BF16, 2, shape_23, 12},
        {"b\xc3\xa9", FANIN_DTYPE_F32, 1, shape_4, 16},
        {"c", FANIN_DTYPE_BF16, 0, NULL, 2},
    };
    uint64_t offsets[3];
    safetensors_layout layout;
    assert_int_equal(safetensors_lay_out(items, 3, offsets, &layout, NULL), FANIN_OK);
    fanin_safetensors *file = NULL;
    fanin_error error = FANIN_ERROR_INIT;
    assert_int_equal(safetensors_parse((const char *)layout.header + 8,
                                       layout.header_size - 8, layout.file_size, &file,
                                       &error),
                     FANIN_OK);
    assert_int_equal(fanin_safetensors_count(file), 3);
    for (size_t i = 0; i < 3; i++) {
        int64_t index = fanin_safetensors_find(file, items[i].name);
        assert_true(index >= 0);
        fanin_safetensors_entry entry = {.struct_size = sizeof entry};
        assert_true(fanin_safetensors_get(file, (size_t)index, &entry));
        assert_string_equal(entry.name, items[i].name);
        assert_int_equal(entry.dtype, items[i].dtype);
        assert_int_equal(entry.n_dims, items[i].n_dims);
        assert_int_equal(entry.offset, offsets[i]);
        assert_int_equal(entry.bytes, items[i].bytes);
    }
    fanin_safetensors_entry entry = {.struct_size = sizeof entry};
    assert_false(fanin_safetensors_get(file, 3, &entry));
    assert_int_equal(fanin_safetensors_find(file, "z"), -1);
    const fanin_pair *pairs;
    assert_int_equal(fanin_safetensors_metadata(file, &pairs), 1);
    assert_string_equal(pairs[0].key, "format");
    assert_string_equal(pairs[0].value, "pt");
    fanin_safetensors_close(&file);
    free(layout.header);
}

TEST(a_short_entry_gets_what_fits)
{
    fanin_safetensors *file = NULL;
    assert_int_equal(parse("{" U8_AT("a", "0", "1") "}", 1, &file, NULL), FANIN_OK);
    fanin_safetensors_entry entry;
    memset(&entry, 0x5a, sizeof entry);
    entry.struct_size = offsetof(fanin_safetensors_entry, n_dims);
    assert_true(fanin_safetensors_get(file, 0, &entry));
    assert_string_equal(entry.name, "a");
    assert_int_equal(entry.struct_size, offsetof(fanin_safetensors_entry, n_dims));
    assert_int_equal(entry.n_dims, 0x5a5a5a5a);
    fanin_safetensors_close(&file);
}

/* ------------------------------------------------------------- files */

static void write_temporary(char path[64], const void *data, size_t size)
{
    strcpy(path, "/tmp/fanin-safetensors-XXXXXX");
    int fd = mkstemp(path);
    assert_true(fd >= 0);
    assert_int_equal(write(fd, data, size), size);
    close(fd);
}

TEST(files_are_opened)
{
    char path[64];
    static const char json[] = "{" U8_AT("a", "0", "1") "}   ";
    char content[128] = {(char)(sizeof json - 1)};
    memcpy(content + 8, json, sizeof json - 1);
    size_t size = 8 + sizeof json - 1 + 1;
    content[size - 1] = 'Z';
    write_temporary(path, content, size);
    fanin_safetensors *file = NULL;
    fanin_error error = FANIN_ERROR_INIT;
    if (fanin_safetensors_open(path, &file, &error))
        fail_msg("%s", error.message);
    fanin_safetensors_entry entry = {.struct_size = sizeof entry};
    assert_true(fanin_safetensors_get(file, 0, &entry));
    char byte;
    assert_int_equal(
        pread(fanin_safetensors_descriptor(file), &byte, 1, (off_t)entry.offset), 1);
    assert_int_equal(byte, 'Z');
    fanin_safetensors_close(&file);
    for (size_t cut = 0; cut < size; cut++) {
        assert_int_equal(truncate(path, (off_t)cut), 0);
        assert_int_equal(fanin_safetensors_open(path, &file, &error),
                         FANIN_ERR_MISMATCH);
        assert_null(file);
        unlink(path);
        write_temporary(path, content, size);
    }
    unlink(path);
    assert_int_equal(fanin_safetensors_open(path, &file, &error), FANIN_ERR_NOT_FOUND);
    assert_int_equal(fanin_safetensors_open("/tmp", &file, &error), FANIN_ERR_IO);
    assert_int_equal(fanin_safetensors_open(NULL, &file, &error), FANIN_ERR_ARGUMENT);
}

TEST(huge_lengths_are_refused)
{
    char path[64];
    fanin_safetensors *file = NULL;
    fanin_error error = FANIN_ERROR_INIT;
    write_temporary(path, "\xff\xff\xff\xff\xff\xff\xff\xff{}", 10);
    assert_int_equal(fanin_safetensors_open(path, &file, &error), FANIN_ERR_MISMATCH);
    unlink(path);
}
