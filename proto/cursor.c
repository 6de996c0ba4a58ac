/* SPDX-License-Identifier: Apache-2.0 */
#include "cursor.h"

#include "utf8.h"

bool cursor_fail(cursor *c, const char *why)
{
    if (!c->why)
        c->why = why;
    return false;
}

size_t cursor_left(const cursor *c)
{
    return (size_t)(c->end - c->at);
}

static bool next_head(cursor *c, scan_head *out)
{
    const char *why = NULL;
    if (c->why)
        return false;
    if (c->at < c->end && *c->at < 0x80) { /* most of what tables hold */
        *out = (scan_head){
            .kind = SCAN_UINT, .size = 1, .value = *c->at++, .shortest = true};
        return true;
    }
    if (!scan_head_read(c->at, cursor_left(c), out, &why))
        return cursor_fail(c, why);
    if (c->canonical && !out->shortest)
        return cursor_fail(c, "an object is not in its shortest form");
    c->at += out->size;
    return true;
}

/* The same of one kind; @p what is expected otherwise. */
static bool cursor_next_of(cursor *c, scan_kind kind, const char *what, scan_head *out)
{
    return next_head(c, out) && (out->kind == kind || cursor_fail(c, what));
}

bool cursor_uint(cursor *c, uint64_t max, uint64_t *out)
{
    scan_head head;
    if (!cursor_next_of(c, SCAN_UINT, "an unsigned integer is expected", &head))
        return false;
    if (head.value > max)
        return cursor_fail(c, "a number is out of range");
    *out = head.value;
    return true;
}

bool cursor_u32(cursor *c, uint32_t max, uint32_t *out)
{
    uint64_t value;
    if (!cursor_uint(c, max, &value))
        return false;
    *out = (uint32_t)value;
    return true;
}

bool cursor_int(cursor *c, int64_t min, int64_t max, int64_t *out)
{
    scan_head head;
    if (!next_head(c, &head))
        return false;
    if (head.kind != SCAN_UINT && head.kind != SCAN_NEGATIVE)
        return cursor_fail(c, "an integer is expected");
    bool too_big = head.kind == SCAN_UINT && head.value > INT64_MAX;
    if (too_big || (int64_t)head.value < min || (int64_t)head.value > max)
        return cursor_fail(c, "a number is out of range");
    *out = (int64_t)head.value;
    return true;
}

bool cursor_bool(cursor *c, bool *out)
{
    scan_head head;
    if (!cursor_next_of(c, SCAN_BOOL, "a boolean is expected", &head))
        return false;
    *out = head.value != 0;
    return true;
}

static bool cursor_take(cursor *c, const scan_head *head, size_t min, size_t max,
                        bytes_view *out)
{
    if (head->value < min || head->value > max)
        return cursor_fail(c, "a string's length is out of range");
    if (head->value > cursor_left(c))
        return cursor_fail(c, "a string is longer than the bytes that are there");
    *out = (bytes_view){c->at, (size_t)head->value};
    c->at += head->value;
    return true;
}

bool cursor_text(cursor *c, size_t min, size_t max, bytes_view *out)
{
    scan_head head;
    return cursor_next_of(c, SCAN_STR, "a text is expected", &head) &&
           cursor_take(c, &head, min, max, out) &&
           (utf8_valid(out->data, out->size) ||
            cursor_fail(c, "a text is not UTF-8 or holds a NUL"));
}

bool cursor_bin(cursor *c, size_t min, size_t max, bytes_view *out)
{
    scan_head head;
    return cursor_next_of(c, SCAN_BIN, "a byte string is expected", &head) &&
           cursor_take(c, &head, min, max, out);
}

static bool container(cursor *c, scan_kind kind, const char *what, uint32_t bytes_each,
                      uint32_t *count_out)
{
    scan_head head;
    if (!cursor_next_of(c, kind, what, &head))
        return false;
    if (head.value > cursor_left(c) / bytes_each)
        return cursor_fail(c, "more elements are announced than bytes are there");
    *count_out = (uint32_t)head.value;
    return true;
}

bool cursor_array(cursor *c, uint32_t *count_out)
{
    return container(c, SCAN_ARRAY, "an array is expected", 1, count_out);
}

bool cursor_map(cursor *c, uint32_t *count_out)
{
    return container(c, SCAN_MAP, "a map is expected", 2, count_out);
}

bool cursor_is_array(const cursor *c)
{
    scan_head head;
    const char *why;
    return !c->why && scan_head_read(c->at, cursor_left(c), &head, &why) &&
           head.kind == SCAN_ARRAY;
}

bool cursor_skip(cursor *c, bytes_view *out)
{
    static const scan_limits limits = {.depth = 3, .objects = UINT32_MAX};
    size_t used;
    const char *why = NULL;
    if (c->why)
        return false;
    if (!scan_object(c->at, cursor_left(c), &limits, &used, &why))
        return cursor_fail(c, why);
    if (out)
        *out = (bytes_view){c->at, used};
    c->at += used;
    return true;
}
