/* SPDX-License-Identifier: Apache-2.0 */
/* A publication's states and epochs:

       unpublished --commit--> stable --begin_update--> draining --> writing --commit--> stable
                                                                        `--abort--> unpublished
       stable --pause--> draining --> paused --resume--> stable
       unpublished --pause--> paused --resume--> unpublished

   A publication is readable while it is stable or draining; its epoch is odd otherwise. */
#include "array.h"
#include "publish/publication.h"
#include "core/rules.h"
#include "wake.h"
#include "error_set.h"
#include "publish/commit.h"
#include "publish/filling.h"
#include "publish/lease.h"
#include "shards/registration.h"
#include "text.h"
#include "thread.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ------------------------------------------------------------------ states */

const char *state_name(publication_state state)
{
    static const char *const names[] = {"unpublished", "stable", "draining", "writing",
                                        "paused"};
    return names[state];
}

void publication_tell(fanin_server *s)
{
    if (s->listeners == 0 || s->is_woken)
        return;
    s->is_woken = true;
    wake_up(s->wake);
}

/* Sets the state, remembers the change and wakes the control thread. */
static void enter(fanin_server *s, publication *p, publication_state state)
{
    if (p->state == STATE_STABLE)
        p->stable_ns[p->n_stable++ % STABLE_SAMPLES] = clock_ns() - p->entered_at;
    p->state = state;
    p->entered_at = clock_ns();
    p->history[p->changes % HISTORY] = (state_change){p->step, state};
    p->changes++;
    publication_tell(s);
}

uint64_t publication_stable_ns(const publication *p)
{
    unsigned n = p->n_stable < STABLE_SAMPLES ? p->n_stable : STABLE_SAMPLES;
    uint64_t sum = 0;
    for (unsigned i = 0; i < n; i++)
        sum += p->stable_ns[i] / n;
    return sum;
}

bool publication_has_copies(const publication *p)
{
    return (p->mode == MODE_SNAPSHOT && p->state == STATE_STABLE) ||
           (p->pending && p->pending->terms.mode == MODE_SNAPSHOT);
}

bool publication_is_away(const publication *p)
{
    return p->paused && p->state != STATE_STABLE;
}

fanin_status publication_refuse_paused(const publication *p, const char *phase,
                                       fanin_error *error)
{
    error_place place = {.phase = phase, .remedy = "resume it first"};
    return error_set(error, FANIN_ERR_STATE, &place, "%s is paused: resume it first",
                     p->name);
}

/* ------------------------------------------------------------------- reads */

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

void publication_wait_for_drain(fanin_server *s, publication *p)
{
    while (p->state == STATE_DRAINING)
        pthread_cond_wait(&s->freed, &s->lock);
}

/* ------------------------------------------------------------------ effect */

void publication_reset_proofs(publication *p, bool fills)
{
    free(p->proofs.bits);
    free(p->proofs.log);
    p->proofs = (proofs){.fills = fills};
}

void publication_take_effect(fanin_server *s, publication *p, shard_catalog *catalog,
                             uint64_t epoch)
{
    if (p->catalog != catalog) {
        catalog_discard(s, p->catalog);
        p->catalog = shard_catalog_retain(catalog);
    }
    p->epoch = epoch;
    enter(s, p, STATE_STABLE);
}

/* ----------------------------------------------------------------- advance */

/* Waits until no lease is left that is to be waited for. */
static void drain_readers(fanin_server *s, publication *p)
{
    drain d;
    enter(s, p, STATE_DRAINING);
    if (!RULE(RULE_DRAIN))
        return;
    drain_begin(p, &d,
                RULE(RULE_DRAIN_DEADLINE) ? deadline_in_ms(s->lease_ms) : UINT64_MAX);
    if (!drain_finish(s, p, &d, 0, NULL) && !d.cut)
        s->stats.drains_expired++;
}

static void count_wait(fanin_server *s, uint64_t waited)
{
    size_t bucket = 0;
    for (uint64_t bound = DRAIN_BUCKET_NS;
         bucket < FANIN_DRAIN_BUCKETS - 1 && waited > bound; bucket++)
        bound = drain_bound_after(bound);
    s->stats.drain_waits[bucket]++;
    s->stats.drain_wait_ns_total += waited;
    if (waited > s->stats.drain_wait_ns_max)
        s->stats.drain_wait_ns_max = waited;
}

void publication_advance(fanin_server *s, publication *p, publication_state to)
{
    uint64_t began = clock_ns();
    bool gently = to != STATE_UNPUBLISHED;
    if (gently && p->state == STATE_STABLE)
        drain_readers(s, p);
    p->epoch = next_odd(s);
    p->previous = 0;
    lease_void_outdated(s, p);
    publication_reset_proofs(p, p->proofs.fills);
    p->update_open = to == STATE_WRITING;
    if (!gently || p->state != to)
        enter(s, p, to);
    pthread_cond_broadcast(&s->freed); /* for those that wait for the draining to end */
    publication_wait_for_reads(s, p);
    s->stats.updates += to == STATE_WRITING;
    if (gently)
        count_wait(s, clock_ns() - began);
}

