/* SPDX-License-Identifier: Apache-2.0 */
#include "pull/read_ahead.h"

#include "cma/rank_process.h"
#include "error_set.h"
#include "net/client_rules.h"
#include <stdlib.h>
#include <string.h>

/* Where it was in vain n times, that many pulls less than 2^n do without: the words of a copy that
   was published before, say, which stand beside the next one's. */
#define MOST_MISSES 6

/* Whether bytes come from it. */
static bool is_read(const pull *p, size_t source)
{
    return p->cache->whole.plan.plan->ranks[source].n_pieces > 0;
}

/* Of one rank: what its word holds, if something stands in it. */
static bool look_at(const pull *p, size_t peer, reader_lease *seen)
{
    const fanin_client *client = p->client;
    const path_state *path = path_taken(p->publication, peer);
    const cma_process *process = rank_process_of(client, peer);
    *seen = p->cache->last[peer];
    return path->path == FANIN_PATH_CUDA_IPC && path->hold && process &&
           seen->word != 0 &&
           seen->generation == connection_generation(client->peers[peer].control) &&
           cma_look(process, seen->word, &seen->epoch) && seen->epoch % 2 == 0;
}

/* Either what was read last stands on all of them, or something newer does. */
static bool look_at_all(const pull *p, bool *newer)
{
    const path_plan *plan = &p->cache->whole.plan;
    size_t read = 0, changed = 0;
    for (size_t i = 0; i < plan->n_sources; i++) {
        size_t peer = plan->peer_of[i];
        if (!is_read(p, i))
            continue;
        if (!look_at(p, peer, &p->seen[peer]))
            return false;
        read++;
        changed += p->seen[peer].epoch != p->cache->last[peer].epoch;
    }
    *newer = changed > 0;
    return read > 0 && (changed == 0 || changed == read);
}

/* Whether the step will probably do; of a newer one only that is known. */
static bool would_do(const pull *p, bool newer)
{
    const fanin_pull_options *o = p->options;
    uint64_t last = p->cache->last_step;
    switch (o->rule) {
    case FANIN_STEP_AT_LEAST:
        return newer || o->step <= last;
    case FANIN_STEP_EXACT:
        return newer ? o->step > last : o->step == last;
    default:
        return true;
    }
}

bool read_ahead_may(pull *p)
{
    plan_cache *cache = p->cache;
    const destination *d = p->destination;
    bool newer;
    if (!cache->last || p->open_only || d->need || d->landed)
        return false;
    if (cache->rest > 0) {
        cache->rest--;
        return false;
    }
    return look_at_all(p, &newer) && would_do(p, newer);
}

void read_ahead_begin(pull *p, read_phase phase)
{
    fanin_error why = FANIN_ERROR_INIT;
    p->ahead = phase;
    p->ahead.leases = p->seen; /* which say in what arena it lies */
    if (read_phase_begin(&p->ahead, &why) != FANIN_OK)
        log_write(&p->client->log, FANIN_LOG_DEBUG, "read-ahead", "not begun: %s",
                  why.message);
    else
        log_write(&p->client->log, FANIN_LOG_DEBUG, "read-ahead", "begun");
    p->ahead.leases = p->leases;
}

/* Of what is under way, whether the words held the leases' epochs when it was begun. */
static bool is_leased(const pull *p)
{
    const path_plan *plan = &p->cache->whole.plan;
    for (size_t i = 0; i < plan->n_sources; i++) {
        size_t peer = plan->peer_of[i];
        const reader_lease *lease = &p->leases[peer], *seen = &p->seen[peer];
        if (is_read(p, i) &&
            !(lease->held && lease->word == seen->word && lease->epoch == seen->epoch &&
              lease->first_region == seen->first_region &&
              lease->generation == seen->generation) &&
            CLIENT_RULE(CLIENT_RULE_AHEAD))
            return false;
    }
    return true;
}

read_phase *read_ahead_take(pull *p)
{
    if (p->ahead.phase && is_leased(p)) {
        p->cache->misses = 0;
        return &p->ahead;
    }
    read_ahead_drop(p);
    return NULL;
}

void read_ahead_drop(pull *p)
{
    if (!p->ahead.phase)
        return;
    plan_cache *cache = p->cache;
    log_write(&p->client->log, FANIN_LOG_DEBUG, "read-ahead",
              "dropped: it is not what was agreed upon, or not soon enough");
    read_phase_drop(&p->ahead);
    cache->misses += cache->misses < MOST_MISSES;
    cache->rest = (1U << cache->misses) - 1;
}

fanin_status read_ahead_gone(pull *p, fanin_error *error)
{
    error_place place = {.phase = "read",
                         .key = p->publication->name,
                         .remedy =
                             "look at the device (nvidia-smi, dmesg), and restart "
                             "this process"};
    if (!p->destination->leak)
        return FANIN_OK;
    return error_set(error, FANIN_ERR_TRANSPORT, &place,
                     "a device does not end copies that were begun");
}

void read_ahead_learn(pull *p)
{
    const path_plan *plan = &p->cache->whole.plan;
    plan_cache *cache = p->cache;
    size_t n = p->client->n_peers;
    bool all = true;
    for (size_t i = 0; i < plan->n_sources; i++) {
        size_t peer = plan->peer_of[i];
        all = all && (!is_read(p, i) ||
                      (p->leases[peer].word != 0 &&
                       path_taken(p->publication, peer)->path == FANIN_PATH_CUDA_IPC));
    }
    if (all && !cache->last)
        cache->last = calloc(n, sizeof *cache->last);
    if (!all || !cache->last)
        return;
    memcpy(cache->last, p->leases, n * sizeof *cache->last);
    cache->last_step = p->identity.step;
}
