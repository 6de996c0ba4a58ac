/* SPDX-License-Identifier: Apache-2.0 */
/* A publication's states and epochs:

       unpublished --commit--> stable --begin_update--> draining --> writing --commit--> stable
                                                                        `--abort--> unpublished
       stable --pause--> draining --> paused --resume--> stable
       unpublished --pause--> paused --resume--> unpublished

   A publication is readable while it is stable or draining; its epoch is odd otherwise. */
#include "array.h"
#include "core/server_state.h"
#include "core/wake.h"
#include "error_set.h"
#include "text.h"
#include "thread.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---------------------------------------------------------------- lookup */

static int compare_name(const void *key, const void *element)
{
    return strcmp(key, (*(publication *const *)element)->name);
}

static size_t position(const fanin_server *s, const char *name, bool *found)
{
    return array_search(name, s->publications, s->n_publications,
                        sizeof *s->publications, compare_name, found);
}

publication *publication_find(const fanin_server *s, const char *name)
{
    bool found;
    size_t at = position(s, name, &found);
    return found ? s->publications[at] : NULL;
}

uint64_t next_odd(fanin_server *s)
{
    s->counter += 1 + s->counter % 2;
    return s->counter;
}

uint64_t next_even(fanin_server *s)
{
    s->counter += 2 - s->counter % 2;
    return s->counter;
}

fanin_status publication_obtain(fanin_server *s, const char *name, publication **out,
                                fanin_error *error)
{
    bool found;
    size_t at = position(s, name, &found);
    if (found) {
        *out = s->publications[at];
        return FANIN_OK;
    }
    if (s->n_publications == NAMES_MOST) {
        error_place place = {.phase = "publish",
                             .remedy = "use run names again, or start a new server"};
        return error_set(error, FANIN_ERR_LIMIT, &place,
                         "this server has seen %d names of publications", NAMES_MOST);
    }
    if (!array_reserve(&s->publications, &s->publications_capacity,
                       s->n_publications + 1, sizeof *s->publications))
        return error_set_memory(error);
    publication *p = calloc(1, sizeof *p);
    if (!p || pthread_mutex_init(&p->writer, NULL) != 0) {
        free(p);
        return error_set_memory(error);
    }
    snprintf(p->name, sizeof p->name, "%s", name);
    p->epoch = next_odd(s);
    memmove(&s->publications[at + 1], &s->publications[at],
            (s->n_publications - at) * sizeof *s->publications);
    s->publications[at] = p;
    s->n_publications++;
    *out = p;
    return FANIN_OK;
}

fanin_status publication_appear(fanin_server *s, publication *p, fanin_error *error)
{
    if (p->present)
        return FANIN_OK;
    size_t present = 0;
    for (size_t i = 0; i < s->n_publications; i++)
        present += s->publications[i]->present;
    if (present >= LIMIT_PUBLICATIONS) {
        error_place place = {.phase = "publish", .remedy = "remove old ones first"};
        return error_set(error, FANIN_ERR_LIMIT, &place,
                         "this server has %d publications already", LIMIT_PUBLICATIONS);
    }
    p->present = true;
    p->entered_at = clock_ns();
    return FANIN_OK;
}

void publication_names(const fanin_server *s, char *out, size_t size)
{
    text names = text_in(out, size);
    for (size_t i = 0; i < s->n_publications; i++)
        if (s->publications[i]->present)
            text_add(&names, "%s%s", names.used ? ", " : "", s->publications[i]->name);
    if (names.used >= size)
        snprintf(out + size - 5, 5, " ...");
}

void publications_free(fanin_server *s)
{
    for (size_t i = 0; i < s->n_publications; i++) {
        publication *p = s->publications[i];
        shard_catalog_release(p->catalog);
        shard_set_free(&p->shards);
        free(p->pairs);
        pthread_mutex_destroy(&p->writer);
        free(p);
    }
    free(s->publications);
    s->publications = NULL;
    s->n_publications = s->publications_capacity = 0;
}

