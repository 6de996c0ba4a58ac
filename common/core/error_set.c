/* SPDX-License-Identifier: Apache-2.0 */
/* Apart from the public functions of error.c: a program that links this file beside the shared
   library takes those from the shared library. */
#include "error_set.h"
#include "utf8.h"
#include "versioned.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

const char *error_remedy(int sys_errno, const char *otherwise)
{
    switch (sys_errno) {
    case EMFILE:
        return "raise ulimit -n (LimitNOFILE= of a service): this process has as many "
               "descriptors as it may";
    case ENFILE:
        return "raise fs.file-max: this host has as many open files as it may";
    case ENOMEM:
    case ENOBUFS:
        return "free memory on this host or raise the process's limit";
    default:
        return otherwise;
    }
}

/* The text, and behind it the system's words for *sys_errno, if there is one. */
static void fill(fanin_error *error, fanin_status status, const int *sys_errno,
                 const error_place *place, const char *format, va_list arguments)
{
    static const error_place nowhere;
    const error_place *p = place ? place : &nowhere;
    char text[1024], reason[128];
    if (!error)
        return;
    if (vsnprintf(text, sizeof text, format, arguments) < 0)
        utf8_copy(text, sizeof text, fanin_status_text(status));
    utf8_make_harmless(text); /* parts may come from a peer */
    size_t size = strlen(text);
    if (sys_errno)
        snprintf(text + size, sizeof text - size, ": %s",
                 strerror_r(*sys_errno, reason, sizeof reason));
    fanin_error full = {.status = status,
                        .rank = p->rank_plus_1 - 1,
                        .sys_errno =
                            sys_errno && *sys_errno ? *sys_errno : p->sys_errno,
                        .ucx_status = p->ucx_status};
    utf8_copy(full.phase, sizeof full.phase, p->phase);
    utf8_copy(full.address, sizeof full.address, p->address);
    utf8_copy(full.key, sizeof full.key, p->key);
    utf8_copy(full.message, sizeof full.message, text);
    utf8_copy(full.remedy, sizeof full.remedy,
              p->remedy ? p->remedy : error_remedy(full.sys_errno, NULL));
    versioned_write(error, &full, sizeof full);
}

fanin_status error_set(fanin_error *error, fanin_status status,
                       const error_place *place, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    fill(error, status, NULL, place, format, arguments);
    va_end(arguments);
    return status;
}

fanin_status error_set_errno(fanin_error *error, fanin_status status, int sys_errno,
                             const error_place *place, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    fill(error, status, &sys_errno, place, format, arguments);
    va_end(arguments);
    return status;
}

fanin_status error_set_memory(fanin_error *error)
{
    const error_place place = {.remedy = error_remedy(ENOMEM, NULL)};
    return error_set(error, FANIN_ERR_MEMORY, &place, "out of memory");
}

fanin_status error_copy(fanin_error *to, const fanin_error *from)
{
    if (to && from && to != from)
        versioned_write(to, from, from->struct_size);
    return from ? from->status : FANIN_OK;
}
