/* SPDX-License-Identifier: Apache-2.0 */
#include "fetch/output.h"
#include "fetch/interrupt.h"

#include "digest.h"
#include "text.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

static int write_errno; /* of the first write that failed */
static bool json_wanted;

void output_use_json(bool json)
{
    json_wanted = json;
}

bool output_uses_json(void)
{
    return json_wanted;
}

void *output_require(void *memory)
{
    if (memory == NULL) {
        fputs("nixl-fetch: out of memory: free memory\n", stderr);
        if (json_wanted) /* as failure_json() has it; that allocates */
            printf(
                "{\"schema\":1,\"error\":{\"code\":%d,\"status\":\"FANIN_ERR_MEMORY\","
                "\"message\":\"out of memory\",\"rank\":null,\"key\":null,"
                "\"address\":null,\"phase\":null,\"remedy\":\"free memory\"}}\n",
                FANIN_ERR_MEMORY);
        exit(exit_code_of(FANIN_ERR_MEMORY));
    }
    return memory;
}

void *output_room(void *items, size_t count, size_t *capacity, size_t item_size)
{
    if (count < *capacity)
        return items;
    *capacity = *capacity > 0 ? 2 * *capacity : 64;
    return output_require(realloc(items, *capacity * item_size));
}

struct libscols_table *output_table(const char *names)
{
    struct libscols_table *table = output_require(scols_new_table());
    scols_table_enable_noencoding(table, 1); /* cells are escaped as they come */
    for (const char *at = names; *at != '\0'; at += strspn(at, ">^ ")) {
        char name[32];
        int length = (int)strcspn(at, ">^ ");
        snprintf(name, sizeof name, "%.*s", length, at);
        at += length;
        int flags = *at == '>' ? SCOLS_FL_RIGHT : *at == '^' ? SCOLS_FL_TREE : 0;
        output_require(scols_table_new_column(table, name, 0, flags));
    }
    return table;
}

/* As in lines: libsmartcols would let marks through that turn the direction of text. */
static void set_cell(struct libscols_line *line, size_t column, const char *text)
{
    char *safe = NULL;
    size_t size = 0;
    FILE *stream = output_require(open_memstream(&safe, &size));
    terminal_put(stream, text);
    if (fclose(stream) != 0 || scols_line_set_data(line, column, safe) != 0)
        output_require(NULL);
    free(safe);
}

struct libscols_line *output_row(struct libscols_table *table,
                                 struct libscols_line *parent, ...)
{
    struct libscols_line *line = output_require(scols_table_new_line(table, parent));
    va_list cells;
    va_start(cells, parent);
    for (size_t i = 0; i < scols_table_get_ncols(table); i++) {
        const char *text = va_arg(cells, const char *);
        if (text != NULL)
            set_cell(line, i, text);
    }
    va_end(cells);
    return line;
}

void output_flush(void)
{
    errno = 0;
    if (fflush(stdout) != 0 && write_errno == 0)
        write_errno = errno;
}

int output_errno(void)
{
    return write_errno;
}

void output_print(struct libscols_table *table)
{
    scols_print_table(table);
    scols_unref_table(table);
    output_flush();
}

static void output_dump(json_t *object, size_t flags)
{
    json_t *whole = output_require(json_pack("{s:i}", "schema", 1));
    json_object_update(whole, output_require(object));
    json_decref(object);
    json_dumpf(whole, stdout, flags | JSON_ENSURE_ASCII);
    fputc('\n', stdout);
    output_flush();
    json_decref(whole);
}

void output_json(json_t *object)
{
    output_dump(object, JSON_INDENT(2));
}

void output_json_line(json_t *object)
{
    output_dump(object, JSON_COMPACT);
}

json_t *output_string(const char *text)
{
    if (text == NULL || text[0] == '\0')
        return json_null();
    char *copy = output_require(strdup(text));
    bool hidden;
    for (char *p = copy; *p != '\0';) {
        size_t size = utf8_next(p, &hidden);
        if (size == 0)
            *p = '?';
        p += size > 0 ? size : 1;
    }
    json_t *value = output_require(json_string(copy));
    free(copy);
    return value;
}

json_t *output_u64(uint64_t value)
{
    return value <= INT64_MAX ? json_integer((json_int_t)value)
                              : output_string(output_number(value).s);
}

json_t *output_digits(const uint8_t bytes[16])
{
    return output_string(output_hex(bytes).s);
}

json_t *output_rank(int64_t rank)
{
    return rank >= 0 ? json_integer(rank) : json_null();
}

json_t *output_age_ns(uint64_t ms)
{
    return ms > 0 ? output_u64(ms * 1000000) : json_null();
}

json_t *output_list(const uint64_t *values, size_t count)
{
    json_t *list = json_array();
    for (size_t i = 0; i < count; i++)
        json_array_append_new(list, output_u64(values[i]));
    return list;
}

static void set_all(json_t *object, const char *name, va_list values)
{
    for (; name != NULL; name = va_arg(values, const char *))
        json_object_set_new(object, name, va_arg(values, json_t *));
}

json_t *output_object(const char *name, ...)
{
    json_t *object = output_require(json_object());
    va_list values;
    va_start(values, name);
    set_all(object, name, values);
    va_end(values);
    return object;
}

void output_set(json_t *object, const char *name, ...)
{
    va_list values;
    va_start(values, name);
    set_all(object, name, values);
    va_end(values);
}