/* ---------------------------------------------------------------- states */

const char *state_name(publication_state state)
{
    static const char *const names[] = {"unpublished", "stable", "draining", "writing",
                                        "paused"};
    return names[state];
}

void publication_enter(fanin_server *s, publication *p, publication_state state)
{
    p->state = state;
    p->entered_at = clock_ns();
    p->history[p->changes % HISTORY] = (state_change){p->step, state};
    p->changes++;
    if (s->listeners > 0)
        wake_up(s->wake);
}

uint64_t publication_stable_ns(const publication *p)
{
    unsigned n = p->n_stable < STABLE_SAMPLES ? p->n_stable : STABLE_SAMPLES;
    uint64_t sum = 0;
    for (unsigned i = 0; i < n; i++)
        sum += p->stable_ns[i] / n;
    return sum;
}

void publication_wait(fanin_server *s, deadline at)
{
    (void)condition_wait(&s->freed, &s->lock, at);
}

/* Waits until no unexpired lease is left. All leases last equally long and none is granted
   while draining, so the newest is the last to expire. */
static void drain(fanin_server *s, publication *p)
{
    deadline limit = deadline_in_ms(s->lease_ms);
    if (!RULE(RULE_DRAIN))
        return;
    while (p->newest && !deadline_passed(p->newest->expires) &&
           (!deadline_passed(limit) || !RULE(RULE_DRAIN_DEADLINE)))
        publication_wait(s, RULE(RULE_DRAIN_DEADLINE)
                                ? deadline_sooner(limit, p->newest->expires)
                                : p->newest->expires);
    if (p->newest)
        s->stats.drains_expired++;
}

bool publication_stands(const publication *p, uint64_t epoch)
{
    return epoch == p->epoch || (epoch == p->previous && epoch != 0);
}

bool publication_read_enter(fanin_server *s, publication *p, uint64_t epoch)
{
    if (!publication_stands(p, epoch) && RULE(RULE_SEND_CHECK))
        return false;
    reading *slot = NULL;
    for (size_t i = 0; i < READING_EPOCHS; i++) {
        reading *r = &p->reading[i];
        if (r->count > 0 && r->epoch == epoch) {
            r->count++;
            return true;
        }
        if (r->count == 0)
            slot = r;
    }
    if (!slot) {
        /* What cannot be announced is not read, so the end must not be good either. */
        lease_void_epoch(s, p, epoch);
        return false;
    }
    *slot = (reading){epoch, 1};
    return true;
}

void publication_read_leave(fanin_server *s, publication *p, uint64_t epoch)
{
    for (size_t i = 0; i < READING_EPOCHS; i++)
        if (p->reading[i].count > 0 && p->reading[i].epoch == epoch) {
            p->reading[i].count--;
            break;
        }
    if (!publication_stands(p, epoch))
        pthread_cond_broadcast(&s->freed);
}

static bool reads_what_has_gone(const publication *p)
{
    for (size_t i = 0; i < READING_EPOCHS; i++)
        if (p->reading[i].count > 0 && !publication_stands(p, p->reading[i].epoch))
            return true;
    return false;
}

/* A send never blocks, so this is as short as one copy of at most 1 MiB; copies out of device
   memory give up on their own. */
void publication_wait_for_reads(fanin_server *s, publication *p)
{
    while (RULE(RULE_SEND_WAIT) && reads_what_has_gone(p))
        pthread_cond_wait(&s->freed, &s->lock);
}

/* A new odd epoch, and what was read under the old ones is worth nothing from now on. */
static void void_readers(fanin_server *s, publication *p, publication_state to)
{
    p->epoch = next_odd(s);
    p->previous = 0;
    lease_void_all(s, p);
    p->update_open = to == STATE_WRITING;
    if (p->state != to)
        publication_enter(s, p, to);
    pthread_cond_broadcast(&s->freed); /* for those that wait for the draining to end */
    publication_wait_for_reads(s, p);
}

static void count_stable(publication *p)
{
    p->stable_ns[p->n_stable++ % STABLE_SAMPLES] = clock_ns() - p->entered_at;
}

