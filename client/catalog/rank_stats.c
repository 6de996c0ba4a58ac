/* SPDX-License-Identifier: Apache-2.0 */
/* What ranks are at: their answers as the caller sees them. */
#include "catalog/survey.h"
#include "error_set.h"

#include <stdlib.h>

/* The caller gets pointers, so that structs may grow. */
typedef struct told {
    fanin_rank_stats stats;
    fanin_publication_stats entries[LIMIT_STATS];
    fanin_lease_holder holders[LIMIT_STATS];
    const fanin_publication_stats *entry_at[LIMIT_STATS];
    const fanin_lease_holder *holder_at[LIMIT_STATS];
} told;

static void copy_counters(fanin_rank_stats *out, const msg_stats_ok *m)
{
    out->pulls_good = m->pulls_good;
    out->pulls_stale = m->pulls_stale;
    out->pulls_abandoned = m->pulls_abandoned;
    out->begins_granted = m->begins_granted;
    out->begins_refused = m->begins_refused;
    out->updates = m->updates;
    out->commits = m->commits;
    out->sessions = m->sessions;
    out->leases = m->leases;
    out->bytes_streamed = m->bytes_streamed;
    out->drain_wait_ns_max = m->drain_wait_ns_max;
    out->publications = m->publications;
    out->drain_wait_ns_total = m->drain_wait_ns_total;
    out->cpu_ns = m->cpu_ns;
    out->sends_waiting = m->sends_waiting;
    out->bytes_tls = m->bytes_tls;
    out->bytes_cma = m->bytes_cma;
    out->bytes_rdma = m->bytes_rdma;
    out->bytes_cuda_ipc = m->bytes_cuda_ipc;
    out->data_cpu_ns = m->data_cpu_ns;
    for (size_t i = 0; i < FANIN_DRAIN_BUCKETS; i++)
        out->drain_waits[i] = m->drain_waits[i];
}

static void take_stats(told *t, const msg_stats_ok *m)
{
    t->stats.counted = true;
    copy_counters(&t->stats, m);
    for (uint32_t i = 0; i < m->n_entries; i++) {
        const stats_entry *e = &m->entries[i];
        t->entries[i] = (fanin_publication_stats){.struct_size = sizeof t->entries[i],
                                                  .name = e->publication,
                                                  .state = e->state,
                                                  .step = e->step,
                                                  .state_age_ms = e->state_age_ms,
                                                  .commit_age_ms = e->commit_age_ms,
                                                  .update_age_ms = e->update_age_ms,
                                                  .leases = e->leases,
                                                  .lease_age_ms = e->lease_age_ms,
                                                  .pending = e->pending,
                                                  .reason = e->reason};
    }
    for (uint32_t i = 0; i < m->n_holders; i++) {
        const stats_holder *h = &m->holders[i];
        t->holders[i] =
            (fanin_lease_holder){.struct_size = sizeof t->holders[i],
                                 .publication = m->entries[h->publication].publication,
                                 .who = h->who,
                                 .leases = h->leases,
                                 .age_ms = h->age_ms,
                                 .held_up_ns = h->held_up_ns};
    }
    t->stats.n_entries = m->n_entries;
    t->stats.n_holders = m->n_holders;
}

static void take_list(told *t, const answer *a)
{
    t->stats.publications = a->count;
    for (uint32_t i = 0; i < a->count && i < LIMIT_STATS; i++) {
        const msg_list_entry *e = &a->entries[i];
        t->entries[t->stats.n_entries++] =
            (fanin_publication_stats){.struct_size = sizeof *t->entries,
                                      .name = e->publication,
                                      .state = e->state,
                                      .step = e->step,
                                      .state_age_ms = e->state_age_ms,
                                      .commit_age_ms = e->commit_age_ms,
                                      .reason = ""};
    }
}

static const fanin_rank_stats *make(told *t, const answer *a)
{
    t->stats = (fanin_rank_stats){.struct_size = sizeof t->stats,
                                  .rtt_ns = a->answered_ns - a->asked_ns,
                                  .entries = t->entry_at,
                                  .holders = t->holder_at};
    if (a->entries)
        take_list(t, a);
    else
        take_stats(t, &a->stats);
    for (size_t i = 0; i < LIMIT_STATS; i++) {
        t->entry_at[i] = &t->entries[i];
        t->holder_at[i] = &t->holders[i];
    }
    return &t->stats;
}

fanin_status fanin_client_stats(fanin_client *client, const char *publication,
                                uint32_t timeout_ms, fanin_stats_fn fn, void *cookie,
                                fanin_error *error)
{
    fanin_status status = client_check_told(client, fn, error);
    if (status != FANIN_OK)
        return status;
    told *t = calloc(1, sizeof *t);
    if (!t)
        return error_set_memory(error);
    survey s = {.client = client,
                .type = MSG_STATS,
                .publication = publication,
                .at = deadline_in_ms(timeout_ms)};
    status = survey_take(&s, error);
    /* Ranks that do not belong together, or do not answer, are told all the same. */
    bool more =
        s.answers && status != FANIN_ERR_CANCELLED && status != FANIN_ERR_MEMORY;
    for (size_t i = 0; i < client->n_peers && more; i++) {
        fanin_rank_info info = rank_describe(&client->peers[i]);
        more =
            fn(cookie, &info, survey_answered(&s, i) ? make(t, &s.answers[i]) : NULL);
    }
    survey_finish(&s);
    free(t);
    return status;
}
