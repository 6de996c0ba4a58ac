/* SPDX-License-Identifier: Apache-2.0 */
#include "fetch/terminal.h"

#include <errno.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
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

/* The same that the library keeps out of its messages: what steers a terminal, or is not seen. */
static bool terminal_is_hidden(uint32_t c)
{
    static const uint32_t ranges[][2] = {
        {0x0, 0x1f},        {0x7f, 0x9f},       {0xad, 0xad},       {0x34f, 0x34f},
        {0x600, 0x605},     {0x61c, 0x61c},     {0x6dd, 0x6dd},     {0x70f, 0x70f},
        {0x890, 0x891},     {0x8e2, 0x8e2},     {0x115f, 0x1160},   {0x17b4, 0x17b5},
        {0x180b, 0x180f},   {0x200b, 0x200f},   {0x2028, 0x202e},   {0x2060, 0x206f},
        {0x3164, 0x3164},   {0xfe00, 0xfe0f},   {0xfeff, 0xfeff},   {0xffa0, 0xffa0},
        {0xfff0, 0xfffb},   {0x110bd, 0x110bd}, {0x110cd, 0x110cd}, {0x13430, 0x1343f},
        {0x1bca0, 0x1bca3}, {0x1d173, 0x1d17a}, {0xe0000, 0xe0fff},
    };
    size_t i = 0, n = sizeof ranges / sizeof *ranges;
    while (i < n && ranges[i][1] < c) {
        i++;
    }
    return i < n && ranges[i][0] <= c;
}

void terminal_put(FILE *stream, const char *text)
{
    for (const unsigned char *p = (const unsigned char *)text; *p != '\0';) {
        uint32_t c;
        size_t size = decode(p, &c);
        bool good = size > 0 && !terminal_is_hidden(c);
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
