/* SPDX-License-Identifier: Apache-2.0 */
#include "cma/rank_process.h"

#include "error_set.h"
#include "path/reader.h"
#include <stdlib.h>
#include <string.h>

/* Of one peer; kept by the client, one a peer. */
struct rank_process {
    uint64_t generation; /* of the connection that the rest is about */
    bool readable;
    cma_process process;
};

/* ------------------------------------------------------------------- asking */

/* The kernel says whose socket it is: of who began to listen, and in this process's own numbers, 0
   if it has none there. */
const char *rank_process_objection(const fanin_client *client, size_t peer, pid_t *pid)
{
    const connection *c = client->peers[peer].control;
    if (!path_is_offered(client, peer, FANIN_PATH_CMA))
        return path_not_offered(client, peer,
                                "the rank does not offer cma on this connection");
    if (!connection_process(c, pid))
        return "cma needs the rank's Unix socket";
    return *pid > 0 ? NULL
                    : "the rank's process has no number here: cma needs it in the same "
                      "pid namespace, or in one below";
}

static void on_open(void *cookie, connection *c, message_type type, body *b)
{
    rank_opening *o = cookie;
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

void rank_opening_ask(fanin_client *client, size_t peer, rank_opening *o)
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

cma_process rank_opening_process(const fanin_client *client, size_t peer,
                                 const rank_opening *o)
{
    cma_process process = {.pid = o->pid, .witness = o->witness};
    const msg_hello_ok *hello = connection_peer(client->peers[peer].control);
    memcpy(process.incarnation, hello->incarnation, sizeof process.incarnation);
    return process;
}

/* ------------------------------------------------------------------ keeping */

/* NULL: no memory, so nothing is known. */
static struct rank_process *slot_of(fanin_client *client, size_t peer)
{
    if (!client->processes)
        client->processes = calloc(client->n_peers, sizeof *client->processes);
    return client->processes ? &client->processes[peer] : NULL;
}

static uint64_t generation_of(const fanin_client *client, size_t peer)
{
    return connection_generation(client->peers[peer].control);
}

void rank_process_keep(fanin_client *client, size_t peer, const cma_process *process)
{
    struct rank_process *p = slot_of(client, peer);
    if (p)
        *p = (struct rank_process){generation_of(client, peer), true, *process};
}

const cma_process *rank_process_of(const fanin_client *client, size_t peer)
{
    const struct rank_process *p = client->processes ? &client->processes[peer] : NULL;
    return p && p->readable && p->generation == generation_of(client, peer)
               ? &p->process
               : NULL;
}

/* Marks the peer as asked; false: it was already, or need not be. */
static bool claim(fanin_client *client, size_t peer, rank_opening *o)
{
    struct rank_process *p = slot_of(client, peer);
    if (!p || !peer_ready(&client->peers[peer]) ||
        p->generation == generation_of(client, peer))
        return false;
    *p = (struct rank_process){.generation = generation_of(client, peer)};
    return !rank_process_objection(client, peer, &o->pid);
}

fanin_status rank_processes_open(fanin_client *client, const bool *want, deadline at,
                                 fanin_error *error)
{
    size_t left = 0;
    rank_opening *o = calloc(client->n_peers, sizeof *o);
    if (!o)
        return error_set_memory(error);
    for (size_t i = 0; i < client->n_peers; i++) {
        o[i].left = &left;
        if (want[i] && claim(client, i, &o[i]))
            rank_opening_ask(client, i, &o[i]);
    }
    fanin_status status = client_run(client, &left, at, "connect", error);
    for (size_t i = 0; i < client->n_peers; i++) {
        if (!o[i].asked)
            continue;
        connection_forget(client->peers[i].control, &o[i]);
        const cma_process process = rank_opening_process(client, i, &o[i]);
        if (o[i].witness != 0 && cma_prove(&process) == 0)
            rank_process_keep(client, i, &process);
    }
    free(o);
    return status;
}
