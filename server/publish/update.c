/* SPDX-License-Identifier: Apache-2.0 */
/* Updates: they begin, are aborted, or come without having begun. */
#include "core/rules.h"
#include "error_set.h"
#include "publish/commit.h"

/* ------------------------------------------------------------------- begin */

/* Lock held, given up while waiting. */
static fanin_status open_update(fanin_server *s, publication *p, fanin_error *error)
{
    error_place place = {.phase = "update",
                         .remedy = "update a publication from one thread at a time"};
    if (p->paused)
        return publication_refuse_paused(p, "update", error);
    if (p->state == STATE_DRAINING)
        return error_set(error, FANIN_ERR_STATE, &place,
                         "another thread is in begin_update of %s", p->name);
    p->update_at = clock_ns();
    if (publication_has_copies(p)) {
        /* A copy that is still to be made comes before what is written now. */
        p->update_open = true;
        s->stats.updates++;
        return FANIN_OK;
    }
    if (RULE(RULE_LATE_EFFECT))
        commit_withdraw(s, p, "begin_update came before its stream was done");
    publication_advance(s, p, STATE_WRITING);
    return FANIN_OK;
}

fanin_status fanin_server_begin_update(fanin_server *server, const char *name,
                                       fanin_error *error)
{
    fanin_status status = publication_call_check(server, name, error);
    if (status != FANIN_OK)
        return status;
    publication *p = NULL;
    uint64_t began = clock_ns();
    pthread_mutex_lock(&server->lock);
    status = publication_obtain(server, name, &p, error);
    if (status == FANIN_OK)
        status = publication_appear(server, p, error);
    if (status == FANIN_OK)
        status = open_update(server, p, error);
    pthread_mutex_unlock(&server->lock);
    publication_span(server, TRACE_BEGIN_UPDATE, began, name, 0, status);
    return status;
}

/* --------------------------------------------------------- abort, withdraw */

/* Ends what the publication, which is settled, is at. Lock held. FANIN_ERR_STATE: it is at nothing
   of the kind. */
typedef fanin_status (*end_fn)(fanin_server *s, publication *p, fanin_error *error);

static fanin_status end_update(fanin_server *server, const char *name,
                               const char *phase, end_fn end, fanin_error *error)
{
    fanin_status status = publication_call_check(server, name, error);
    if (status != FANIN_OK)
        return status;
    pthread_mutex_lock(&server->lock);
    publication *p = publication_find(server, name);
    if (p)
        commit_settle(server, p);
    status = p && p->present ? end(server, p, error)
                             : publication_absent(phase, name, error);
    pthread_mutex_unlock(&server->lock);
    return status;
}

/* An update is open until its commit has taken effect. */
static fanin_status abort_update(fanin_server *s, publication *p, fanin_error *error)
{
    error_place place = {.phase = "abort"};
    if (p->paused) { /* resume does not show the step again */
        p->was_stable = false;
        p->aborted = p->aborted || publication_has_copies(p);
        s->stats.aborts++;
        return FANIN_OK;
    }
    if (p->state == STATE_DRAINING || !(p->update_open || p->pending))
        return error_set(error, FANIN_ERR_STATE, &place, "no update of %s is open",
                         p->name);
    /* A copy that is being made belongs to the update before the open one. */
    if (!p->update_open || !publication_has_copies(p))
        commit_withdraw(s, p, "its update was aborted");
    p->update_open = false;
    if (publication_has_copies(p))
        p->aborted = true;
    else
        publication_advance(s, p, STATE_UNPUBLISHED);
    s->stats.aborts++;
    return FANIN_OK;
}

fanin_status fanin_server_abort_update(fanin_server *server, const char *name,
                                       fanin_error *error)
{
    return end_update(server, name, "abort", abort_update, error);
}

/* While readers may read the shards themselves, now or when a pending commit takes effect. */
static fanin_status withdraw_shards(fanin_server *s, publication *p, fanin_error *error)
{
    error_place place = {.phase = "withdraw"};
    if ((p->state != STATE_STABLE && !p->pending) || p->paused ||
        publication_has_copies(p))
        return error_set(error, FANIN_ERR_STATE, &place,
                         "no shards of %s are readable by reference", p->name);
    commit_withdraw(s, p, "its bytes were written outside of an update");
    publication_advance(s, p, STATE_UNPUBLISHED);
    return FANIN_OK;
}

fanin_status fanin_server_withdraw(fanin_server *server, const char *name,
                                   fanin_error *error)
{
    return end_update(server, name, "withdraw", withdraw_shards, error);
}
