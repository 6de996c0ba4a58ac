/* SPDX-License-Identifier: Apache-2.0 */
/* Whether the kernel reads a rank's process for this one: tried once a connection and catalog. */
#include "cma/cma_internal.h"
#include "cma/rank_process.h"

#include "error_set.h"
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
    return r->client->config.path == FANIN_PATH_CMA || path_is_local(r->client, peer);
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

/* Asks all with open[i] that nothing holds against, at once; gives up the others. */
static fanin_status ask_all(path_round *r, bool *open, rank_opening *o,
                            fanin_error *error)
{
    size_t left = 0, n = r->client->n_peers;
    fanin_status status = FANIN_OK;
    for (size_t i = 0; i < n && status == FANIN_OK; i++) {
        const char *why =
            open[i] ? rank_process_objection(r->client, i, &o[i].pid) : NULL;
        o[i].left = &left;
        if (open[i] && !why)
            rank_opening_ask(r->client, i, &o[i]);
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
    rank_process_keep(r->client, peer, process);
    path_choose(r, peer, FANIN_PATH_CMA, "a probe read by cma succeeded");
    return FANIN_OK;
}

static fanin_status try_one(path_round *r, size_t peer, const rank_opening *o,
                            fanin_error *error)
{
    const path_state *s = path_taken(r->publication, peer);
    const char *why = kinds_objection(s->regions);
    const cma_process process = rank_opening_process(r->client, peer, o);
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
    fanin_path forced = r->client->config.path;
    bool any = false, asked = forced == FANIN_PATH_AUTO || forced == FANIN_PATH_CMA;
    for (size_t i = 0; i < r->client->n_peers; i++) {
        pid_t pid;
        mine[i] = open[i] && asked &&
                  (is_mine(r, i) || !rank_process_objection(r->client, i, &pid));
        open[i] = open[i] && !mine[i];
        any = any || mine[i];
    }
    return any;
}

fanin_status cma_probe(path_round *r, bool *open, fanin_error *error)
{
    size_t n = r->client->n_peers;
    bool *mine = calloc(n, sizeof *mine);
    rank_opening *o = calloc(n, sizeof *o);
    fanin_status status = mine && o ? FANIN_OK : error_set_memory(error);
    if (status == FANIN_OK && sort_out(r, open, mine)) {
        status = ask_all(r, mine, o, error);
        if (status == FANIN_OK)
            status = path_regions(r, mine, FANIN_PATH_CMA, error);
        for (size_t i = 0; i < n && status == FANIN_OK; i++) {
            if (mine[i])
                status = try_one(r, i, &o[i], error);
        }
    }
    free(mine);
    free(o);
    return status;
}
