/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file
 * PEFT's patterns: regular expressions of Python. Only the part of the language is understood
 * that configurations really use (characters, ".", "\d", "\w", escaped punctuation, each with
 * "*", "+" or "?"); anything else is unknown, which is no error. Pure.
 */
#ifndef PEFT_PATTERN_H
#define PEFT_PATTERN_H

#include "buffer.h"

typedef enum pattern_result { PATTERN_NO, PATTERN_YES, PATTERN_UNKNOWN } pattern_result;

/** What matching may still cost, in steps; when it is used up everything is unknown. Bounds
    what a hostile pattern can do. */
typedef uint64_t pattern_budget;
#define PATTERN_BUDGET ((pattern_budget)20 * 1000 * 1000)

/** How PEFT uses pattern keys: `(.*\.)?(PATTERN)$` against @p size bytes of @p text. */
pattern_result pattern_match_key(const char *pattern, const char *text, size_t size,
                                 pattern_budget *budget);

/** How PEFT uses target_modules given as a string: against the whole text. */
pattern_result pattern_match_whole(const char *pattern, const char *text, size_t size,
                                   pattern_budget *budget);

/** Appends a pattern that matches just this text, without an anchor. */
void pattern_escape(buffer *out, const char *text, size_t size);

#endif
