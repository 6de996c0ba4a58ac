/* SPDX-License-Identifier: Apache-2.0 */
#include "peft/peft_pattern.h"

#include "clock.h"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <ctype.h>
#include <pcre2.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define SPECIAL ".^$*+?{}[]\\|()"

/* Steps of backtracking in one match: a millisecond or two. A name of 512 bytes takes thousands. */
#define MATCH_LIMIT 100000
#define HEAP_LIMIT 16384 /* KiB */
/* Reading the processor time costs as much as a match. */
#define MATCHES_A_LOOK 16

struct pattern {
    const char *text;
    pattern_result broken; /* PATTERN_NO: it can be matched */
    char problem[128];
    pcre2_code *code;
    pcre2_match_data *data;
    pcre2_match_context *limits;
    uint32_t options; /* of each match */
};

/* ------------------------------------------------------------- what both languages mean */

/* From a backslash on. Python has no other escapes with letters, and means something else by \v, \Z
   and numbers of two digits. @p numbers: whether a group can be referred to by its number. */
static bool read_escape(const char **at, bool in_class, bool numbers)
{
    char c = (*at)[1];
    bool good = c != '\0' &&
                (ispunct((unsigned char)c) || strchr("dDsSwWnrtfa", c) || (c == 'b') ||
                 (!in_class && strchr("AB", c)) || (numbers && c >= '1' && c <= '9'));
    if (isdigit((unsigned char)c) && isdigit((unsigned char)(*at)[2]))
        good = false;
    if (c == 'x' && isxdigit((unsigned char)(*at)[2]) &&
        isxdigit((unsigned char)(*at)[3])) {
        *at += 2;
        good = true;
    }
    *at += good ? 2 : 0;
    return good;
}

/* From "[" on. PCRE2 knows "[[:alpha:]]", Python has plans for "[[", "--", "&&", "~~", "||". */
static bool read_class(const char **at)
{
    ++*at;
    if (**at == '^')
        ++*at;
    if (**at == ']')
        ++*at;
    while (**at && **at != ']') {
        if (**at == '[' || (strchr("-&~|", **at) && (*at)[1] == **at))
            return false;
        if (**at != '\\')
            ++*at;
        else if (!read_escape(at, true, false))
            return false;
    }
    if (**at == ']')
        ++*at;
    return true;
}

/* From "(" on, up to where the group's content begins. @p first: nothing is before it. */
static bool read_group(const char **at, bool first)
{
    static const char *const plain[] = {
        "?:", "?=", "?!", "?<=", "?<!", "?P<", "?P=", "?#"};
    const char *p = ++*at;
    if (*p == '*')
        return false; /* PCRE2's verbs */
    if (*p != '?')
        return true;
    for (size_t i = 0; i < sizeof plain / sizeof plain[0]; i++) {
        if (strncmp(p, plain[i], strlen(plain[i])) == 0) {
            *at += strlen(plain[i]);
            return true;
        }
    }
    /* Flags: for the group, or at the beginning for all. */
    size_t flags = 1 + strspn(p + 1, "ims-");
    if (flags == 1 ||
        (p[flags] != ':' && (p[flags] != ')' || !first || memchr(p, '-', flags))))
        return false;
    *at += flags;
    return true;
}

/* From "{" on: "{2}", "{2,}", "{2,3}". Python has "{,3}" as well, PCRE2 later added blanks. */
static bool read_braces(const char **at)
{
    const char *p = *at + 1;
    size_t digits = strspn(p, "0123456789");
    p += digits;
    if (*p == ',')
        p += 1 + strspn(p + 1, "0123456789");
    *at = p + 1;
    return digits > 0 && *p == '}';
}

/* Whether Python and PCRE2 read the pattern alike, or both refuse it. */
static bool means_the_same(const char *pattern, pattern_use use)
{
    for (const char *at = pattern; *at;) {
        bool good = true;
        if (*at == '\\')
            good = read_escape(&at, false, use == PATTERN_WHOLE);
        else if (*at == '[')
            good = read_class(&at);
        else if (*at == '(')
            good = read_group(&at, use == PATTERN_WHOLE && at == pattern);
        else if (*at == '{')
            good = read_braces(&at);
        else
            at++;
        if (!good)
            return false;
    }
    return true;
}

/* ------------------------------------------------------------- compiling */

/* Limits of PCRE2 that Python does not have, as opposed to errors of the pattern. */
static bool is_limit(int reason)
{
    return reason == PCRE2_ERROR_QUANTIFIER_TOO_BIG ||
           reason == PCRE2_ERROR_PARENTHESES_NEST_TOO_DEEP ||
           reason == PCRE2_ERROR_PATTERN_TOO_LARGE ||
           reason == PCRE2_ERROR_PATTERN_TOO_COMPLICATED ||
           reason == PCRE2_ERROR_PATTERN_STRING_TOO_LONG ||
           reason == PCRE2_ERROR_LOOKBEHIND_TOO_COMPLICATED ||
           reason == PCRE2_ERROR_LOOKBEHIND_TOO_LONG;
}

