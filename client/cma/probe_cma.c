/* SPDX-License-Identifier: Apache-2.0 */
/* Whether the kernel reads a rank's process for this one: tried once a connection and catalog. */
#include "cma/cma_internal.h"

#include "error_set.h"
#include "net/trust.h"
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* What the path keeps of a rank's regions. */
typedef struct process_hold {
    path_hold hold; /* first */
    cma_process process;
} process_hold;

static void drop_process(fanin_client *client, size_t peer, path_hold *hold)
{
    (void)client;
    (void)peer;
    free(hold);
}

const cma_process *cma_process_of(const path_state *s)
{
    return &((const process_hold *)s->hold)->process;
}

/* --------------------------------------------------------------- objections */

/* Ranks of which no other one-sided path knows anything better. */
static bool is_mine(const path_round *r, size_t peer)
{
    return r->client->forced == &cma_reader || path_is_local(r->client, peer);
}

/* The kernel says whose socket it is: of who began to listen, and in this process's own numbers, 0
   if it has none there. NULL: nothing holds against asking the rank. */
static const char *process_objection(const fanin_client *client, size_t peer,
                                     pid_t *pid)
{
    const connection *c = client->peers[peer].control;
    if (!path_is_offered(client, peer, &cma_reader))
        return path_not_offered(client, peer,
                                "the rank does not offer cma on this connection");
    if (!connection_process(c, pid))
        return "cma needs the rank's Unix socket";
    return *pid > 0 ? NULL
                    : "the rank's process has no number here: cma needs it in the same "
                      "pid namespace, or in one below";
}

static const char *kinds_objection(const region_table *regions)
{
    for (uint32_t i = 0; i < regions->count; i++) {
        if (regions->entries[i].memory == FANIN_MEMORY_CUDA)
            return "the rank holds GPU memory, which cma does not read";
    }
    return NULL;
}

/* ------------------------------------------------------------------- asking */

/* One rank is asked to let itself be read. */
typedef struct opening {
    bool asked;
    size_t *left;     /* who has not answered */
    uint64_t witness; /* out; 0: it does not */
    pid_t pid;        /* by process_objection() */
    fanin_error error;
} opening;

static void on_open(void *cookie, connection *c, message_type type, body *b)
{
    opening *o = cookie;
    msg_open_path reply;
    --*o->left;
    if (type != MSG_OPEN_PATH_OK)
        connection_reply_error(c, "connect", type, b, &o->error);
    else if (decode_open_path(b, &reply) != FANIN_OK)
        error_set(&o->error, FANIN_ERR_PROTOCOL, NULL, "a malformed answer");
    else if (reply.witness == 0)
        error_set(&o->error, FANIN_ERR_UNSUPPORTED, NULL,
                  "the rank's version of fanin offers cma by UCX only");
    else
        o->witness = reply.witness;
}

static void ask(fanin_client *client, size_t peer, opening *o)
{
    connection *c = client->peers[peer].control;
    const msg_open_path m = {.path = FANIN_PATH_CMA,
                             .address = {(const uint8_t *)"", 0}};
    uint64_t request = connection_next_request(c);
    o->asked = true;
    o->error = (fanin_error)FANIN_ERROR_INIT;
    ++*o->left;
    if (connection_get_state(c) == CONNECTION_READY)
        encode_open_path(connection_out(c), request, MSG_OPEN_PATH, &m);
    connection_ask(c, request, on_open, o);
}

/* Asks all with open[i] that nothing holds against, at once; gives up the others. */
static fanin_status ask_all(path_round *r, bool *open, opening *o, fanin_error *error)
{
    size_t left = 0, n = r->client->n_peers;
    fanin_status status = FANIN_OK;
    for (size_t i = 0; i < n && status == FANIN_OK; i++) {
        const char *why = open[i] ? process_objection(r->client, i, &o[i].pid) : NULL;
        o[i].left = &left;
        if (open[i] && !why)
            ask(r->client, i, &o[i]);
        if (!why)
            continue;
        open[i] = false;
        status = path_give_up(r, i, why, error);
    }
    if (status == FANIN_OK)
        status = client_run(r->client, &left, r->at, "connect", error);
    for (size_t i = 0; i < n; i++) {
        if (!o[i].asked)
            continue;
        connection_forget(r->client->peers[i].control, &o[i]);
        if (status != FANIN_OK || o[i].witness != 0)
            continue;
        open[i] = false;
        status = path_give_up(r, i, o[i].error.message, error);
    }
    return status;
}

/* ------------------------------------------------------------------- trying */

/* A byte of what it publishes, which is thrown away: no lease is needed. */
static int read_region(const cma_process *p, const region_table *regions)
{
    uint8_t byte;
    unsigned at;
    if (regions->count == 0)
        return 0;
    struct iovec to = {.iov_base = &byte, .iov_len = 1};
    struct iovec from = {.iov_base = (void *)(uintptr_t)regions->entries[0].base,
                         .iov_len = 1};
    return cma_read(p->pid, &to, 1, &from, 1, &at);
}

static fanin_status keep(path_round *r, size_t peer, const cma_process *process,
                         fanin_error *error)
{
    path_state *s = path_state_of(r->client, r->publication, peer);
    process_hold *h = calloc(1, sizeof *h);
    if (!h)
        return error_set_memory(error);
    *h = (process_hold){.hold = {.drop = drop_process}, .process = *process};
    s->hold = &h->hold;
    path_choose(r, peer, &cma_reader, "a probe read by cma succeeded");
    return FANIN_OK;
}

static fanin_status try_one(path_round *r, size_t peer, const opening *o,
                            fanin_error *error)
{
    const path_state *s = path_taken(r->publication, peer);
    const char *why = kinds_objection(s->regions);
    cma_process process = {.pid = o->pid, .witness = o->witness};
    memcpy(process.incarnation,
           connection_peer(r->client->peers[peer].control)->incarnation,
           sizeof process.incarnation);
    if (why)
        return path_give_up(r, peer, why, error);
    int failed = cma_prove(&process);
    if (failed == 0)
        failed = read_region(&process, s->regions);
    if (failed == 0)
        return keep(r, peer, &process, error);
    char reason[PATH_REASON];
    snprintf(reason, sizeof reason, "a probe read by cma failed: %s", cma_why(failed));
    r->lacks = r->lacks || failed == ENOSYS;
    return path_give_up(r, peer, reason, error);
}

/* ------------------------------------------------------------------- whole */

/* Takes what cma is for out of @p open; true: there is something. */
static bool sort_out(const path_round *r, bool *open, bool *mine)
{
    bool any = false, asked = path_is_allowed(r->client, &cma_reader);
    for (size_t i = 0; i < r->client->n_peers; i++) {
        pid_t pid;
        mine[i] = open[i] && asked &&
                  (is_mine(r, i) || !process_objection(r->client, i, &pid));
        open[i] = open[i] && !mine[i];
        any = any || mine[i];
    }
    return any;
}

fanin_status cma_probe(path_round *r, bool *open, fanin_error *error)
{
    size_t n = r->client->n_peers;
    bool *mine = calloc(n, sizeof *mine);
    opening *o = calloc(n, sizeof *o);
    fanin_status status = mine && o ? FANIN_OK : error_set_memory(error);
    if (status == FANIN_OK && sort_out(r, open, mine)) {
        status = ask_all(r, mine, o, error);
        if (status == FANIN_OK)
            status = path_regions(r, mine, &cma_reader, error);
        for (size_t i = 0; i < n && status == FANIN_OK; i++) {
            if (mine[i])
                status = try_one(r, i, &o[i], error);
        }
    }
    free(mine);
    free(o);
    return status;
}
