/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file
 * Reading msgpack objects one after the other straight from their bytes: no tree, no
 * allocation, never past the end. The first mistake is remembered; every later call fails.
 */
#ifndef CURSOR_H
#define CURSOR_H

#include "messages.h"
#include "scan.h"

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
