/* SPDX-License-Identifier: Apache-2.0 */
/* Apart from the public functions of error.c: a program that links this file beside the shared
   library takes those from the shared library. */
#include "error_set.h"
#include "versioned.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

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
    versioned_write(error, &full, sizeof full);
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
        versioned_write(to, from, from->struct_size);
}