/* ------------------------------------------------------------------- by name */

#define NAMES_MOST 65536 /**< in one server's life */

fanin_status publication_call_check(const fanin_server *server, const char *name,
                                    fanin_error *error)
{
    fanin_status status = server_check(server, error);
    return status == FANIN_OK ? publication_name_check(name, error) : status;
}

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

/* Steps grow: what is below the oldest one that is remembered may be one that is forgotten. */
bool publication_has_taken_back(const publication *p, uint64_t step)
{
    bool has = p->n_taken_back > TAKEN_BACK &&
               step < p->taken_back[p->n_taken_back % TAKEN_BACK];
    for (unsigned i = 0; i < TAKEN_BACK && i < p->n_taken_back; i++)
        has = has || p->taken_back[i] == step;
    return has;
}

uint64_t publication_last_taken_back(const publication *p)
{
    unsigned n = p->n_taken_back;
    return n > 0 ? p->taken_back[(n - 1) % TAKEN_BACK] + 1 : 0;
}

publication *publication_look_up(fanin_server *s, const char *name)
{
    pthread_mutex_lock(&s->lock);
    publication *p = publication_find(s, name);
    pthread_mutex_unlock(&s->lock);
    return p;
}

fanin_status publication_absent(const char *phase, const char *name, fanin_error *error)
{
    error_place place = {.phase = phase};
    return error_set(error, FANIN_ERR_NOT_FOUND, &place, "there is no publication %s",
                     name);
}

fanin_status publication_lock_present(fanin_server *s, const char *name,
                                      const char *phase, publication **out,
                                      fanin_error *error)
{
    publication *p = *out = publication_look_up(s, name);
    if (!p)
        return publication_absent(phase, name, error);
    pthread_mutex_lock(&p->writer);
    pthread_mutex_lock(&s->lock);
    bool present = p->present;
    pthread_mutex_unlock(&s->lock);
    if (present)
        return FANIN_OK;
    pthread_mutex_unlock(&p->writer);
    return publication_absent(phase, name, error);
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
        publication_reset_proofs(p, false);
        shard_set_free(&p->shards);
        free(p->pairs);
        pthread_mutex_destroy(&p->writer);
        free(p);
    }
    free(s->publications);
    s->publications = NULL;
    s->n_publications = s->publications_capacity = 0;
}

/* ------------------------------------------------------------------- trace */

void publication_span(const fanin_server *s, trace_name name, uint64_t began,
                      const char *about, uint64_t step, fanin_status outcome)
{
    if (!trace_on())
        return;
    trace_span span = trace_span_of(name, began, outcome, about);
    span.rank = (int32_t)s->rank;
    span.step = step;
    trace_add(&span);
}

/* ------------------------------------------------------------------- garbage */

/* Lock held. */
static void add(fanin_server *s, shard_catalog *catalog)
{
    catalog->next_garbage = s->garbage;
    s->garbage = catalog;
    wake_up(s->wake);
}

void catalog_discard(fanin_server *s, shard_catalog *catalog)
{
    if (catalog && shard_catalog_drop(catalog))
        add(s, catalog);
}

void catalog_retire(fanin_server *s, shard_catalog *catalog)
{
    if (!catalog || !shard_catalog_drop(catalog))
        return;
    pthread_mutex_lock(&s->lock);
    add(s, catalog);
    pthread_mutex_unlock(&s->lock);
}

void garbage_collect(fanin_server *s)
{
    bool arenas = false;
    pthread_mutex_lock(&s->collecting);
    pthread_mutex_lock(&s->lock);
    shard_catalog *garbage = s->garbage;
    s->garbage = NULL;
    pthread_mutex_unlock(&s->lock);
    while (garbage) {
        shard_catalog *next = garbage->next_garbage;
        arenas = arenas || garbage->plan;
        shard_catalog_free(garbage);
        garbage = next;
    }
    pthread_mutex_unlock(&s->collecting);
    /* Arenas that go may be mapped by others, as the trainer's memory may. */
    if (arenas)
        mappers_tell(&s->registrar, s->name, "freed");
}

static void *collect_all(void *server)
{
    fanin_server *s = server;
    bool more = true;
    while (more) {
        garbage_collect(s);
        pthread_mutex_lock(&s->lock);
        more = s->collects = s->garbage;
        pthread_mutex_unlock(&s->lock);
    }
    wake_up(s->wake); /* to be joined */
    return NULL;
}

void garbage_leave(fanin_server *s)
{
    pthread_mutex_lock(&s->lock);
    bool over = !s->collects, begins = s->garbage && over;
    s->collects = !over || begins;
    pthread_mutex_unlock(&s->lock);
    if (over)
        garbage_join(s);
    if (!begins)
        return;
    s->has_collector =
        thread_start(&s->collector, "fanin-free", collect_all, s, NULL) == FANIN_OK;
    if (!s->has_collector)
        collect_all(s);
}

void garbage_join(fanin_server *s)
{
    if (s->has_collector)
        pthread_join(s->collector, NULL);
    s->has_collector = false;
}
