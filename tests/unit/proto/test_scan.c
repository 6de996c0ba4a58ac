/* SPDX-License-Identifier: Apache-2.0 */
/* The bounded scan and the cursor, compared with msgpack-c where that can be trusted. */
#include "cursor.h"
#include "pack.h"
#include "random.h"
#include "testing.h"
#include <msgpack.h>

static const scan_limits usual = {.depth = 4, .objects = 1000};

static bool scan(const char *bytes, size_t size, size_t *used, const char **why)
{
    *why = NULL;
    return scan_object((const uint8_t *)bytes, size, &usual, used, why);
}

TEST(one_object_is_measured)
{
    static const struct {
        const char *bytes;
        size_t size, used;
    } rows[] = {
        {"\x05\x06", 2, 1},
        {"\xc0", 1, 1},
        {"\xc3", 1, 1},
        {"\xe0", 1, 1},
        {"\xcc\xff", 2, 2},
        {"\xcf\1\2\3\4\5\6\7\10", 9, 9},
        {"\xd3\1\2\3\4\5\6\7\10", 9, 9},
        {"\xa3xyz!", 5, 4},
        {"\xd9\2hi", 4, 4},
        {"\xda\0\2hi", 5, 5},
        {"\xdb\0\0\0\2hi", 7, 7},
        {"\xc4\2hi", 4, 4},
        {"\xc5\0\2hi", 5, 5},
        {"\xc6\0\0\0\2hi", 7, 7},
        {"\x80", 1, 1},
        {"\x92\1\x91\2\7", 5, 4},
        {"\xdc\0\1\1", 4, 4},
        {"\xdd\0\0\0\1\1", 6, 6},
        {"\x81\1\x90", 3, 3},
        {"\xde\0\1\1\2", 5, 5},
        {"\xdf\0\0\0\1\1\2", 7, 7},
        {"\x91\x91\x91\x91\1", 5, 5},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        size_t used = 0;
        const char *why;
        assert_true(scan(rows[i].bytes, rows[i].size, &used, &why));
        assert_int_equal(used, rows[i].used);
        /* Cut short anywhere, it is no object. */
        for (size_t size = 0; size < rows[i].used; size++) {
            assert_false(scan(rows[i].bytes, size, &used, &why));
            assert_non_null(why);
        }
    }
}

TEST(what_is_not_allowed_is_refused)
{
    static const uint8_t refused[] = {0xc1, 0xc7, 0xc8, 0xc9, 0xca, 0xcb,
                                      0xd4, 0xd5, 0xd6, 0xd7, 0xd8};
    uint8_t bytes[32] = {0};
    size_t used;
    const char *why = NULL;
    for (size_t i = 0; i < sizeof refused; i++) {
        bytes[0] = refused[i];
        assert_false(scan_object(bytes, sizeof bytes, &usual, &used, &why));
    }
    assert_false(scan("\x91\x91\x91\x91\x91\1", 6, &used, &why));
    assert_string_equal(why, "objects are nested too deeply");
}

TEST(huge_announcements_cost_nothing)
{
    size_t used;
    const char *why;
    assert_false(scan("\xdd\xff\xff\xff\xff", 5, &used, &why));
    assert_string_equal(why, "more elements are announced than bytes are there");
    assert_false(scan("\xdf\xff\xff\xff\xff\1\2\3", 8, &used, &why));
    assert_false(scan("\xdb\xff\xff\xff\xff\1\2\3", 8, &used, &why));
    assert_false(scan("\xc6\xff\xff\xff\xff\1\2\3", 8, &used, &why));
    /* The inner array takes bytes that the outer one needs. */
    assert_false(scan("\x93\x92\1\2\3", 5, &used, &why));

    static char many[3002] = "\xdc\x0b\xb8";
    assert_false(scan(many, 3, &used, &why));
    static const scan_limits few = {.depth = 4, .objects = 100};
    static uint8_t zeros[204] = {0xdc, 0, 200};
    assert_false(scan_object(zeros, sizeof zeros, &few, &used, &why));
    assert_string_equal(why, "too many objects");
}

/* Whatever the scan accepts, msgpack-c reads as one object of that size. */
TEST(random_bytes_are_read_as_msgpack_does)
{
    random_source r = {4};
    int accepted = 0;
    for (int round = 0; round < 200000; round++) {
        uint8_t bytes[24];
        size_t size = random_below(&r, sizeof bytes + 1), used = 0, at = 0;
        const char *why = NULL;
        for (size_t i = 0; i < size; i++)
            bytes[i] = (uint8_t)(random_below(&r, 2) ? random_below(&r, 16)
                                                     : 0x80 + random_below(&r, 0x80));
        if (!scan_object(bytes, size, &usual, &used, &why)) {
            assert_non_null(why);
            continue;
        }
        accepted++;
        msgpack_unpacked object;
        msgpack_unpacked_init(&object);
        assert_int_equal(msgpack_unpack_next(&object, (const char *)bytes, used, &at),
                         MSGPACK_UNPACK_SUCCESS);
        assert_int_equal(at, used);
        msgpack_unpacked_destroy(&object);
    }
    assert_true(accepted > 10000);
}

/* ------------------------------------------------------------- cursor */

static cursor over(const buffer *b, bool canonical)
{
    return (cursor){.at = b->data, .end = b->data + b->size, .canonical = canonical};
}

