/* SPDX-License-Identifier: Apache-2.0 */
/** @file Data on stdout: tables, JSON objects, sizes and durations as people read them. */
#ifndef OUTPUT_H
#define OUTPUT_H

#include <fanin/types.h>
#include <jansson.h>
#include <libsmartcols/libsmartcols.h>

/** @p memory; NULL ends the program with a message. */
void *output_require(void *memory);

typedef struct output_column {
    const char *name;
    bool right; /**< numbers */
    bool tree;  /**< children of a row are drawn here */
} output_column;

/** A table; memory failures end the program with a message (as all of this file does). */
struct libscols_table *output_table(const output_column *columns, size_t count);

/** Appends a row; @p cells are copied, NULL is empty. @p parent may be NULL. */
struct libscols_line *output_row(struct libscols_table *table,
                                 struct libscols_line *parent, const char *const *cells,
                                 size_t count);

/** Prints to stdout and frees. */
void output_print(struct libscols_table *table);

/** Adds "schema":1, prints over several lines, releases @p object. */
void output_json(json_t *object);
/** The same as one line, flushed: for streams of events. */
void output_json_line(json_t *object);
/** Sets a string; bytes that are not UTF-8 become '?'; "" becomes null. */
void output_set_string(json_t *object, const char *name, const char *text);
/** The same alone. */
json_t *output_string(const char *text);
void output_set_u64(json_t *object, const char *name, uint64_t value);
/** Sets nanoseconds; null if the age is 0, not known. */
void output_set_age(json_t *object, const char *name, uint64_t ms);
/** Sets bytes as hexadecimal digits. */
void output_set_hex(json_t *object, const char *name, const uint8_t *bytes,
                    size_t size);

typedef struct output_text {
    char s[200];
} output_text;

output_text output_bytes(uint64_t bytes); /**< "84.1 MB" */
output_text output_duration(uint64_t ns); /**< "12.3 ms" */
output_text output_age(uint64_t ms);      /**< "350 ms", "64 s", "5 min"; 0: "-" */
output_text output_rate(uint64_t bytes, uint64_t ns);      /**< "4.58 GB/s" */
output_text output_hex(const uint8_t *bytes, size_t size); /**< at most 99 bytes */
output_text output_number(uint64_t value);
/** "[16, 4096]"; @p values may be a shape, an offset or an extent. */
output_text output_dims(const uint64_t *values, uint32_t count);

/** Parses exactly @p size bytes of hexadecimal digits. */
bool output_parse_hex(const char *text, uint8_t *bytes, size_t size);

#endif
