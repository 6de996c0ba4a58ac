/* SPDX-License-Identifier: Apache-2.0 */
#include "control/reply.h"
#include "error_set.h"

#include <string.h>

void reply_error(session *s, uint64_t request, const fanin_error *error)
{
    msg_error m = {.code = error->status};
    if (error->status == FANIN_OK)
        return;
    memcpy(m.message, error->message, sizeof m.message);
    memcpy(m.remedy, error->remedy, sizeof m.remedy);
    memcpy(m.key, error->key, sizeof m.key);
    encode_error(&s->out.bytes, request, &m);
}

void reply_fault(session *s, uint64_t request, fanin_status code, const char *message)
{
    fanin_error error = FANIN_ERROR_INIT;
    error_set(&error, code, NULL, "%s", message);
    reply_error(s, request, &error);
}

uint64_t age_ms(uint64_t since_ns)
{
    return (clock_ns() - since_ns) / 1000000 + 1;
}

void describe_missing(const fanin_server *server, const char *name, fanin_error *error)
{
    char there[320];
    error_place place = {.phase = "catalog", .remedy = "check the name of the run"};
    publication_names(server, there, sizeof there);
    error_set(error, FANIN_ERR_NOT_FOUND, &place,
              "rank %u does not publish %s; it publishes %s", (unsigned)server->rank,
              name, there[0] ? there : "nothing");
}

publication *find_present(const fanin_server *server, const char *name)
{
    publication *p = publication_find(server, name);
    return p && p->present ? p : NULL;
}

void describe_paused(const char *name, const char *reason, fanin_error *error)
{
    error_place place = {.phase = "wait",
                         .key = name,
                         .remedy = "pull again when the trainer has resumed it"};
    error_set(error, FANIN_ERR_PAUSED, &place, "%s is paused: %s", name, reason);
}

int32_t state_for(const session *s, publication_state state)
{
    if (state == STATE_PAUSED && !(s->features & FEATURE_PAUSED))
        return WIRE_STATE_WRITING;
    return (int32_t)state;
}
