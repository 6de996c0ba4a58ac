/* SPDX-License-Identifier: Apache-2.0 */
#include "cursor.h"
#include "text.h"

/* --------------------------------------------------------------------------- scan */

/* Heads 0xc0 .. 0xdf: what follows the first byte, and the least value that needs it. ext types,
   floats and 0xc1 are refused: they have no row. */
typedef struct head_row {
    uint8_t kind, bytes; /* bytes of the big-endian value; a sign is extended */
    bool is_signed;
    uint64_t least; /* unsigned kinds */
} head_row;

static const head_row head_rows[32] = {
    [0x00] = {SCAN_NIL, 0, false, 0},
    [0x02] = {SCAN_BOOL, 0, false, 0},
    [0x03] = {SCAN_BOOL, 0, false, 0},
    [0x04] = {SCAN_BIN, 1, false, 0},
    [0x05] = {SCAN_BIN, 2, false, 1u << 8},
    [0x06] = {SCAN_BIN, 4, false, 1u << 16},
    [0x0c] = {SCAN_UINT, 1, false, 1u << 7},
    [0x0d] = {SCAN_UINT, 2, false, 1u << 8},
    [0x0e] = {SCAN_UINT, 4, false, 1u << 16},
    [0x0f] = {SCAN_UINT, 8, false, UINT64_C(1) << 32},
    [0x10] = {SCAN_NEGATIVE, 1, true, 0},
    [0x11] = {SCAN_NEGATIVE, 2, true, 0},
    [0x12] = {SCAN_NEGATIVE, 4, true, 0},
    [0x13] = {SCAN_NEGATIVE, 8, true, 0},
    [0x19] = {SCAN_STR, 1, false, 1u << 5},
    [0x1a] = {SCAN_STR, 2, false, 1u << 8},
    [0x1b] = {SCAN_STR, 4, false, 1u << 16},
    [0x1c] = {SCAN_ARRAY, 2, false, 1u << 4},
    [0x1d] = {SCAN_ARRAY, 4, false, 1u << 16},
    [0x1e] = {SCAN_MAP, 2, false, 1u << 4},
    [0x1f] = {SCAN_MAP, 4, false, 1u << 16},
};

/* int8 .. int64: non-negative values have a shorter unsigned form. @p bytes: 1 to 8. */
static void judge_signed(scan_head *out, uint32_t bytes)
{
    uint32_t bits = 8 * bytes;
    /* NOLINTNEXTLINE(clang-analyzer-core.UndefinedBinaryOperatorResult) bits > 0 */
    if (bits < 64 && out->value >> (bits - 1))
        out->value |= UINT64_MAX << bits;
    int64_t value = (int64_t)out->value;
    if (value >= 0) {
        out->kind = SCAN_UINT;
        out->shortest = false;
        return;
    }
    static const int64_t above[] = {
        [1] = -32, [2] = INT8_MIN, [4] = INT16_MIN, [8] = INT32_MIN};
    out->shortest = value < above[bytes];
}

static scan_head one_byte(scan_kind kind, uint64_t value)
{
    return (scan_head){.kind = kind, .size = 1, .value = value, .shortest = true};
}

/* Reads one head; judges nothing but its own bytes. False: *why_out. */
static bool scan_head_read(const uint8_t *data, size_t size, scan_head *out,
                           const char **why_out)
{
    if (size == 0) {
        *why_out = "an object is missing";
        return false;
    }
    uint8_t first = data[0];
    if (first < 0x80)
        *out = one_byte(SCAN_UINT, first);
    else if (first < 0x90)
        *out = one_byte(SCAN_MAP, first & 15);
    else if (first < 0xa0)
        *out = one_byte(SCAN_ARRAY, first & 15);
    else if (first < 0xc0)
        *out = one_byte(SCAN_STR, first & 31);
    else if (first >= 0xe0)
        *out = one_byte(SCAN_NEGATIVE, UINT64_MAX << 8 | first);
    else {
        const head_row *row = &head_rows[first - 0xc0];
        if (row->kind == 0) {
            *why_out = "a msgpack type that is not allowed here";
            return false;
        }
        if (size - 1 < row->bytes) {
            *why_out = "an object is cut off";
            return false;
        }
        uint64_t value = row->kind == SCAN_BOOL ? first & 1 : 0;
        for (uint32_t i = 1; i <= row->bytes; i++)
            value = value << 8 | data[i];
        *out = (scan_head){.kind = (scan_kind)row->kind,
                           .size = 1u + row->bytes,
                           .value = value,
                           .shortest = value >= row->least};
        if (row->is_signed)
            judge_signed(out, row->bytes);
    }
    return true;
}

typedef struct scan_state {
    uint64_t open[SCAN_DEPTH + 1]; /* objects still to come, by depth */
    uint32_t depth;
    uint64_t pending; /* sum of open */
    uint64_t objects; /* seen and pending */
} scan_state;

static const char *scan_enter(scan_state *s, const scan_head *head, size_t left,
                              const scan_limits *limits)
{
    uint64_t count = head->kind == SCAN_MAP ? 2 * head->value : head->value;
    if (count == 0)
        return NULL;
    if (s->depth >= limits->depth || s->depth >= SCAN_DEPTH)
        return "objects are nested too deeply";
    s->pending += count;
    s->objects += count;
    /* Each takes a byte at least: a lie shows before anybody reserves memory for it. */
    if (s->pending > left)
        return "more elements are announced than bytes are there";
    if (s->objects > limits->objects)
        return "too many objects";
    s->open[++s->depth] = count;
    return NULL;
}

bool scan_object(const uint8_t *data, size_t size, const scan_limits *limits,
                 size_t *used_out, const char **why_out)
{
    scan_state s = {.open = {1}, .pending = 1, .objects = 1};
    size_t at = 0;
    while (s.pending) {
        scan_head head;
        if (!scan_head_read(data + at, size - at, &head, why_out))
            return false;
        at += head.size;
        s.open[s.depth]--;
        s.pending--;
        if (head.kind == SCAN_STR || head.kind == SCAN_BIN) {
            if (head.value > size - at) {
                *why_out = "a string is longer than the bytes that are there";
                return false;
            }
            at += head.value;
        } else if (head.kind == SCAN_ARRAY || head.kind == SCAN_MAP) {
            const char *why = scan_enter(&s, &head, size - at, limits);
            if (why) {
                *why_out = why;
                return false;
            }
        }
        while (s.depth && s.open[s.depth] == 0)
            s.depth--;
    }
    *used_out = at;
    return true;
}

/* ------------------------------------------------------------------------- cursor */

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
