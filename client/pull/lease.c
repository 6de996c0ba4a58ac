/* SPDX-License-Identifier: Apache-2.0 */
#include "pull/lease.h"

#include "pull/lease_round.h"
#include "stream/stream_link.h"
#include <string.h>

/* ------------------------------------------------------------ early leases */

/* A source of the cached plan: READY, its tables those that the plan was made from, its path known.
   */
static bool at_hand(pull *p, size_t peer)
{
    const shard_table *tables = &p->publication->shards[peer];
    return peer_ready(&p->client->peers[peer]) && tables->version != 0 &&
           tables->generation == p->client->peers[peer].generation;
}

early_begin *early_lease_ask(pull *p)
{
    plan_cache *cache = p->cache;
    const path_plan *plan = &cache->whole.plan;
    size_t n = p->client->n_peers;
    memset(p->use, 0, n * sizeof *p->use);
    memset(p->versions, 0, n * sizeof *p->versions);
    p->early = (early_begin){.versions = p->versions, .leases = p->leases};
    if (!p->destination->quick || !cache->valid || !cache->proven)
        return NULL;
    for (size_t i = 0; i < plan->n_sources; i++) {
        size_t peer = plan->peer_of[i];
        p->use[peer] = true;
        if (!at_hand(p, peer))
            return NULL;
        if (plan->plan->ranks[i].n_pieces == 0)
            continue;
        if (!path_state_of(p->client, p->publication, peer)->path)
            return NULL;
        p->versions[peer] = p->publication->shards[peer].version;
    }
    return plan_cache_fits(cache, p->client, p->publication, p->use, p->destination)
               ? &p->early
               : NULL;
}

/* Whether its data connections, if it needs any, have not been lost meanwhile. */
static bool is_connected(const pull *p, size_t source)
{
    const path_plan *plan = &p->cache->whole.plan;
    size_t peer = plan->peer_of[source];
    return plan->plan->ranks[source].n_pieces == 0 ||
           !(p->options->verify || path_taken(p->publication, peer)->path->is_linked) ||
           stream_at_hand(p->client, peer);
}

/* Whether the plan is that of the ranks which are used, at what they announced, and no connection
   is to be waited for. */
static bool still_fits(const pull *p)
{
    const path_plan *plan = &p->cache->whole.plan;
    size_t used = 0;
    for (size_t i = 0; i < p->client->n_peers; i++)
        used += p->use[i];
    for (size_t i = 0; i < plan->n_sources; i++) {
        size_t peer = plan->peer_of[i];
        if (!p->use[peer] || !is_connected(p, i) ||
            p->announced[peer].version != p->publication->shards[peer].version)
            return false;
    }
    return used == plan->n_sources;
}

void early_lease_keep(pull *p)
{
    if (p->early.since_ns == 0 || still_fits(p))
        return;
    lease_round_abandon(p->client, p->leases);
    p->early.since_ns = 0;
}

/* Whether there are any. Those that are too old are given back. */
static bool early_lease_holds(pull *p)
{
    uint64_t since = p->early.since_ns;
    if (since == 0 || clock_ns() - since < EARLY_MS * UINT64_C(1000000))
        return since != 0;
    lease_round_abandon(p->client, p->leases);
    return false;
}

/* ------------------------------------------------------------- begin, end */

/* Nothing slow happens under a lease but reads; only parts are not known before they are read. */
fanin_status pull_begin(pull *p, fanin_error *error)
{
    uint64_t asked_ns = early_lease_holds(p) ? p->early.since_ns : clock_ns();
    fanin_status status = lease_round_begin(p->client, p->publication, p->announced,
                                            p->needed, p->leases, p->at, error);
    if (status != FANIN_OK)
        return status;
    path_end_ahead(&p->goal);
    p->leased_ns = asked_ns;
    p->cache->proven = true;
    p->lease_ms = 0;
    for (size_t i = 0; i < p->client->n_peers; i++)
        if (p->leases[i].held && p->leases[i].lease_ms > p->lease_ms)
            p->lease_ms = p->leases[i].lease_ms;
    p->state = p->session ? PULL_HELD : PULL_READ;
    return FANIN_OK;
}

fanin_status pull_end(pull *p, fanin_error *error)
{
    fanin_status status = lease_round_end(p->client, p->publication, p->announced,
                                          p->leases, p->result->served, p->at, error);
    if (status == FANIN_OK)
        p->state = PULL_PUBLISH;
    return status;
}
