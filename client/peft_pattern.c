/* SPDX-License-Identifier: Apache-2.0 */
#include "peft_pattern.h"

#include <ctype.h>
#include <string.h>

#define SPECIAL ".^$*+?{}[]\\|()"
#define DEPTH_MAX 64 /* repeated elements in one pattern */

typedef enum element_kind {
    ELEMENT_CHAR,
    ELEMENT_ANY,
    ELEMENT_DIGIT,
    ELEMENT_WORD
} element_kind;

/* One element of a pattern and how often it may occur. */
typedef struct element {
    element_kind kind;
    char c;
    char repeat;     /* '*', '+', '?' or 0 */
    const char *end; /* what follows it */
} element;

/* False: not understood. */
static bool read_element(const char *pattern, element *out)
{
    *out = (element){.kind = ELEMENT_CHAR, .c = pattern[0], .end = pattern + 1};
    if (pattern[0] == '.') {
        out->kind = ELEMENT_ANY;
    } else if (pattern[0] == '\\') {
        out->c = pattern[1];
        out->end = pattern + 2;
        if (pattern[1] == 'd')
            out->kind = ELEMENT_DIGIT;
        else if (pattern[1] == 'w')
            out->kind = ELEMENT_WORD;
        else if (!ispunct((unsigned char)pattern[1]))
            return false;
    } else if (strchr(SPECIAL, pattern[0])) {
        return false;
    }
    if (*out->end && strchr("*+?", *out->end)) {
        out->repeat = *out->end++;
        if (*out->end == '?') /* lazy: the same texts match */
            out->end++;
        else if (*out->end == '+') /* possessive: fewer do */
            return false;
    }
    return true;
}

static bool understood(const char *pattern)
{
    int repeated = 0;
    while (*pattern) {
        element e;
        if (!read_element(pattern, &e))
            return false;
        if (e.repeat && ++repeated > DEPTH_MAX)
            return false;
        pattern = e.end;
    }
    return true;
}

static bool element_fits(const element *e, char c)
{
    switch (e->kind) {
    case ELEMENT_CHAR:
        return c == e->c;
    case ELEMENT_ANY:
        return c != '\n';
    case ELEMENT_DIGIT:
        return isdigit((unsigned char)c);
    case ELEMENT_WORD:
        return isalnum((unsigned char)c) || c == '_';
    }
    return false;
}

/* Recursion is as deep as the pattern has repeated elements. */
static pattern_result match_here(const char *pattern, const char *text, const char *end,
                                 pattern_budget *budget)
{
    while (*pattern) {
        element e;
        if (*budget == 0 || !read_element(pattern, &e))
            return PATTERN_UNKNOWN;
        --*budget;
        if (!e.repeat) {
            if (text == end || !element_fits(&e, *text))
                return PATTERN_NO;
            text++;
            pattern = e.end;
            continue;
        }
        size_t least = e.repeat == '+', most = e.repeat == '?' ? 1 : SIZE_MAX;
        for (size_t n = 0;; n++) {
            if (n >= least) {
                pattern_result rest = match_here(e.end, text, end, budget);
                if (rest != PATTERN_NO)
                    return rest;
            }
            if (n == most || text == end || !element_fits(&e, *text))
                return PATTERN_NO;
            text++;
        }
    }
    return text == end ? PATTERN_YES : PATTERN_NO;
}

/* @p anywhere: also from behind each dot of the text. */
static pattern_result match(const char *pattern, const char *text, const char *end,
                            bool anywhere, pattern_budget *budget)
{
    /* Python counts characters where this counts bytes. */
    for (const char *at = text; at < end; at++) {
        if ((unsigned char)*at >= 0x80)
            return PATTERN_UNKNOWN;
    }
    bool anchored = pattern[0] == '^';
    if (anchored)
        pattern++;
    size_t size = strlen(pattern);
    char copy[1024];
    if (size >= sizeof(copy))
        return PATTERN_UNKNOWN;
    memcpy(copy, pattern, size + 1);
    if (size > 0 && copy[size - 1] == '$' && (size < 2 || copy[size - 2] != '\\'))
        copy[size - 1] = '\0';
    if (!understood(copy))
        return PATTERN_UNKNOWN;
    for (const char *at = text;;) {
        pattern_result result = match_here(copy, at, end, budget);
        if (result != PATTERN_NO || anchored || !anywhere)
            return result;
        const char *dot = memchr(at, '.', (size_t)(end - at));
        if (!dot)
            return PATTERN_NO;
        at = dot + 1;
    }
}

pattern_result pattern_match_key(const char *pattern, const char *text, size_t size,
                                 pattern_budget *budget)
{
    return match(pattern, text, text + size, true, budget);
}

pattern_result pattern_match_whole(const char *pattern, const char *text, size_t size,
                                   pattern_budget *budget)
{
    return match(pattern, text, text + size, false, budget);
}

void pattern_escape(buffer *out, const char *text, size_t size)
{
    for (size_t i = 0; i < size; i++) {
        if (strchr(SPECIAL, text[i]))
            buffer_append(out, "\\", 1);
        buffer_append(out, &text[i], 1);
    }
}
