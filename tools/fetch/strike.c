/* SPDX-License-Identifier: Apache-2.0 */
#include "fetch/strike.h"
#include "fetch/output.h"
#include "fetch/terminal.h"

#include <ctype.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

enum { ROW_LEAST = 32 }; /* characters of a line of base64: a key's lines have 64 */

/* A piece of a line. */
typedef struct words {
    const char *at;
    size_t size;
} words;

/* --------------------------------------------------------------------------- names */

static bool has(words name, const char *word)
{
    size_t size = strlen(word);
    for (size_t at = 0; at + size <= name.size; at++) {
        if (strncasecmp(name.at + at, word, size) == 0) {
            return true;
        }
    }
    return false;
}

static bool has_one(words name, const char *const *list)
{
    while (*list != NULL && !has(name, *list)) {
        list++;
    }
    return *list != NULL;
}

/* Of these whatever word follows is struck. */
static const char *const surely[] = {"password", "passwd", "credential", NULL};
static const char *const perhaps[] = {"secret",        "key",    "token",
                                      "authorization", "cookie", NULL};

static bool is_secret(words name)
{
    return has_one(name, surely) || has_one(name, perhaps);
}

static bool is_of_name(char c)
{
    return isalnum((unsigned char)c) || c == '_' || c == '-' || c == '.';
}

static bool strike_is(words word, const char *other)
{
    return word.size == strlen(other) && strncasecmp(word.at, other, word.size) == 0;
}

/* "--api-key VALUE", of a command line that somebody logs. */
static bool is_option(words name, char next)
{
    return name.size > 2 && name.at[0] == '-' && name.at[1] == '-' &&
           (next == ' ' || next == '\t') && is_secret(name);
}

/* Whether what follows a URL's scheme is "://user:password@". */
static bool has_user(const char *after, size_t length)
{
    size_t end = 3;
    if (length < 3 || memcmp(after, "://", 3) != 0) {
        return false;
    }
    while (end < length && strchr("/?# \t\"'", after[end]) == NULL) {
        end++;
    }
    return memchr(after + 3, '@', end - 3) != NULL;
}

/* ------------------------------------------------------------------- words after names */

static size_t skip(words line, size_t at, const char *these)
{
    while (at < line.size && strchr(these, line.at[at]) != NULL && line.at[at] != 0) {
        at++;
    }
    return at;
}

static words word_at(words line, size_t at)
{
    size_t end = at;
    while (end < line.size && strchr(" \t\"',;)", line.at[end]) == NULL) {
        end++;
    }
    return (words){line.at + at, end - at};
}

/* What no sentence is made of: a digit among other things, or letters of both cases. */
static bool looks_random(words word)
{
    size_t digits = 0, letters = 0, capitals = 0;
    for (size_t i = 0; i < word.size; i++) {
        digits += isdigit((unsigned char)word.at[i]) != 0;
        letters += isalpha((unsigned char)word.at[i]) != 0;
        capitals += i > 0 && isupper((unsigned char)word.at[i]) != 0;
    }
    return letters > 0 && word.size >= 5 &&
           (digits > 0 || (capitals > 0 && capitals + 1 < letters));
}

/* Whether the word behind a name is its value. Keys are also tensors' names, with a run before
   them. */
static bool is_value(words name, words word)
{
    bool tensor = has(name, "key") && memchr(word.at, ':', word.size) != NULL;
    return word.size > 0 && word.at[0] != '/' && !tensor &&
           (has_one(name, surely) || looks_random(word));
}

/* The value that follows a name without a sign, "is" and quotes left out; size 0: there is none. */
static words value_after(words line, words name, size_t end)
{
    size_t at = skip(line, end, " \t\"'");
    words word = word_at(line, at);
    if (strike_is(word, "is") || strike_is(word, "was") || strike_is(word, "->") ||
        strike_is(word, "=>")) {
        word = word_at(line, skip(line, at + word.size, " \t\"'"));
    }
    return at > end && is_secret(name) && is_value(name, word) ? word : (words){0};
}

/* -------------------------------------------------------------------------- a line */

static void strike_put(FILE *stream, const char *text, size_t length)
{
    char *copy = output_require(strndup(text, length));
    terminal_put(stream, copy);
    free(copy);
}

/* Whether the rest of the line behind a name that ends at @p end is a secret; where it begins. */
static bool opens_rest(words line, words name, size_t end, size_t *from)
{
    size_t sign = skip(line, end, " \t\"'");
    bool assigned = sign < line.size && (line.at[sign] == '=' || line.at[sign] == ':');
    *from = sign + 1;
    if (assigned && is_secret(name)) {
        return true;
    }
    *from = end + 1;
    if (end < line.size &&
        (is_option(name, line.at[end]) || strike_is(name, "bearer"))) {
        return true;
    }
    *from = end + 3;
    return has_user(line.at + end, line.size - end);
}

/* What is not of a block. */
static void strike_words(FILE *stream, words line)
{
    size_t put_up_to = 0;
    for (size_t at = 0; at < line.size;) {
        size_t end = at, from;
        while (end < line.size && is_of_name(line.at[end])) {
            end++;
        }
        const words name = {line.at + at, end - at};
        if (opens_rest(line, name, end, &from)) {
            strike_put(stream, line.at + put_up_to, from - put_up_to);
            fputs("***", stream);
            return;
        }
        words value = value_after(line, name, end);
        if (value.size > 0) {
            size_t begin = (size_t)(value.at - line.at);
            strike_put(stream, line.at + put_up_to, begin - put_up_to);
            fputs("***", stream);
            put_up_to = end = begin + value.size;
        }
        at = end + 1;
    }
    strike_put(stream, line.at + put_up_to, line.size - put_up_to);
}

/* -------------------------------------------------------------------------- blocks */

static const char *strike_find(words line, const char *what)
{
    return memmem(line.at, line.size, what, strlen(what));
}

/* Base64 or hexadecimal digits and nothing else, but blanks around them. */
static bool is_row(words line, size_t least)
{
    size_t from = skip(line, 0, " \t"), end = from;
    while (end < line.size && (isalnum((unsigned char)line.at[end]) ||
                               strchr("+/=_-", line.at[end]) != NULL)) {
        end++;
    }
    return end - from >= least && skip(line, end, " \t\r") == line.size;
}

/* Whether a block goes on behind the line: its first row, or nothing, stands behind "BEGIN
   ...-----". */
static bool begins_block(words line, const char *begin)
{
    static const char dashes[] = "-----";
    words rest = {begin + 1, (size_t)(line.at + line.size - begin - 1)};
    const char *end = strike_find((words){rest.at + 5, rest.size - 5}, dashes);
    if (end == NULL) {
        return false;
    }
    end += strlen(dashes);
    rest = (words){end, (size_t)(line.at + line.size - end)};
    return skip(rest, 0, " \t\r\"'\\n") == rest.size || is_row(rest, 1);
}

void strike_line(striking *s, FILE *stream, const char *line, size_t length)
{
    const words whole = {line, length};
    const char *begin = strike_find(whole, "-----BEGIN "),
               *end = strike_find(whole, "-----END ");
    bool row = is_row(whole, s->in_rows ? 1 : ROW_LEAST);
    s->in_rows = row;
    if (s->in_block || row || (end != NULL && begin == NULL)) {
        fputs("***", stream);
        s->in_block = s->in_block && end == NULL;
    } else if (begin != NULL) {
        strike_words(stream, (words){line, (size_t)(begin - line)});
        fputs("***", stream);
        s->in_block = end == NULL && begins_block(whole, begin);
    } else {
        strike_words(stream, whole);
    }
}
