/* SPDX-License-Identifier: Apache-2.0 */
/* Waiting for a step without reading anything of it. */
#include "error_set.h"
#include "pull/agree.h"
#include "pull/kept.h"
#include "pull/pull.h"
#include <stdlib.h>

typedef struct waiter {
    fanin_client *client;
    publication *publication;
    deadline at;
} waiter;

/* Nobody says what will be read: all of it. */
static fanin_status all_without(void *cookie, const bool *use, bool *vain,
                                fanin_error *error)
{
    const waiter *w = cookie;
    bool enough = false;
    *vain = false;
    fanin_status status =
        agree_sufficient(w->client, w->publication, use, w->at, &enough, error);
    if (status != FANIN_OK || enough)
        return status;
    size_t culprit = agree_culprit(w->client, w->publication, use, w->at);
    if (culprit == w->client->n_peers)
        return FANIN_OK;
    *vain = true;
    return error_copy(error, connection_fault(w->client->peers[culprit].control));
}

/* Some may have agreed because the others are gone: then these must suffice, as a pull's plan would
   tell. */
static fanin_status prove(waiter *w, const announcement *announced, const bool *use,
                          fanin_error *error)
{
    const fanin_client *client = w->client;
    bool all = true, vain = false;
    for (size_t i = 0; i < client->n_peers; i++)
        all = all && use[i];
    if (all)
        return FANIN_OK;
    fanin_status status =
        tables_sync(w->client, w->publication, announced, use, w->at, error);
    return status == FANIN_OK ? all_without(w, use, &vain, error) : status;
}

/* Patient: ranks that have not answered yet are waited for first. */
static fanin_status look(waiter *w, const fanin_pull_options *options, bool patient,
                         uint64_t *step, fanin_error *error)
{
    fanin_client *client = w->client;
    const agree_need need = {.without = all_without, .cookie = w};
    fanin_status status = client_ensure_connected(client, patient, w->at, error);
    if (status != FANIN_OK)
        return status;
    announcement *announced = calloc(client->n_peers, sizeof *announced);
    bool *use = calloc(client->n_peers, sizeof *use);
    if (announced && use)
        status = agree(client, w->publication, options, &need, NULL, w->at, announced,
                       use, error);
    else
        status = error_set_memory(error);
    if (status == FANIN_OK)
        status = prove(w, announced, use, error);
    for (size_t i = 0; i < client->n_peers && status == FANIN_OK; i++) {
        if (use[i])
            *step = announced[i].step;
    }
    free(announced);
    free(use);
    return status;
}

fanin_status fanin_client_wait(fanin_client *client, const fanin_pull_options *in,
                               uint64_t *step, fanin_error *error)
{
    fanin_pull_options options;
    uint64_t unasked = 0;
    fanin_status status = pull_check(client, in, &options, error);
    if (status != FANIN_OK)
        return status;
    waiter w = {client, kept_of(client, options.publication),
                deadline_in_ms(options.timeout_ms)};
    if (!w.publication)
        return error_set_memory(error);
    step = step ? step : &unasked;
    fanin_error first = FANIN_ERROR_INIT;
    status = look(&w, &options, false, step, &first);
    /* Maybe of the connection before that of a rank which is still to come. */
    bool of_ranks = status <= FANIN_ERR_UNREACHABLE && status >= FANIN_ERR_MISMATCH;
    if (!of_ranks || !client_expects_more(client)) {
        error_copy(error, &first);
        return status;
    }
    return look(&w, &options, true, step, error);
}