TEST(integers_come_back)
{
    random_source r = {5};
    for (int i = 0; i < 20000; i++) {
        uint64_t u = random_next(&r) >> random_below(&r, 64);
        int64_t s = (int64_t)(u >> 1) * (random_below(&r, 2) ? 1 : -1);
        buffer b = {0};
        pack_uint(&b, u);
        pack_int(&b, s);
        cursor c = over(&b, true);
        uint64_t u_again;
        int64_t s_again;
        assert_true(cursor_uint(&c, UINT64_MAX, &u_again));
        assert_true(cursor_int(&c, INT64_MIN, INT64_MAX, &s_again));
        assert_true(u == u_again && s == s_again);
        assert_int_equal(cursor_left(&c), 0);
        buffer_free(&b);
    }
}

TEST(longer_forms_are_not_canonical)
{
    static const struct {
        const char *bytes;
        size_t size;
        int64_t value;
        bool shortest;
    } rows[] = {
        {"\x7f", 1, 127, true},
        {"\xcc\x7f", 2, 127, false},
        {"\xcc\x80", 2, 128, true},
        {"\xcd\0\xff", 3, 255, false},
        {"\xcd\1\0", 3, 256, true},
        {"\xce\0\0\xff\xff", 5, 65535, false},
        {"\xce\0\1\0\0", 5, 65536, true},
        {"\xcf\0\0\0\0\xff\xff\xff\xff", 9, UINT32_MAX, false},
        {"\xcf\0\0\0\1\0\0\0\0", 9, INT64_C(1) << 32, true},
        {"\xd0\5", 2, 5, false},
        {"\xe0", 1, -32, true},
        {"\xd0\xe0", 2, -32, false},
        {"\xd0\xdf", 2, -33, true},
        {"\xd1\xff\x80", 3, -128, false},
        {"\xd1\xff\x7f", 3, -129, true},
        {"\xd2\xff\xff\x80\0", 5, -32768, false},
        {"\xd2\xff\xff\x7f\xff", 5, -32769, true},
        {"\xd3\xff\xff\xff\xff\x80\0\0\0", 9, INT32_MIN, false},
        {"\xd3\xff\xff\xff\xff\x7f\xff\xff\xff", 9, INT64_C(-2147483649), true},
        {"\xd2\0\1\0\0", 5, 65536, false},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
        for (int canonical = 0; canonical < 2; canonical++) {
            const uint8_t *bytes = (const uint8_t *)rows[i].bytes;
            cursor c = {bytes, bytes + rows[i].size, canonical != 0, NULL};
            int64_t value = 0;
            bool good = cursor_int(&c, INT64_MIN, INT64_MAX, &value);
            assert_int_equal(good, !canonical || rows[i].shortest);
            if (good)
                assert_true(value == rows[i].value);
        }
}

TEST(ranges_and_kinds_are_checked)
{
    buffer b = {0};
    uint64_t u;
    int64_t s;
    bool flag;
    uint32_t count;
    bytes_view v;
    pack_uint(&b, 300);
    cursor c = over(&b, false);
    assert_true(cursor_uint(&c, 300, &u));
    c = over(&b, false);
    assert_false(cursor_uint(&c, 299, &u));
    c = over(&b, false);
    assert_false(cursor_int(&c, 301, 400, &s));
    c = over(&b, false);
    assert_false(cursor_bool(&c, &flag));
    assert_false(cursor_uint(&c, 300, &u)); /* the first mistake stays */
    assert_string_equal(c.why, "a boolean is expected");
    c = over(&b, false);
    assert_false(cursor_text(&c, 0, 10, &v));
    c = over(&b, false);
    assert_false(cursor_array(&c, &count));
    c = over(&b, false);
    assert_false(cursor_map(&c, &count));
    b.size = 0;
    pack_int(&b, -1);
    c = over(&b, false);
    assert_false(cursor_uint(&c, UINT64_MAX, &u));
    b.size = 0;
    pack_uint(&b, UINT64_MAX);
    c = over(&b, false);
    assert_false(cursor_int(&c, INT64_MIN, INT64_MAX, &s));
    buffer_free(&b);
}

TEST(strings_are_checked)
{
    buffer b = {0};
    bytes_view v;
    pack_text(&b, "hello", 5);
    cursor c = over(&b, true);
    assert_true(cursor_text(&c, 5, 5, &v));
    assert_memory_equal(v.data, "hello", 5);
    c = over(&b, true);
    assert_false(cursor_text(&c, 0, 4, &v));
    c = over(&b, true);
    assert_false(cursor_text(&c, 6, 9, &v));
    c = over(&b, true);
    assert_false(cursor_bin(&c, 0, 9, &v));
    b.size--; /* cut off */
    c = over(&b, true);
    assert_false(cursor_text(&c, 0, 9, &v));
    b.size = 0;
    pack_text(&b, "a\0b", 3);
    c = over(&b, true);
    assert_false(cursor_text(&c, 0, 9, &v));
    b.size = 0;
    pack_text(&b, "\xff", 1);
    c = over(&b, true);
    assert_false(cursor_text(&c, 0, 9, &v));
    b.size = 0;
    pack_bin(&b, "\xff", 1);
    c = over(&b, true);
    assert_true(cursor_bin(&c, 1, 1, &v));
    buffer_free(&b);
}

TEST(skipping_goes_over_whole_objects)
{
    buffer b = {0};
    uint64_t u;
    bytes_view v;
    pack_map(&b, 1);
    pack_uint(&b, 1);
    pack_array(&b, 2);
    pack_text(&b, "x", 1);
    pack_bool(&b, true);
    size_t first = b.size;
    pack_uint(&b, 7);
    cursor c = over(&b, true);
    assert_false(cursor_is_array(&c));
    assert_true(cursor_skip(&c, &v));
    assert_int_equal(v.size, first);
    assert_true(cursor_uint(&c, 7, &u));
    assert_false(cursor_skip(&c, NULL));
    assert_false(cursor_is_array(&c));
    buffer_free(&b);
}
