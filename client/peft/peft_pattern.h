/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file
 * PEFT's patterns: regular expressions of Python, evaluated by PCRE2 within limits that no
 * trainer's pattern can exceed. What the two languages read differently is not evaluated.
 */
#ifndef PEFT_PATTERN_H
#define PEFT_PATTERN_H

#include "array.h"
#include "worker_pool.h"

typedef enum pattern_result {
    PATTERN_NO,
    PATTERN_YES,
    PATTERN_UNKNOWN, /**< Python may read it otherwise, or the budget is used up */
    PATTERN_INVALID, /**< it is no regular expression */
    PATTERN_LIMIT,   /**< this one match takes too long */
    PATTERN_MEMORY
} pattern_result;

/** How PEFT uses it. */
typedef enum pattern_use {
    PATTERN_WHOLE, /**< target_modules given as a string: re.fullmatch(PATTERN, name) */
    PATTERN_KEY    /**< rank_pattern's keys: re.match("(.*\\.)?(PATTERN)$", name) */
} pattern_use;

/** What all patterns of one configuration may still cost together, in nanoseconds of the thread's
    processor time and in bytes of compiled patterns; when it is used up, or @p stop says so,
    everything is unknown. */
typedef struct pattern_budget {
    uint64_t ns, bytes;
    uint64_t until; /**< 0: nothing was done yet */
    unsigned matches;
    bool spent;
    work_stop *stop; /**< NULL: never stops */
} pattern_budget;
#define PATTERN_BUDGET                                                                 \
    ((pattern_budget){.ns = (uint64_t)2 * 1000 * 1000 * 1000,                          \
                      .bytes = (uint64_t)64 << 20})

typedef struct pattern pattern;

/** Copies nothing: @p text, NUL-terminated UTF-8, outlives it. NULL: out of memory. What is wrong
    with the pattern is told by the matches. To be freed with pattern_free(). */
pattern *pattern_compile(const char *text, pattern_use use, pattern_budget *budget);
void pattern_free(pattern *p);

/** Whether it matches @p size bytes of UTF-8 at @p text. Takes at most a few milliseconds. */
pattern_result pattern_match(pattern *p, const char *text, size_t size,
                             pattern_budget *budget);

/** What pattern_compile() was given. */
const char *pattern_text(const pattern *p);
/** Why it is PATTERN_INVALID, in a few words. */
const char *pattern_problem(const pattern *p);

/** Appends a pattern that matches just this text, without an anchor. */
void pattern_escape(buffer *out, const char *text, size_t size);

#endif
