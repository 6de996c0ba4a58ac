/* SPDX-License-Identifier: Apache-2.0 */
/* Looking at trainers: ranks, publications, pings. */
#include "catalog/survey.h"
#include <string.h>

/* -------------------------------------------------------------------- ranks */

fanin_rank_info rank_describe(const peer *p)
{
    const msg_hello_ok *hello = connection_peer(p->control);
    bool known = connection_known(p->control), ready = peer_ready(p);
    const fanin_error *fault = connection_fault(p->control);
    fanin_rank_info info = {
        .struct_size = sizeof info,
        .rank = known ? (int32_t)hello->rank : -1,
        .world_size = known ? hello->world_size : 0,
        .address = connection_text(p->control),
        .server_name = hello->server_name,
        .software = hello->software,
        .ucx_version = hello->ucx_version,
        .status = ready ? FANIN_OK : fault->status,
        .message = ready ? "" : fault->message,
        .silent = !ready && (connection_was_silent(p->control) ||
                             connection_get_state(p->control) != CONNECTION_DOWN),
    };
    memcpy(info.world_id, hello->world_id, sizeof info.world_id);
    memcpy(info.incarnation, hello->incarnation, sizeof info.incarnation);
    return info;
}

fanin_status fanin_client_ranks(fanin_client *client, fanin_rank_fn fn, void *cookie,
                                fanin_error *error)
{
    fanin_status status = client_check_told(client, fn, error);
    for (size_t i = 0; status == FANIN_OK && i < client->n_peers; i++) {
        fanin_rank_info info = rank_describe(&client->peers[i]);
        if (!fn(cookie, &info))
            break;
    }
    return status;
}

/* ---------------------------------------------------- one request, all ranks */

static bool report_list(const peer *p, const answer *a, fanin_publication_fn fn,
                        void *cookie)
{
    for (uint32_t i = 0; i < a->count; i++) {
        const msg_list_entry *e = &a->entries[i];
        fanin_publication_info info = {
            .struct_size = sizeof info,
            .name = e->publication,
            .rank = connection_peer(p->control)->rank,
            .state = e->state,
            .step = e->step,
            .epoch = e->epoch,
            .catalog_version = e->catalog_version,
            .tensors = e->tensors,
            .bytes = e->bytes,
            .state_age_ms = e->state_age_ms,
            .commit_age_ms = e->commit_age_ms,
        };
        memcpy(info.key_digest, e->key_digest, sizeof info.key_digest);
        if (!fn(cookie, &info))
            return false;
    }
    return true;
}

fanin_status fanin_client_list(fanin_client *client, uint32_t timeout_ms,
                               fanin_publication_fn fn, void *cookie,
                               fanin_error *error)
{
    fanin_status status = client_check_told(client, fn, error);
    if (status != FANIN_OK)
        return status;
    survey s = {.client = client, .type = MSG_LIST, .at = deadline_in_ms(timeout_ms)};
    status = survey_take(&s, error);
    bool more = status == FANIN_OK;
    for (size_t i = 0; i < client->n_peers && more; i++) {
        if (survey_answered(&s, i))
            more = report_list(&client->peers[i], &s.answers[i], fn, cookie);
    }
    survey_finish(&s);
    return status;
}

fanin_status fanin_client_ping(fanin_client *client, uint32_t timeout_ms,
                               fanin_ping_fn fn, void *cookie, fanin_error *error)
{
    fanin_status status = client_check_told(client, fn, error);
    if (status != FANIN_OK)
        return status;
    survey s = {.client = client, .type = MSG_PING, .at = deadline_in_ms(timeout_ms)};
    status = survey_take(&s, error);
    /* Ranks that do not belong together, or do not answer, are told all the same. */
    bool more = status != FANIN_ERR_CANCELLED && status != FANIN_ERR_MEMORY;
    for (size_t i = 0; i < client->n_peers && more; i++) {
        const answer *a = &s.answers[i];
        fanin_rank_info info = rank_describe(&client->peers[i]);
        more = fn(cookie, &info,
                  survey_answered(&s, i) ? a->answered_ns - a->asked_ns : 0);
    }
    survey_finish(&s);
    return status;
}
