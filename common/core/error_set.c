/* SPDX-License-Identifier: Apache-2.0 */
/* Apart from the public functions of error.c: a program that links this file beside the shared
   library takes those from the shared library. */
#include "error_set.h"
#include "text.h"
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

/* What to do where whoever met the error knows nothing better: every error says something. */
static const struct {
    fanin_status status;
    const char *remedy;
} usual_remedies[] = {
    {FANIN_ERR_ARGUMENT, "fix the arguments of the call"},
    {FANIN_ERR_EXISTS, "remove what is there, or take another name"},
    {FANIN_ERR_NOT_FOUND, "check the name: `nixl-fetch list` shows what is published"},
    {FANIN_ERR_STATE, "make the call in a state that its documentation names"},
    {FANIN_ERR_STALE,
     "pull again; if it goes on, let the trainer publish snapshots, or "
     "with snapshots commit less often"},
    {FANIN_ERR_TIMEOUT,
     "allow more time, and see what the ranks do: nixl-fetch status"},
    {FANIN_ERR_CANCELLED, "call again if what was cancelled is still wanted"},
    {FANIN_ERR_SUPERSEDED, "ask for a newer step"},
    {FANIN_ERR_PAUSED, "pull again when the trainer has resumed"},
    {FANIN_ERR_UNREACHABLE, "see that the rank runs and that its address is right"},
    {FANIN_ERR_CLOSED, "pull again; if it goes on, see the rank's own log"},
    {FANIN_ERR_LIMIT, "ask for less, or raise the limit"},
    {FANIN_ERR_AUTH,
     "see whom the other end admits: users, networks, secrets, certificates"},
    {FANIN_ERR_PROTOCOL,
     "see what answers there; use the same fanin release on both ends"},
    {FANIN_ERR_VERSION, "use the same fanin release on both ends"},
    {FANIN_ERR_WORLD, "give the addresses of all ranks of one launch"},
    {FANIN_ERR_INCOMPLETE, "see what each rank publishes: nixl-fetch list"},
    {FANIN_ERR_UNSUPPORTED, "leave the feature out, or use releases that have it"},
    {FANIN_ERR_MISMATCH, "see what is published: nixl-fetch list"},
    {FANIN_ERR_IO, "mend what the message names on this host"},
    {FANIN_ERR_MEMORY, "free memory on this host or raise the process's limit"},
    {FANIN_ERR_TRANSPORT, "see this host and its network: nixl-fetch doctor"},
    {FANIN_ERR_FORKED, "make the object in the process that uses it"},
    {FANIN_ERR_INTERNAL, "report it with the lines that FANIN_LOG=debug gives"},
};

/* A code of a later version is as the first of its hundred; NULL: no failure. */
static const char *usual_remedy(fanin_status status)
{
    const char *first = NULL;
    for (size_t i = 0; i < sizeof usual_remedies / sizeof *usual_remedies; i++) {
        if (usual_remedies[i].status == status)
            return usual_remedies[i].remedy;
        if (usual_remedies[i].status == status / 100 * 100)
            first = usual_remedies[i].remedy;
    }
    return first;
}

/* The text, and behind it the system's words for *sys_errno, if there is one. */
static void error_set_fill(fanin_error *error, fanin_status status,
                           const int *sys_errno, const error_place *place,
                           const char *format, va_list arguments)
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
              p->remedy && p->remedy[0]
                  ? p->remedy
                  : error_remedy(full.sys_errno, usual_remedy(status)));
    versioned_write(error, &full, sizeof full);
}

fanin_status error_set(fanin_error *error, fanin_status status,
                       const error_place *place, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    error_set_fill(error, status, NULL, place, format, arguments);
    va_end(arguments);
    return status;
}

fanin_status error_set_errno(fanin_error *error, fanin_status status, int sys_errno,
                             const error_place *place, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    error_set_fill(error, status, &sys_errno, place, format, arguments);
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