/* From any state but draining to an odd epoch, and to the state writing or paused. */
static void turn(fanin_server *s, publication *p, publication_state to)
{
    uint64_t began = clock_ns();
    if (p->state == STATE_STABLE) {
        count_stable(p);
        publication_enter(s, p, STATE_DRAINING);
        drain(s, p);
    }
    void_readers(s, p, to);
    uint64_t waited = clock_ns() - began;
    s->stats.updates += to == STATE_WRITING;
    s->stats.drain_wait_ns_total += waited;
    if (waited > s->stats.drain_wait_ns_max)
        s->stats.drain_wait_ns_max = waited;
}

/* Whether the trainer may write the shards while readers go on, or wait for, a copy of them. */
static bool has_copies(const publication *p)
{
    return (p->mode == MODE_SNAPSHOT && p->state == STATE_STABLE) ||
           (p->pending && commit_is_copy(p->pending));
}

bool publication_is_away(const publication *p)
{
    return p->paused && p->state != STATE_STABLE;
}

fanin_status publication_check_paused(const publication *p, const char *phase,
                                      fanin_error *error)
{
    error_place place = {.phase = phase, .remedy = "resume it first"};
    if (!p->paused)
        return FANIN_OK;
    return error_set(error, FANIN_ERR_STATE, &place, "%s is paused: resume it first",
                     p->name);
}

void publication_pause(fanin_server *s, publication *p, const char *reason)
{
    p->paused = true;
    p->was_stable = p->state == STATE_STABLE;
    snprintf(p->reason, sizeof p->reason, "%s", reason);
    if (!has_copies(p))
        turn(s, p, STATE_PAUSED);
}

fanin_status publication_open_update(fanin_server *s, publication *p,
                                     fanin_error *error)
{
    fanin_status status = publication_check_paused(p, "update", error);
    if (status != FANIN_OK)
        return status;
    if (p->state == STATE_DRAINING) {
        error_place place = {.phase = "update",
                             .remedy =
                                 "update a publication from one thread at a time"};
        return error_set(error, FANIN_ERR_STATE, &place,
                         "another thread is in begin_update of %s", p->name);
    }
    commit_settle(s, p);
    if (has_copies(p)) {
        /* A copy that is still to be made comes before what is written now. */
        p->update_open = true;
        s->stats.updates++;
        return FANIN_OK;
    }
    if (RULE(RULE_LATE_EFFECT))
        commit_withdraw(s, p, "begin_update came before its stream had got there");
    turn(s, p, STATE_WRITING);
    return FANIN_OK;
}

void publication_make_unreadable(fanin_server *s, publication *p)
{
    if (p->paused)
        return; /* nobody reads the shards, and no commit is due to resume */
    while (p->state == STATE_DRAINING)
        pthread_cond_wait(&s->freed, &s->lock);
    commit_settle(s, p);
    if (has_copies(p)) {
        p->update_open = true;
        return;
    }
    commit_withdraw(s, p, "shards of it were replaced or removed");
    if (p->state == STATE_STABLE)
        turn(s, p, STATE_WRITING);
    else
        publication_wait_for_reads(s, p);
}

void publication_close(fanin_server *s, publication *p)
{
    while (p->state == STATE_DRAINING)
        pthread_cond_wait(&s->freed, &s->lock);
    commit_settle(s, p);
    commit_withdraw(s, p, "the publication was removed");
    if (p->state == STATE_STABLE)
        turn(s, p, STATE_WRITING);
    else
        publication_wait_for_reads(s, p);
    p->update_open = p->paused = false;
    p->mode = MODE_UNKNOWN;
    p->cast = 0;
    p->arena = 0;
    p->aborted = false;
    p->filling = NULL;
}

/* ------------------------------------------------------ public functions */

