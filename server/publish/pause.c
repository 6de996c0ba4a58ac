/* SPDX-License-Identifier: Apache-2.0 */
/* The trainer takes its shards' memory away for a while. */
#include "error_set.h"
#include "publish/commit.h"
#include "shards/registration.h"
#include "text.h"

#include <string.h>

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
        status = publication_lock_present(server, name, "pause", &p, error);
    if (status != FANIN_OK)
        return status;
    status = resume_now(server, p, error);
    pthread_mutex_unlock(&p->writer);
    if (status == FANIN_OK)
        log_write(&server->log, FANIN_LOG_INFO, "resumed", "%s", name);
    return status;
}
