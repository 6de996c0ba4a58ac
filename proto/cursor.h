/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file
 * Reading msgpack objects one after the other straight from their bytes: no tree, no
 * allocation, never past the end. The first mistake is remembered; every later call fails.
 */
#ifndef CURSOR_H
#define CURSOR_H

#include "messages.h"
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Heads of msgpack objects, and a bounded walk over whole ones: the only parser of bytes
    that nobody checked. */

#define SCAN_DEPTH 16

typedef enum scan_kind {
    SCAN_UINT = 1,
    SCAN_NEGATIVE,
    SCAN_NIL,
    SCAN_BOOL,
    SCAN_STR,
    SCAN_BIN,
    SCAN_ARRAY,
    SCAN_MAP,
} scan_kind;

/** The first bytes of an object: what it is, and its value or announced count. */
typedef struct scan_head {
    scan_kind kind;
    uint32_t size;  /**< bytes of the head itself */
    uint64_t value; /**< integer (two's complement if negative), 0/1, length or count */
    bool shortest;  /**< no shorter head says the same */
} scan_head;

typedef struct scan_limits {
    /** nesting, a scalar at top level is depth 0; at most SCAN_DEPTH */
    uint32_t depth;
    uint32_t objects; /**< in all */
} scan_limits;

/**
 * Whether data[0..size) begins with one complete object whose announced counts and
 * lengths all lie within the bytes that are there and within the limits; its size in
 * *used_out. Never reads past the end, never recurses, allocates nothing. ext types and
 * floats are refused. False: *why_out is a static sentence.
 */
bool scan_object(const uint8_t *data, size_t size, const scan_limits *limits,
                 size_t *used_out, const char **why_out);

typedef struct cursor {
    const uint8_t *at, *end;
    bool canonical;  /**< refuse heads that are not the shortest (tables) */
    const char *why; /**< NULL: no mistake yet */
} cursor;

bool cursor_fail(cursor *c, const char *why); /**< keeps the first one; false */
size_t cursor_left(const cursor *c);

bool cursor_uint(cursor *c, uint64_t max, uint64_t *out);
bool cursor_u32(cursor *c, uint32_t max, uint32_t *out);
bool cursor_int(cursor *c, int64_t min, int64_t max, int64_t *out);
bool cursor_bool(cursor *c, bool *out);
/** Text: UTF-8 without NUL, min .. max bytes. The view points into the input. */
bool cursor_text(cursor *c, size_t min, size_t max, bytes_view *out);
bool cursor_bin(cursor *c, size_t min, size_t max, bytes_view *out);
/** The announced count, which the bytes left can hold. */
bool cursor_array(cursor *c, uint32_t *count_out);
bool cursor_map(cursor *c, uint32_t *count_out);
/** Whether the next object is an array; consumes nothing. */
bool cursor_is_array(const cursor *c);
/** Skips one object of depth 3 at most; its bytes in *out (may be NULL). */
bool cursor_skip(cursor *c, bytes_view *out);

#endif