fanin_status fanin_server_begin_update(fanin_server *server, const char *name,
                                       fanin_error *error)
{
    fanin_status status = publication_call_check(server, name, error);
    if (status != FANIN_OK)
        return status;
    publication *p = NULL;
    pthread_mutex_lock(&server->lock);
    status = publication_obtain(server, name, &p, error);
    if (status == FANIN_OK)
        status = publication_appear(server, p, error);
    if (status == FANIN_OK)
        status = publication_open_update(server, p, error);
    pthread_mutex_unlock(&server->lock);
    commit_tidy(server);
    return status;
}

fanin_status publication_call_check(const fanin_server *server, const char *name,
                                    fanin_error *error)
{
    fanin_status status = server_check(server, error);
    return status == FANIN_OK ? publication_name_check(name, error) : status;
}

/* Takes the lock, unless the call is wrong or the publication is not there. */
static fanin_status lock_present(fanin_server *server, const char *name,
                                 const error_place *place, publication **out,
                                 fanin_error *error)
{
    fanin_status status = publication_call_check(server, name, error);
    if (status != FANIN_OK)
        return status;
    pthread_mutex_lock(&server->lock);
    *out = publication_find(server, name);
    if (*out && (*out)->present)
        return FANIN_OK;
    pthread_mutex_unlock(&server->lock);
    return error_set(error, FANIN_ERR_NOT_FOUND, place, "there is no publication %s",
                     name);
}

/* An update is open until its commit has taken effect. Lock held. */
static bool may_abort(fanin_server *s, publication *p)
{
    commit_settle(s, p);
    return p->state != STATE_DRAINING && (p->update_open || p->pending);
}

/* Lock held. */
static void abort_update(fanin_server *s, publication *p)
{
    /* A copy that is being made belongs to the update before the open one. */
    if (!p->update_open || !has_copies(p))
        commit_withdraw(s, p, "its update was aborted");
    p->update_open = false;
    s->stats.aborts++;
    if (has_copies(p)) {
        p->aborted = true;
        return;
    }
    p->epoch = next_odd(s);
    publication_enter(s, p, STATE_UNPUBLISHED);
}

/* While it is paused: resume does not show the step again. Lock held. */
static void give_up(fanin_server *s, publication *p)
{
    p->was_stable = false;
    p->aborted = p->aborted || has_copies(p);
    s->stats.aborts++;
}

fanin_status fanin_server_abort_update(fanin_server *server, const char *name,
                                       fanin_error *error)
{
    error_place place = {.phase = "abort"};
    publication *p;
    fanin_status status = lock_present(server, name, &place, &p, error);
    if (status != FANIN_OK)
        return status;
    if (p->paused) {
        give_up(server, p);
    } else if (!may_abort(server, p)) {
        status =
            error_set(error, FANIN_ERR_STATE, &place, "no update of %s is open", name);
    } else {
        abort_update(server, p);
    }
    pthread_mutex_unlock(&server->lock);
    commit_tidy(server);
    return status;
}

/* Whether readers may read the shards themselves, now or when a pending commit takes effect. Lock
   held. */
static bool may_withdraw(fanin_server *s, publication *p)
{
    commit_settle(s, p);
    return (p->state == STATE_STABLE || p->pending) && !p->paused && !has_copies(p);
}

/* Lock held. */
static void withdraw(fanin_server *s, publication *p)
{
    if (p->state == STATE_STABLE)
        count_stable(p);
    commit_withdraw(s, p, "its bytes were written outside of an update");
    s->stats.aborts++;
    void_readers(s, p, STATE_UNPUBLISHED);
}

fanin_status fanin_server_withdraw(fanin_server *server, const char *name,
                                   fanin_error *error)
{
    error_place place = {.phase = "withdraw"};
    publication *p;
    fanin_status status = lock_present(server, name, &place, &p, error);
    if (status != FANIN_OK)
        return status;
    if (!may_withdraw(server, p)) {
        status = error_set(error, FANIN_ERR_STATE, &place,
                           "no shards of %s are readable by reference", name);
    } else {
        withdraw(server, p);
    }
    pthread_mutex_unlock(&server->lock);
    commit_tidy(server);
    return status;
}
