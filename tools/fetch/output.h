/* SPDX-License-Identifier: Apache-2.0 */
/** @file Data on stdout: tables, JSON objects, sizes and durations as people read them; and text
    that others made, on its way to a terminal. */
#ifndef OUTPUT_H
#define OUTPUT_H

#include <fanin/types.h>
#include <jansson.h>
#include <libsmartcols/libsmartcols.h>
#include <stdbool.h>
#include <stdio.h>

/** Whether errors also go to stdout as JSON; set by the option parser. */
void output_use_json(bool json);
bool output_uses_json(void);

/** @p memory; NULL ends the program with a message. */
void *output_require(void *memory);

/** @p items, an array of @p count, with room for one more: moved if *@p capacity was reached.
    Memory failures end the program with a message (as all of this file does). */
void *output_room(void *items, size_t count, size_t *capacity, size_t item_size);

/** A table of the columns that @p names lists: "RUN^ STATE STEP>", where '>' is for numbers, and
    children of a row are drawn where '^' is. */
struct libscols_table *output_table(const char *names);

/** Appends a row: a text for each column, which is copied; NULL is empty. @p parent may be NULL. */
struct libscols_line *output_row(struct libscols_table *table,
                                 struct libscols_line *parent, ...);

/** Flushes standard output and remembers the first error. */
void output_flush(void);
/** That error's number; 0: none. */
int output_errno(void);

/** Prints to stdout and frees. */
void output_print(struct libscols_table *table);

/** Adds "schema":1, prints over several lines, releases @p object. */
void output_json(json_t *object);
/** The same as one line, flushed: for streams of events. */
void output_json_line(json_t *object);
/** An object of names and values, which it takes over: output_object("rank", output_u64(r),
    NULL). */
json_t *output_object(const char *name, ...) __attribute__((sentinel));
/** Sets further ones. */
void output_set(json_t *object, const char *name, ...) __attribute__((sentinel));
/** Bytes that are not UTF-8 become '?'; "" becomes null. */
json_t *output_string(const char *text);
/** From 2^63 on a string of digits, as fanin.json has it: JSON libraries take no such integer. */
json_t *output_u64(uint64_t value);
/** As hexadecimal digits. */
json_t *output_digits(const uint8_t bytes[16]);
/** Null if it is negative: not known. */
json_t *output_rank(int64_t rank);
/** An age in milliseconds as nanoseconds; null if it is 0, not known. */
json_t *output_age_ns(uint64_t ms);
/** Numbers as a list. */
json_t *output_list(const uint64_t *values, size_t count);

typedef struct output_text {
    char s[200];
} output_text;

output_text output_bytes(uint64_t bytes); /**< "84.1 MB" */
output_text output_duration(uint64_t ns); /**< "12.3 ms" */
output_text output_age(uint64_t ms);      /**< "350 ms", "64 s", "5 min"; 0: "-" */
output_text output_rate(uint64_t bytes, uint64_t ns); /**< "4.58 GB/s" */
output_text output_hex(const uint8_t bytes[16]);
output_text output_number(uint64_t value);
/** "[16, 4096]"; @p values may be a shape, an offset or an extent. */
output_text output_dims(const uint64_t *values, uint32_t count);

/** Writes behind what @p out holds, as far as there is room. */
void output_append(char *out, size_t size, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
/** Rising numbers as "0-3,6", with @p separator for the comma. */
void output_ranges(FILE *stream, const char *separator, const uint32_t *numbers,
                   size_t count);

/* ------------------------------------------------------------- files of JSON */

/** What the file says. NULL: it is no JSON, or has a key twice in one object, which @p why tells;
    or *@p reason_out is not 0: it cannot be read (an errno), or it is larger than @p most or no
    regular file (-1), as a pipe could be waited at for ever. Those @p why tells, too. */
json_t *json_file_read(const char *path, off_t most, json_error_t *why,
                       int *reason_out);
/** Of files that may have any size. */
#define JSON_FILE_ANY INT64_MAX

/** Writes @p text; control characters, marks that turn the direction of writing and bytes that
    are not UTF-8 become \xHH. */
void terminal_put(FILE *stream, const char *text);

/** Formats, makes harmless as terminal_put() does, adds a newline. */
void terminal_write(FILE *stream, const char *format, ...)
    __attribute__((format(printf, 2, 3)));
/** The same on standard output. */
void terminal_print(const char *format, ...) __attribute__((format(printf, 1, 2)));

/** The same on standard error, at once. */
void terminal_tell(const char *format, ...) __attribute__((format(printf, 1, 2)));

#endif
