/* SPDX-License-Identifier: Apache-2.0 */
#include "fetch/terminal.h"

#include <errno.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* The character that @p p begins with and its bytes; 0 bytes: not UTF-8. */
static size_t decode(const unsigned char *p, uint32_t *out)
{
    static const uint32_t least[] = {0, 0, 0x80, 0x800, 0x10000};
    size_t size = p[0] < 0x80             ? 1
                  : (p[0] & 0xe0) == 0xc0 ? 2
                  : (p[0] & 0xf0) == 0xe0 ? 3
                  : (p[0] & 0xf8) == 0xf0 ? 4
                                          : 0;
    uint32_t value = size == 1 ? p[0] : p[0] & (0x7fu >> size);
    for (size_t i = 1; i < size; i++) {
        if ((p[i] & 0xc0) != 0x80) {
            return 0;
        }
        value = value << 6 | (p[i] & 0x3fu);
    }
    bool surrogate = value >= 0xd800 && value < 0xe000;
    *out = value;
    return size == 0 || value < least[size] || value > 0x10ffff || surrogate ? 0 : size;
}

static bool steers(uint32_t c)
{
    return c < 0x20 || (c >= 0x7f && c < 0xa0) || c == 0x200e || c == 0x200f ||
           (c >= 0x2028 && c <= 0x202e) || (c >= 0x2066 && c <= 0x2069);
}

void terminal_put(FILE *stream, const char *text)
{
    for (const unsigned char *p = (const unsigned char *)text; *p != '\0';) {
        uint32_t c;
        size_t size = decode(p, &c);
        bool good = size > 0 && !steers(c);
        for (size_t i = 0; i < (size > 0 ? size : 1); i++, p++) {
            if (good) {
                fputc(*p, stream);
            } else {
                fprintf(stream, "\\x%02x", *p);
            }
        }
    }
}

static void put_formatted(FILE *stream, const char *format, va_list arguments)
    __attribute__((format(printf, 2, 0)));

static void put_formatted(FILE *stream, const char *format, va_list arguments)
{
    char *text = NULL;
    if (vasprintf(&text, format, arguments) < 0) {
        return;
    }
    terminal_put(stream, text);
    fputc('\n', stream);
    free(text);
}

void terminal_write(FILE *stream, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    put_formatted(stream, format, arguments);
    va_end(arguments);
}

void terminal_print(const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    put_formatted(stdout, format, arguments);
    va_end(arguments);
}

void terminal_tell(const char *format, ...)
{
    char *line = NULL;
    size_t size = 0;
    fflush(stdout);
    FILE *stream = open_memstream(&line, &size);
    if (stream == NULL) {
        return;
    }
    va_list arguments;
    va_start(arguments, format);
    put_formatted(stream, format, arguments);
    va_end(arguments);
    if (fclose(stream) == 0) {
        for (size_t done = 0; done < size;) {
            ssize_t n = write(STDERR_FILENO, line + done, size - done);
            if (n < 0 && errno != EINTR) {
                break; /* nobody can be told */
            }
            done += n > 0 ? (size_t)n : 0;
        }
    }
    free(line);
}
