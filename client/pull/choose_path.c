/* SPDX-License-Identifier: Apache-2.0 */
#include "pull/choose_path.h"

#include "cma/cma.h"
#include "error_set.h"
#include "ipc/ipc.h"
#include "stream/stream_link.h"
#include "ucx/ucx_end.h"
#include <stdlib.h>
#include <string.h>

const path_reader *const path_readers[PATH_READERS] = {
    &ipc_reader, /* first: its kernels run while the others begin */
    &stream_reader,
    &cma_reader,
    &ucx_reader,
};

const path_reader *path_of_number(fanin_path number)
{
    for (size_t i = 0; i < PATH_READERS; i++) {
        if (path_readers[i]->number == number)
            return path_readers[i];
    }
    return NULL;
}

const char *fanin_path_name(fanin_path path)
{
    const path_reader *reader = path_of_number(path);
    return reader ? reader->name : path == 0 ? "auto" : NULL;
}

fanin_path fanin_path_from_name(const char *name)
{
    for (size_t i = 0; name && i < PATH_READERS; i++) {
        if (strcmp(name, path_readers[i]->name) == 0)
            return path_readers[i]->number;
    }
    return name && strcmp(name, "auto") == 0 ? FANIN_PATH_AUTO : (fanin_path)-1;
}

fanin_status paths_create(fanin_client *client, fanin_error *error)
{
    fanin_status status = FANIN_OK;
    for (size_t i = 0; i < PATH_READERS && status == FANIN_OK; i++) {
        if (path_readers[i]->create)
            status = path_readers[i]->create(client, error);
    }
    return status;
}

void paths_disconnect(fanin_client *client)
{
    for (size_t i = 0; i < PATH_READERS; i++) {
        if (path_readers[i]->disconnect)
            path_readers[i]->disconnect(client);
    }
}

void paths_destroy(fanin_client *client)
{
    for (size_t i = 0; i < PATH_READERS; i++) {
        if (path_readers[i]->destroy)
            path_readers[i]->destroy(client);
    }
}

void path_begin_ahead(fanin_client *client, publication *p, const path_foresight *known,
                      path_goal *goal, deadline at)
{
    path_end_ahead(goal);
    goal->ahead = map_ahead_begin(&ipc_reader, client, p, known, at);
}

void path_end_ahead(path_goal *goal)
{
    map_ahead_free(goal->ahead);
    goal->ahead = NULL;
}

static void learn_goal(path_round *r)
{
    for (size_t i = 0; i < r->goal->n_ranges; i++) {
        int device = r->goal->ranges[i].device;
        r->host = r->host || device < 0;
        device_set_add(&r->devices, device);
    }
}

/* The undecided ranks; those of which a path has failed are decided here. */
static void find_undecided(path_round *r, bool *open)
{
    for (size_t i = 0; i < r->client->n_peers; i++) {
        open[i] = r->want[i] && !path_state_of(r->client, r->publication, i)->path;
        const char *why =
            open[i] && !r->client->forced ? path_avoided(r->client, i) : NULL;
        if (!why)
            continue;
        path_set(r, i, r->fallback, why);
        open[i] = false;
    }
}

fanin_status path_prepare(fanin_client *client, publication *p, const bool *want,
                          path_goal *goal, deadline at, fanin_error *error)
{
    path_round r = {.client = client,
                    .publication = p,
                    .want = want,
                    .goal = goal,
                    .at = at,
                    .fallback = &stream_reader};
    goal->gather = (gather_set){.n = 0};
    goal->map_ns = goal->table_ns = 0;
    bool *open = calloc(client->n_peers, sizeof *open);
    fanin_status status =
        open ? path_states_open(client, p, error) : error_set_memory(error);
    if (status == FANIN_OK) {
        learn_goal(&r);
        find_undecided(&r, open);
    }
    for (size_t i = 0; i < PATH_READERS && status == FANIN_OK; i++)
        status = path_readers[i]->probe(&r, open, error);
    free(open);
    return status;
}

void path_unmap(fanin_client *client, publication *p)
{
    for (size_t i = 0; i < PATH_READERS; i++) {
        if (path_readers[i]->unmap)
            path_readers[i]->unmap(client, p);
    }
}

void path_unmap_idle(fanin_client *client, uint64_t since_ns)
{
    for (publication *p = client->publications; p; p = p->next) {
        if (p->used_ns < since_ns)
            path_unmap(client, p);
    }
}
