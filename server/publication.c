/* SPDX-License-Identifier: Apache-2.0 */
/* A publication's states and epochs:

       unpublished --commit--> stable --begin_update--> draining --> writing --commit--> stable
                                                                        `--abort--> unpublished

   A publication is readable while it is stable or draining; its epoch is odd otherwise. */
#include "error_set.h"
#include "server_internal.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---------------------------------------------------------------- lookup */

static size_t position(const fanin_server *s, const char *name, bool *found)
{
    size_t low = 0, high = s->n_publications;
    *found = false;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        int order = strcmp(s->publications[middle]->name, name);
        if (order == 0) {
            *found = true;
            return middle;
        }
        if (order < 0)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

publication *publication_find(const fanin_server *s, const char *name)
{
    bool found;
    size_t at = position(s, name, &found);
    return found ? s->publications[at] : NULL;
}

static uint64_t next_odd(fanin_server *s)
{
    s->counter += 1 + s->counter % 2;
    return s->counter;
}

static uint64_t next_even(fanin_server *s)
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
    if (s->n_publications == s->publications_capacity) {
        size_t capacity = s->publications_capacity ? 2 * s->publications_capacity : 16;
        publication **grown = realloc(s->publications, capacity * sizeof *grown);
        if (!grown)
            return error_set_memory(error);
        s->publications = grown;
        s->publications_capacity = capacity;
    }
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
    return FANIN_OK;
}

void publication_names(const fanin_server *s, char *out, size_t size)
{
    size_t used = 0;
    out[0] = '\0';
    for (size_t i = 0; i < s->n_publications; i++) {
        const publication *p = s->publications[i];
        if (!p->present)
            continue;
        int wrote =
            snprintf(out + used, size - used, "%s%s", used ? ", " : "", p->name);
        if (wrote < 0 || (size_t)wrote >= size - used) {
            snprintf(out + size - 5, 5, " ...");
            return;
        }
        used += (size_t)wrote;
    }
}

