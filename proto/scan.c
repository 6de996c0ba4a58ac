/* SPDX-License-Identifier: Apache-2.0 */
#include "scan.h"

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

bool scan_head_read(const uint8_t *data, size_t size, scan_head *out,
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
