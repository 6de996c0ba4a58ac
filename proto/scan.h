/* SPDX-License-Identifier: Apache-2.0 */
/** @file Heads of msgpack objects, and a bounded walk over whole ones: the only parser of bytes
    that nobody checked. */
#ifndef SCAN_H
#define SCAN_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

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

/** Reads one head; judges nothing but its own bytes. False: *why_out. */
bool scan_head_read(const uint8_t *data, size_t size, scan_head *out,
                    const char **why_out);

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

#endif