void publications_free(fanin_server *s)
{
    for (size_t i = 0; i < s->n_publications; i++) {
        publication *p = s->publications[i];
        snapshot_release(p->catalog);
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
    static const char *const names[] = {"unpublished", "stable", "draining", "writing"};
    return names[state];
}

void publication_enter(fanin_server *s, publication *p, publication_state state)
{
    p->state = state;
    p->history[p->changes % HISTORY] = (state_change){p->step, state};
    p->changes++;
    if (s->listeners > 0)
        control_wake(s);
}

uint64_t publication_stable_ns(const publication *p)
{
    unsigned n = p->n_stable < STABLE_SAMPLES ? p->n_stable : STABLE_SAMPLES;
    uint64_t sum = 0;
    for (unsigned i = 0; i < n; i++)
        sum += p->stable_ns[i] / n;
    return sum;
}

static void wait_until(fanin_server *s, deadline at)
{
    struct timespec when = {.tv_sec = (time_t)(at / 1000000000),
                            .tv_nsec = (long)(at % 1000000000)};
    pthread_cond_timedwait(&s->freed, &s->lock, &when);
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
        wait_until(s, RULE(RULE_DRAIN_DEADLINE)
                          ? deadline_sooner(limit, p->newest->expires)
                          : p->newest->expires);
    if (p->newest)
        s->stats.drains_expired++;
}

/* A send never blocks, so this is as short as one copy of at most 1 MiB. */
static void wait_for_sends(fanin_server *s, publication *p, uint64_t epoch)
{
    while (RULE(RULE_SEND_WAIT) && p->in_flight > 0 && p->in_flight_epoch < epoch)
        pthread_cond_wait(&s->freed, &s->lock);
}

/* From any state but draining to an odd epoch. */
static void turn(fanin_server *s, publication *p)
{
    uint64_t began = clock_ns();
    if (p->state == STATE_STABLE) {
        p->stable_ns[p->n_stable++ % STABLE_SAMPLES] = began - p->committed_at;
        publication_enter(s, p, STATE_DRAINING);
        drain(s, p);
    }
    uint64_t epoch = p->epoch = next_odd(s);
    lease_void_all(s, p);
    p->update_open = true;
    if (p->state != STATE_WRITING)
        publication_enter(s, p, STATE_WRITING);
    pthread_cond_broadcast(&s->freed); /* for those that wait for the draining to end */
    wait_for_sends(s, p, epoch);
    uint64_t waited = clock_ns() - began;
    s->stats.updates++;
    s->stats.drain_wait_ns_total += waited;
    if (waited > s->stats.drain_wait_ns_max)
        s->stats.drain_wait_ns_max = waited;
}

fanin_status publication_open_update(fanin_server *s, publication *p,
                                     fanin_error *error)
{
    if (p->state == STATE_DRAINING) {
        error_place place = {.phase = "update",
                             .remedy =
                                 "update a publication from one thread at a time"};
        return error_set(error, FANIN_ERR_STATE, &place,
                         "another thread is in begin_update of %s", p->name);
    }
    turn(s, p);
    return FANIN_OK;
}

void publication_make_unreadable(fanin_server *s, publication *p)
{
    while (p->state == STATE_DRAINING)
        pthread_cond_wait(&s->freed, &s->lock);
    if (p->state == STATE_STABLE)
        turn(s, p);
    else
        wait_for_sends(s, p, p->epoch);
}

/* ------------------------------------------------------ public functions */

fanin_status fanin_server_begin_update(fanin_server *server, const char *name,
                                       fanin_error *error)
{
    fanin_status status = server_check(server, error);
    if (status == FANIN_OK)
        status = publication_name_check(name, error);
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
    return status;
}

fanin_status fanin_server_abort_update(fanin_server *server, const char *name,
                                       fanin_error *error)
{
    fanin_status status = server_check(server, error);
    if (status == FANIN_OK)
        status = publication_name_check(name, error);
    if (status != FANIN_OK)
        return status;
    error_place place = {.phase = "abort"};
    pthread_mutex_lock(&server->lock);
    publication *p = publication_find(server, name);
    if (!p || !p->present) {
        status = error_set(error, FANIN_ERR_NOT_FOUND, &place,
                           "there is no publication %s", name);
    } else if (!p->update_open || p->state != STATE_WRITING) {
        status =
            error_set(error, FANIN_ERR_STATE, &place, "no update of %s is open", name);
    } else {
        p->update_open = false;
        server->stats.aborts++;
        publication_enter(server, p, STATE_UNPUBLISHED);
    }
    pthread_mutex_unlock(&server->lock);
    return status;
}

/* Whether @p step may be committed now. Lock held. */
static fanin_status check_commit(const publication *p, uint64_t step,
                                 fanin_error *error)
{
    error_place place = {.phase = "commit"};
    if (!p->present) {
        place.remedy = "put shards, or call begin_update, first";
        return error_set(error, FANIN_ERR_ARGUMENT, &place,
                         "there is no publication %s", p->name);
    }
    if (p->state == STATE_DRAINING || p->state == STATE_STABLE) {
        place.remedy = "call begin_update before the bytes are written";
        return error_set(error, FANIN_ERR_STATE, &place, "no update of %s is open",
                         p->name);
    }
    if (p->has_step && step <= p->step) {
        place.remedy = "steps must grow, also after a publication was removed";
        return error_set(error, FANIN_ERR_ARGUMENT, &place,
                         "step %llu of %s is not above the last one, %llu",
                         (unsigned long long)step, p->name,
                         (unsigned long long)p->step);
    }
    return FANIN_OK;
}

/* Takes effect only if the update that it closes is still the current one. Lock held. */
static fanin_status close_update(fanin_server *s, publication *p, uint64_t step,
                                 uint64_t closing, snapshot **built, fanin_error *error)
{
    if (!p->present || p->epoch != closing) {
        error_place place = {.phase = "commit"};
        return error_set(error, FANIN_ERR_STATE, &place,
                         "another update of %s began before step %llu was committed",
                         p->name, (unsigned long long)step);
    }
    fanin_status status = check_commit(p, step, error);
    if (status != FANIN_OK)
        return status;
    if (*built) {
        snapshot *old = p->catalog;
        p->catalog = *built;
        *built = old;
    }
    p->epoch = next_even(s);
    p->update_open = false;
    p->has_step = true;
    p->step = step;
    p->committed_at = clock_ns();
    s->stats.commits++;
    publication_enter(s, p, STATE_STABLE);
    return FANIN_OK;
}

/* With the publication's writer lock: builds the catalog outside of the server's lock. */
static fanin_status commit(fanin_server *s, publication *p, uint64_t step,
                           fanin_error *error)
{
    pthread_mutex_lock(&s->lock);
    fanin_status status = check_commit(p, step, error);
    uint64_t closing = p->epoch;
    bool build = p->catalog_changed || !p->catalog;
    uint64_t version = build ? next_even(s) : 0;
    pthread_mutex_unlock(&s->lock);
    snapshot *other = NULL; /* the new catalog, then the one it replaces */
    if (status == FANIN_OK && build)
        status =
            snapshot_build(&s->registrar, &p->shards, p->pairs, (uint32_t)p->n_pairs,
                           version, s->rank, s->world_size, p->catalog, &other, error);
    if (status == FANIN_OK) {
        pthread_mutex_lock(&s->lock);
        status = close_update(s, p, step, closing, &other, error);
        pthread_mutex_unlock(&s->lock);
        if (status == FANIN_OK)
            p->catalog_changed = false;
    }
    snapshot_release(other);
    return status;
}

fanin_status fanin_server_commit(fanin_server *server, const char *name, uint64_t step,
                                 const fanin_commit_options *options,
                                 fanin_error *error)
{
    fanin_status status = server_check(server, error);
    if (status == FANIN_OK)
        status = publication_name_check(name, error);
    if (status != FANIN_OK)
        return status;
    error_place place = {.phase = "commit"};
    if (options && options->struct_size < sizeof *options)
        return error_set(error, FANIN_ERR_ARGUMENT, &place,
                         "struct_size of the commit options is not set");
    pthread_mutex_lock(&server->lock);
    publication *p = publication_find(server, name);
    pthread_mutex_unlock(&server->lock);
    if (!p) {
        place.remedy = "put shards, or call begin_update, first";
        return error_set(error, FANIN_ERR_ARGUMENT, &place,
                         "there is no publication %s", name);
    }
    pthread_mutex_lock(&p->writer);
    status = commit(server, p, step, error);
    pthread_mutex_unlock(&p->writer);
    return status;
}
