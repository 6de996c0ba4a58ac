/* SPDX-License-Identifier: Apache-2.0 */
#include <fanin/error.h>

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
    ROW(FANIN_ERR_PAUSED, "the trainer's memory is away for now"),
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
