/* SPDX-License-Identifier: Apache-2.0 */
#include "error_set.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

typedef struct status_row {
    fanin_status status;
    const char *name, *text;
} status_row;

#define ROW(code, text)                                                                \
    {                                                                                  \
        code, #code, text                                                              \
    }

static const status_row status_rows[] = {
    ROW(FANIN_OK, "success"),
    ROW(FANIN_ERR_ARGUMENT, "an argument is invalid"),
    ROW(FANIN_ERR_EXISTS, "it exists already"),
    ROW(FANIN_ERR_NOT_FOUND, "no such object"),
    ROW(FANIN_ERR_STATE, "the call does not fit the present state"),
    ROW(FANIN_ERR_STALE, "the weights were rewritten while they were read"),
    ROW(FANIN_ERR_TIMEOUT, "the deadline passed"),
    ROW(FANIN_ERR_CANCELLED, "the call was cancelled"),
    ROW(FANIN_ERR_SUPERSEDED, "the step asked for has passed"),
    ROW(FANIN_ERR_UNREACHABLE, "nobody answers at the address"),
    ROW(FANIN_ERR_CLOSED, "the connection was closed"),
    ROW(FANIN_ERR_LIMIT, "a limit was reached"),
    ROW(FANIN_ERR_AUTH, "the peer does not admit this client"),
    ROW(FANIN_ERR_PROTOCOL, "the peer broke the protocol"),
    ROW(FANIN_ERR_VERSION, "no protocol version in common"),
    ROW(FANIN_ERR_WORLD, "the ranks do not form one world"),
    ROW(FANIN_ERR_INCOMPLETE, "the shards do not cover every tensor exactly"),
    ROW(FANIN_ERR_UNSUPPORTED, "a feature that is needed is missing"),
    ROW(FANIN_ERR_MISMATCH, "the peers contradict each other or the caller"),
    ROW(FANIN_ERR_IO, "a file operation failed"),
    ROW(FANIN_ERR_MEMORY, "out of memory"),
    ROW(FANIN_ERR_TRANSPORT, "the data path failed on this host"),
    ROW(FANIN_ERR_FORKED, "the handle belongs to the parent process"),
    ROW(FANIN_ERR_INTERNAL, "a bug in this library"),
};

static const status_row *status_find(fanin_status status)
{
    for (size_t i = 0; i < sizeof status_rows / sizeof *status_rows; i++)
        if (status_rows[i].status == status)
            return &status_rows[i];
    return NULL;
}

const char *fanin_status_name(fanin_status status)
{
    const status_row *row = status_find(status);
    return row ? row->name : "FANIN_ERR_UNKNOWN";
}

/* A code of a later version is described by the class that its hundred stands for. */
static const char *class_text(fanin_status status)
{
    switch (status / -100) {
    case 1:
        return "the call is wrong";
    case 2:
        return "this pull failed; another one may succeed";
    case 3:
        return "the connection is unusable";
    case 4:
        return "the peers are wrong";
    case 5:
        return "this host is at fault";
    case 6:
        return "this process is at fault";
    default:
        return "unknown status";
    }
}

const char *fanin_status_text(fanin_status status)
{
    const status_row *row = status_find(status);
    return row ? row->text : class_text(status);
}

bool fanin_status_is_retryable(fanin_status status)
{
    /* An exact step that has passed never comes back, and a cancel was somebody's wish. */
    if (status == FANIN_ERR_SUPERSEDED || status == FANIN_ERR_CANCELLED)
        return false;
    int hundred = status / -100;
    return status < 0 && (hundred == 2 || status == FANIN_ERR_UNREACHABLE ||
                          status == FANIN_ERR_CLOSED);
}

/* Cuts between two characters, so that a cut text is still UTF-8. */
static void copy_text(char *to, size_t capacity, const char *from)
{
    size_t size = from ? strlen(from) : 0;
    if (size >= capacity) {
        size = capacity - 1;
        while (size > 0 && ((unsigned char)from[size] & 0xc0) == 0x80)
            size--;
    }
    if (size)
        memcpy(to, from, size);
    to[size] = '\0';
}

/* Everything but struct_size, and of the rest only what both sides have. */
static void write_out(fanin_error *to, const fanin_error *from, size_t from_size)
{
    size_t size = to->struct_size < from_size ? to->struct_size : from_size;
    size_t skip = offsetof(fanin_error, status);
    if (size > skip)
        memcpy((char *)to + skip, (const char *)from + skip, size - skip);
}

static void fill(fanin_error *error, fanin_status status, int sys_errno,
                 const error_place *place, const char *text)
{
    static const error_place nowhere;
    const error_place *p = place ? place : &nowhere;
    fanin_error full = {.status = status,
                        .rank = p->rank_plus_1 - 1,
                        .sys_errno = sys_errno ? sys_errno : p->sys_errno,
                        .ucx_status = p->ucx_status};
    copy_text(full.phase, sizeof full.phase, p->phase);
    copy_text(full.address, sizeof full.address, p->address);
    copy_text(full.key, sizeof full.key, p->key);
    copy_text(full.message, sizeof full.message, text);
    copy_text(full.remedy, sizeof full.remedy, p->remedy);
    write_out(error, &full, sizeof full);
}

fanin_status error_set(fanin_error *error, fanin_status status,
                       const error_place *place, const char *format, ...)
{
    if (!error)
        return status;
    char text[1024];
    va_list arguments;
    va_start(arguments, format);
    if (vsnprintf(text, sizeof text, format, arguments) < 0)
        copy_text(text, sizeof text, fanin_status_text(status));
    va_end(arguments);
    fill(error, status, 0, place, text);
    return status;
}

fanin_status error_set_errno(fanin_error *error, fanin_status status, int sys_errno,
                             const error_place *place, const char *format, ...)
{
    if (!error)
        return status;
    char text[1024];
    va_list arguments;
    va_start(arguments, format);
    int size = vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    if (size < 0) {
        copy_text(text, sizeof text, fanin_status_text(status));
        size = (int)strlen(text);
    }
    char reason_buffer[128];
    const char *reason = strerror_r(sys_errno, reason_buffer, sizeof reason_buffer);
    if ((size_t)size < sizeof text)
        snprintf(text + size, sizeof text - (size_t)size, ": %s", reason);
    fill(error, status, sys_errno, place, text);
    return status;
}

fanin_status error_set_memory(fanin_error *error)
{
    static const error_place place = {
        .remedy = "free memory on this host or raise the process's limit"};
    return error_set(error, FANIN_ERR_MEMORY, &place, "out of memory");
}

void error_copy(fanin_error *to, const fanin_error *from)
{
    if (to && from && to != from)
        write_out(to, from, from->struct_size);
}