output_text output_bytes(uint64_t bytes)
{
    static const char *const units[] = {"B", "kB", "MB", "GB", "TB", "PB", "EB"};
    output_text text;
    double value = (double)bytes;
    unsigned unit = 0;
    while (value >= 999.95 && unit + 1 < sizeof units / sizeof units[0]) {
        value /= 1000.0;
        unit++;
    }
    int digits = unit == 0 || value >= 99.95 ? 0 : value >= 9.995 ? 1 : 2;
    snprintf(text.s, sizeof text.s, "%.*f %s", digits, value, units[unit]);
    return text;
}

output_text output_duration(uint64_t ns)
{
    output_text text;
    double value = (double)ns;
    if (ns < 1000000)
        snprintf(text.s, sizeof text.s, "%.1f us", value / 1e3);
    else if (ns < 10000000000)
        snprintf(text.s, sizeof text.s, "%.2f ms", value / 1e6);
    else
        snprintf(text.s, sizeof text.s, "%.2f s", value / 1e9);
    return text;
}

output_text output_age(uint64_t ms)
{
    static const struct {
        uint64_t below, unit;
        const char *name;
    } units[] = {{1000, 1, "ms"},
                 {600000, 1000, "s"},
                 {36000000, 60000, "min"},
                 {1728000000, 3600000, "h"},
                 {UINT64_MAX, 86400000, "d"}};
    output_text text = {"-"};
    size_t i = 0;
    while (ms >= units[i].below && units[i].below != UINT64_MAX)
        i++;
    if (ms > 0)
        snprintf(text.s, sizeof text.s, "%" PRIu64 " %s", ms / units[i].unit,
                 units[i].name);
    return text;
}

output_text output_rate(uint64_t bytes, uint64_t ns)
{
    output_text text = {"-"};
    if (ns > 0) {
        double rate = (double)bytes / (double)ns;
        if (rate >= 1.0)
            snprintf(text.s, sizeof text.s, "%.2f GB/s", rate);
        else
            snprintf(text.s, sizeof text.s, "%.1f MB/s", rate * 1e3);
    }
    return text;
}

output_text output_hex(const uint8_t bytes[16])
{
    output_text text = {""};
    digest_hex(bytes, text.s);
    return text;
}

output_text output_number(uint64_t value)
{
    output_text text;
    snprintf(text.s, sizeof text.s, "%" PRIu64, value);
    return text;
}

output_text output_dims(const uint64_t *values, uint32_t count)
{
    output_text text = {"["};
    for (uint32_t i = 0; i < count && strlen(text.s) + 24 < sizeof text.s; i++)
        output_append(text.s, sizeof text.s, "%s%" PRIu64, i > 0 ? ", " : "",
                      values[i]);
    output_append(text.s, sizeof text.s, "]");
    return text;
}

void output_append(char *out, size_t size, const char *format, ...)
{
    size_t used = strlen(out);
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(out + used, size - used, format, arguments);
    va_end(arguments);
}

void output_ranges(FILE *stream, const char *separator, const uint32_t *numbers,
                   size_t count)
{
    for (size_t i = 0, end; i < count; i = end) {
        for (end = i + 1; end < count && numbers[end] == numbers[end - 1] + 1;)
            end++;
        fprintf(stream, "%s%u", i > 0 ? separator : "", numbers[i]);
        if (end > i + 1)
            fprintf(stream, "-%u", numbers[end - 1]);
    }
}

/* ------------------------------------------------------------- files of JSON */

json_t *json_file_read(const char *path, off_t most, json_error_t *why, int *reason_out)
{
    struct stat st = {.st_mode = 0};
    int descriptor = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
    *why = (json_error_t){.text = ""};
    *reason_out = descriptor < 0 || fstat(descriptor, &st) != 0 ? errno
                  : !S_ISREG(st.st_mode) || st.st_size > most   ? -1
                                                                : 0;
    if (*reason_out != 0) {
        if (*reason_out < 0 && S_ISREG(st.st_mode))
            snprintf(why->text, sizeof why->text, "is larger than %lld MiB",
                     (long long)most >> 20);
        else
            snprintf(why->text, sizeof why->text, "%s",
                     *reason_out > 0 ? strerror(*reason_out) : "is no regular file");
        if (descriptor >= 0)
            close(descriptor);
        return NULL;
    }
    /* Of a descriptor jansson would read each byte by a call of its own. */
    FILE *stream = output_require(fdopen(descriptor, "r"));
    json_t *root = json_loadf(stream, JSON_REJECT_DUPLICATES, why);
    fclose(stream);
    return root;
}

void terminal_put(FILE *stream, const char *text)
{
    for (const unsigned char *p = (const unsigned char *)text; *p != '\0';) {
        bool hidden;
        size_t size = utf8_next((const char *)p, &hidden);
        bool good = size > 0 && !hidden;
        for (size_t i = 0; i < (size > 0 ? size : 1); i++, p++)
            if (good)
                fputc(*p, stream);
            else
                fprintf(stream, "\\x%02x", *p);
    }
}

static void put_formatted(FILE *stream, const char *format, va_list arguments)
    __attribute__((format(printf, 2, 0)));

static void put_formatted(FILE *stream, const char *format, va_list arguments)
{
    char *text = NULL;
    if (vasprintf(&text, format, arguments) < 0)
        return;
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
    if (stream == NULL)
        return;
    va_list arguments;
    va_start(arguments, format);
    put_formatted(stream, format, arguments);
    va_end(arguments);
    if (fclose(stream) == 0) {
        for (size_t done = 0; done < size;) {
            ssize_t n = write(STDERR_FILENO, line + done, size - done);
            if (n < 0 && errno != EINTR)
                break; /* nobody can be told */
            done += n > 0 ? (size_t)n : 0;
        }
    }
    free(line);
}
