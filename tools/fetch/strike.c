/* SPDX-License-Identifier: Apache-2.0 */
#include "fetch/strike.h"
#include "fetch/output.h"
#include "fetch/terminal.h"

#include <ctype.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

static bool is_secret(const char *name, size_t length)
{
    static const char *const words[] = {"secret",        "key",    "token",
                                        "password",      "passwd", "credential",
                                        "authorization", "cookie"};
    for (size_t at = 0; at < length; at++) {
        for (size_t i = 0; i < sizeof words / sizeof words[0]; i++) {
            size_t size = strlen(words[i]);
            if (size <= length - at && strncasecmp(name + at, words[i], size) == 0) {
                return true;
            }
        }
    }
    return false;
}

static bool is_of_name(char c)
{
    return isalnum((unsigned char)c) || c == '_' || c == '-' || c == '.';
}

/* "--api-key VALUE", of a command line that somebody logs. */
static bool is_option(const char *name, size_t length, char next)
{
    return length > 2 && name[0] == '-' && name[1] == '-' &&
           (next == ' ' || next == '\t') && is_secret(name, length);
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

/* Bytes up to the value of the first secret; @p length: there is none. */
static size_t open_part(const char *line, size_t length)
{
    for (size_t at = 0; at < length;) {
        size_t end = at;
        while (end < length && is_of_name(line[end])) {
            end++;
        }
        size_t sign = end;
        while (sign < length && strchr(" \t\"'", line[sign]) != NULL) {
            sign++;
        }
        bool assigned = sign < length && (line[sign] == '=' || line[sign] == ':');
        if (assigned && is_secret(line + at, end - at)) {
            return sign + 1;
        }
        if (end < length && is_option(line + at, end - at, line[end])) {
            return end + 1;
        }
        if (has_user(line + end, length - end)) {
            return end + 3;
        }
        at = end + 1;
    }
    return length;
}

void strike_line(FILE *stream, const char *line, size_t length)
{
    size_t open = open_part(line, length);
    char *copy = output_require(strndup(line, open));
    terminal_put(stream, copy);
    fputs(open < length ? "***" : "", stream);
    free(copy);
}