static void refuse_pattern(pattern *p, int reason)
{
    if (reason == PCRE2_ERROR_HEAP_FAILED) {
        p->broken = PATTERN_MEMORY;
        return;
    }
    p->broken = is_limit(reason) ? PATTERN_UNKNOWN : PATTERN_INVALID;
    pcre2_get_error_message(reason, (PCRE2_UCHAR8 *)p->problem, sizeof p->problem);
}

static uint64_t cpu_ns(void)
{
    struct timespec now;
    if (clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now) != 0)
        return clock_ns();
    return (uint64_t)now.tv_sec * 1000000000 + (uint64_t)now.tv_nsec;
}

static bool may_cost_more(pattern_budget *budget)
{
    if (budget->spent || budget->matches++ % MATCHES_A_LOOK != 0)
        return !budget->spent;
    uint64_t now = cpu_ns();
    if (budget->until == 0)
        budget->until = now + budget->ns;
    budget->spent =
        now >= budget->until || work_stopped_after(budget->stop, WORK_STEPS);
    return !budget->spent;
}

/* Few characters may become many bytes. */
static void count_sequence_bytes(pattern_budget *budget, const pcre2_code *code)
{
    size_t size = 0;
    (void)pcre2_pattern_info(code, PCRE2_INFO_SIZE, &size);
    budget->spent = budget->spent || size > budget->bytes;
    budget->bytes -= size < budget->bytes ? size : budget->bytes;
}

/* False: out of memory. */
static bool compile(pattern *p, const char *text)
{
    int reason;
    PCRE2_SIZE offset;
    pcre2_compile_context *how = pcre2_compile_context_create(NULL);
    if (!how)
        return false;
    pcre2_set_newline(how, PCRE2_NEWLINE_LF); /* all that Python's "." does not match */
    p->code = pcre2_compile((PCRE2_SPTR8)text, PCRE2_ZERO_TERMINATED,
                            PCRE2_UTF | PCRE2_UCP | PCRE2_NEVER_BACKSLASH_C, &reason,
                            &offset, how);
    pcre2_compile_context_free(how);
    if (!p->code) {
        refuse_pattern(p, reason);
        return p->broken != PATTERN_MEMORY;
    }
    p->data = pcre2_match_data_create(1, NULL);
    p->limits = pcre2_match_context_create(NULL);
    if (!p->data || !p->limits)
        return false;
    pcre2_set_match_limit(p->limits, MATCH_LIMIT);
    pcre2_set_heap_limit(p->limits, HEAP_LIMIT);
    return true;
}

static bool compile_for(pattern *p, pattern_use use)
{
    if (use == PATTERN_WHOLE) {
        p->options = PCRE2_ANCHORED | PCRE2_ENDANCHORED;
        return compile(p, p->text);
    }
    char *key = NULL;
    p->options = PCRE2_ANCHORED;
    bool good = asprintf(&key, "(.*\\.)?(%s)$", p->text) >= 0 && compile(p, key);
    free(key);
    return good;
}

pattern *pattern_compile(const char *text, pattern_use use, pattern_budget *budget)
{
    pattern *p = calloc(1, sizeof *p);
    if (!p)
        return NULL;
    p->text = text;
    if (!may_cost_more(budget) || !means_the_same(text, use)) {
        p->broken = PATTERN_UNKNOWN;
        return p;
    }
    if (compile_for(p, use)) {
        if (p->code)
            count_sequence_bytes(budget, p->code);
        return p;
    }
    pattern_free(p);
    return NULL;
}

void pattern_free(pattern *p)
{
    if (!p)
        return;
    pcre2_code_free(p->code);
    pcre2_match_data_free(p->data);
    pcre2_match_context_free(p->limits);
    free(p);
}

/* ------------------------------------------------------------- matching */

pattern_result pattern_match(pattern *p, const char *text, size_t size,
                             pattern_budget *budget)
{
    if (p->broken)
        return p->broken;
    if (!may_cost_more(budget))
        return PATTERN_UNKNOWN;
    int result = pcre2_match(p->code, (PCRE2_SPTR8)text, size, 0, p->options, p->data,
                             p->limits);
    if (result >= 0)
        return PATTERN_YES;
    switch (result) {
    case PCRE2_ERROR_NOMATCH:
        return PATTERN_NO;
    case PCRE2_ERROR_MATCHLIMIT:
    case PCRE2_ERROR_DEPTHLIMIT:
    case PCRE2_ERROR_HEAPLIMIT:
        return PATTERN_LIMIT;
    case PCRE2_ERROR_NOMEMORY:
        return PATTERN_MEMORY;
    default:
        return PATTERN_UNKNOWN; /* a text that is not UTF-8 */
    }
}

const char *pattern_text(const pattern *p)
{
    return p->text;
}

const char *pattern_problem(const pattern *p)
{
    return p->problem;
}

void pattern_escape(buffer *out, const char *text, size_t size)
{
    for (size_t i = 0; i < size; i++) {
        if (strchr(SPECIAL, text[i]))
            buffer_append(out, "\\", 1);
        buffer_append(out, &text[i], 1);
    }
}
