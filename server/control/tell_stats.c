/* SPDX-License-Identifier: Apache-2.0 */
/* What a rank is at, for whoever looks at a run: the counters of stats.c, its publications, and who
   holds leases of them. */
#include "control/reply.h"
#include "control/requests.h"
#include "guests/peer_work.h"
#include "stream/stream.h"

#include <stdlib.h>
#include <string.h>

#define LEASES_LOOKED_AT                                                               \
    1024 /* of a publication, the oldest: the lock is held meanwhile */

typedef struct tale {
    msg_stats_ok m;
    stats_entry entries[LIMIT_STATS];
    stats_holder holders[LIMIT_STATS];
    const reader *readers[LIMIT_STATS]; /* of the holders */
} tale;

/* Who has a session of the own user, or has proven the secret, may know who the others are. */
static bool may_know_who(const session *s)
{
    return s->from->is_own || s->tls;
}

static uint64_t lease_age_ms(const fanin_server *server, const lease *l)
{
    return age_ms(l->expires - (uint64_t)server->lease_ms * 1000000);
}

static void add_entry(const session *s, tale *t, const publication *p)
{
    stats_entry *e = &t->entries[t->m.n_entries++];
    memcpy(e->publication, p->name, sizeof p->name);
    e->state = state_for(s, p->state);
    e->step = p->step;
    e->state_age_ms = age_ms(p->entered_at);
    e->commit_age_ms = p->has_step ? age_ms(p->committed_at) : 0;
    e->update_age_ms =
        p->update_open || p->state == STATE_DRAINING ? age_ms(p->update_at) : 0;
    e->leases = p->n_leases;
    e->lease_age_ms = p->oldest ? lease_age_ms(s->control->server, p->oldest) : 0;
    e->pending = p->pending != NULL;
    if (p->paused)
        memcpy(e->reason, p->reason, sizeof e->reason);
}

/* The holder's entry of the publication that was added last; NULL: there are too many. */
static stats_holder *holder_of(tale *t, const reader *r)
{
    uint32_t last = t->m.n_entries - 1, i = t->m.n_holders;
    while (i > 0 && t->holders[i - 1].publication == last)
        if (t->readers[--i] == r)
            return &t->holders[i];
    if (t->m.n_holders == LIMIT_STATS)
        return NULL;
    t->readers[t->m.n_holders] = r;
    stats_holder *h = &t->holders[t->m.n_holders++];
    h->publication = last;
    h->held_up_ns = r->from->held_up_ns;
    memcpy(h->who, r->from->name, sizeof h->who);
    return h;
}

static void add_holders(const fanin_server *server, tale *t, const publication *p)
{
    unsigned looked = 0;
    for (const lease *l = p->oldest; l && looked < LEASES_LOOKED_AT; l = l->newer) {
        stats_holder *h = holder_of(t, l->holder);
        looked++;
        if (!h)
            continue;
        if (h->leases++ == 0)
            h->age_ms = lease_age_ms(server, l);
    }
}

static void add_counters(const fanin_server *server, msg_stats_ok *m)
{
    const fanin_server_stats *s = &server->stats;
#define COPY(key, name, ...) m->name = s->name;
    COUNTERS(COPY, COUNTER_NOT_SHOWN, COUNTER_NOT_SHOWN)
#undef COPY
    m->sessions = server->control_sessions;
    m->leases = server->n_leases;
    m->cpu_ns = thread_cpu_ns();
    m->data_cpu_ns = stream_cpu_ns(server);
    memcpy(m->drain_waits, s->drain_waits, sizeof m->drain_waits);
}

/* Lock held. */
static void tell(const session *s, tale *t, const char *name)
{
    const fanin_server *server = s->control->server;
    add_counters(server, &t->m);
    for (size_t i = 0; i < server->n_publications; i++) {
        const publication *p = server->publications[i];
        if (!p->present)
            continue;
        t->m.publications++;
        if (t->m.n_entries == LIMIT_STATS || (name[0] && strcmp(p->name, name) != 0))
            continue;
        add_entry(s, t, p);
        if (may_know_who(s))
            add_holders(server, t, p);
    }
}

fanin_status handle_stats(session *s, uint64_t request, body *in)
{
    fanin_server *server = s->control->server;
    char name[80];
    fanin_status status = decode_stats(in, name);
    if (status != FANIN_OK)
        return status;
    tale *t = calloc(1, sizeof *t);
    if (!t) {
        reply_fault(s, request, FANIN_ERR_MEMORY, "the server is out of memory");
        return FANIN_OK;
    }
    t->m.entries = t->entries;
    t->m.holders = t->holders;
    pthread_mutex_lock(&server->lock);
    tell(s, t, name);
    pthread_mutex_unlock(&server->lock);
    encode_stats_ok(&s->out.bytes, request, &t->m);
    free(t);
    return FANIN_OK;
}
