/* SPDX-License-Identifier: Apache-2.0 */
/* Updates: they begin, are aborted, or come without having begun; and pauses, in which the trainer
   takes its shards' memory away for a while. */
#include "core/rules.h"
#include "error_set.h"
#include "publish/commit.h"
#include "shards/registration.h"
#include "text.h"
#include <string.h>

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
    if (p->state == STATE_STABLE)
        p->taken_back[p->n_taken_back++ % TAKEN_BACK] = p->step;
    commit_withdraw(s, p, "its bytes were written outside of an update");
    publication_advance(s, p, STATE_UNPUBLISHED);
    return FANIN_OK;
}

fanin_status fanin_server_withdraw(fanin_server *server, const char *name,
                                   fanin_error *error)
{
    return end_update(server, name, "withdraw", withdraw_shards, error);
}

/* --------------------------------------------------------------------- pause */

/* ------------------------------------------------------------------ checks */

static fanin_status read_reason(const char *given, char out[REASON_SIZE],
                                fanin_error *error)
{
    error_place place = {.phase = "pause"};
    if (!given || !given[0])
        given = "trainer memory offloaded";
    if (!utf8_valid(given, strlen(given)))
        return error_set(error, FANIN_ERR_ARGUMENT, &place, "the reason is not UTF-8");
    utf8_copy(out, REASON_SIZE, given);
    return FANIN_OK;
}

/* Lock held. */
static fanin_status may_pause(const publication *p, fanin_error *error)
{
    error_place place = {.phase = "pause", .remedy = "commit or abort it first"};
    if (!p->present)
        return publication_absent("pause", p->name, error);
    if (p->state != STATE_DRAINING && (p->paused || !p->update_open))
        return FANIN_OK;
    return error_set(error, FANIN_ERR_STATE, &place, "an update of %s is open",
                     p->name);
}

/* ------------------------------------------------------------------- pause */

/* Nothing is granted, no shard is read by this process and no region of their memory registered any
   more when it returns. With the writer lock. */
static fanin_status pause_now(fanin_server *s, publication *p, const char *reason,
                              fanin_error *error)
{
    pthread_mutex_lock(&s->lock);
    fanin_status status = may_pause(p, error);
    bool again = p->paused;
    if (status == FANIN_OK)
        memcpy(p->reason, reason, sizeof p->reason);
    if (status == FANIN_OK && !again) {
        p->paused = true;
        p->was_stable = p->state == STATE_STABLE;
        if (!publication_has_copies(p))
            publication_advance(s, p, STATE_PAUSED);
    }
    pthread_mutex_unlock(&s->lock);
    if (status != FANIN_OK || again || !p->catalog || p->catalog->plan)
        return status;
    p->revision += region_set_pause(&s->registrar, &p->catalog->regions);
    mappers_tell(&s->registrar, p->name, "paused");
    return FANIN_OK;
}

fanin_status fanin_server_pause(fanin_server *server, const char *name,
                                const char *reason, fanin_error *error)
{
    char text[REASON_SIZE] = "";
    fanin_status status = publication_call_check(server, name, error);
    if (status == FANIN_OK)
        status = read_reason(reason, text, error);
    if (status != FANIN_OK)
        return status;
    publication *p = publication_look_up(server, name);
    if (!p)
        return publication_absent("pause", name, error);
    status = commit_enter(server, p, error);
    if (status == FANIN_OK) {
        /* Before readers are turned away for a call that fails. */
        status = may_pause(p, error);
        pthread_mutex_unlock(&server->lock);
        if (status == FANIN_OK)
            status = commit_wait_for_copies(server, p, error);
        if (status == FANIN_OK)
            status = pause_now(server, p, text, error);
        pthread_mutex_unlock(&p->writer);
        commit_tidy(server);
    }
    if (status == FANIN_OK)
        log_write(&server->log, FANIN_LOG_INFO, "paused", "%s: %s", name, text);
    return status;
}

/* ------------------------------------------------------------------ resume */

/* With the writer lock. */
static fanin_status resume_now(fanin_server *s, publication *p, fanin_error *error)
{
    error_place place = {.phase = "resume", .remedy = "pause it first"};
    pthread_mutex_lock(&s->lock);
    bool paused = p->paused;
    bool publish = p->was_stable && p->state == STATE_PAUSED;
    pthread_mutex_unlock(&s->lock);
    if (!paused)
        return error_set(error, FANIN_ERR_STATE, &place, "%s is not paused", p->name);
    shard_catalog *catalog = NULL;
    fanin_status status =
        publish ? make_catalog(s, p, NULL, &catalog, error) : FANIN_OK;
    if (status != FANIN_OK)
        return status;
    if (p->catalog && !p->catalog->plan)
        region_set_resume(&s->registrar, &p->catalog->regions);
    if (catalog)
        region_set_resume(&s->registrar, &catalog->regions);
    pthread_mutex_lock(&s->lock);
    p->paused = false;
    if (catalog && p->was_stable) /* not aborted meanwhile */
        publication_take_effect(s, p, catalog, next_even(s));
    else if (p->state == STATE_PAUSED)
        publication_advance(s, p, STATE_UNPUBLISHED);
    pthread_mutex_unlock(&s->lock);
    shard_catalog_release(catalog);
    return FANIN_OK;
}

fanin_status fanin_server_resume(fanin_server *server, const char *name,
                                 fanin_error *error)
{
    publication *p = NULL;
    fanin_status status = publication_call_check(server, name, error);
    if (status == FANIN_OK)
        status = publication_lock_present(server, name, "resume", &p, error);
    if (status != FANIN_OK)
        return status;
    status = resume_now(server, p, error);
    pthread_mutex_unlock(&p->writer);
    if (status == FANIN_OK)
        log_write(&server->log, FANIN_LOG_INFO, "resumed", "%s", name);
    return status;
}
