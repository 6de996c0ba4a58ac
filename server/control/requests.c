/* SPDX-License-Identifier: Apache-2.0 */
#include "control/requests.h"
#include "control/open_path.h"
#include "control/relays.h"
#include "control/session.h"
#include "core/rules.h"
#include "error_set.h"
#include "guests/peer.h"
#include "publish/patches.h"
#include "publish/publication.h"
#include "shards/arena.h"
#include "stream/stream.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Of max_memory what is kept for parts may have one, as chunks of pinned memory may: of what
   strangers may have. */
#define PARTS_SHARE 4

/* ------------------------------------------------------------------- list */

static void fill_entry(const session *s, msg_list_entry *e, const publication *p)
{
    patch_offers patches;
    memset(e, 0, sizeof *e);
    memcpy(e->publication, p->name, sizeof p->name);
    e->step = p->step;
    e->epoch = p->epoch;
    e->state = state_for(s, p->state);
    e->state_age_ms = age_ms(p->entered_at);
    e->taken_back = publication_last_taken_back(p);
    if (p->has_step)
        e->commit_age_ms = age_ms(p->committed_at);
    if (!p->catalog)
        return;
    e->catalog_version = p->catalog->version;
    e->tensors = p->catalog->n_keys;
    e->bytes = p->catalog->bytes;
    memcpy(e->key_digest, p->catalog->key_digest.bytes, sizeof e->key_digest);
    patches_tell(p, &patches);
    e->patches = patches.count;
    if (patches.count > 0)
        e->patch_bytes = patches.directory_bytes + patches.patches[0].bytes;
}

fanin_status handle_list(session *s, uint64_t request, body *in)
{
    fanin_server *server = s->control->server;
    char name[80];
    fanin_status status = decode_list(in, name);
    if (status != FANIN_OK)
        return status;
    pthread_mutex_lock(&server->lock);
    msg_list_entry *entries = calloc(server->n_publications + 1, sizeof *entries);
    uint32_t count = 0;
    for (size_t i = 0; entries && i < server->n_publications; i++) {
        const publication *p = server->publications[i];
        if (p->present && (!name[0] || strcmp(p->name, name) == 0))
            fill_entry(s, &entries[count++], p);
    }
    pthread_mutex_unlock(&server->lock);
    if (entries)
        encode_list_ok(&s->out.bytes, request, entries, count);
    else
        reply_fault(s, request, FANIN_ERR_MEMORY, "the server is out of memory");
    free(entries);
    return FANIN_OK;
}

/* ---------------------------------------------------------------- catalogs */

/* The catalog that a request names, with a reference, or NULL and why. */
static shard_catalog *find_catalog(fanin_server *server, message_type type,
                                   const msg_blob_request *m, fanin_error *error)
{
    shard_catalog *found = NULL;
    pthread_mutex_lock(&server->lock);
    if (type == MSG_KEYS) {
        for (size_t i = 0; i < server->n_publications && !found; i++) {
            shard_catalog *c = server->publications[i]->catalog;
            if (c && memcmp(c->key_digest.bytes, m->digest, DIGEST_SIZE) == 0)
                found = c;
        }
    } else {
        publication *p = find_present(server, m->publication);
        if (!p)
            describe_missing(server, m->publication, error);
        else if (p->catalog && p->catalog->version == m->catalog_version)
            found = p->catalog;
    }
    if (found)
        shard_catalog_retain(found);
    else if (error->status == FANIN_OK)
        error_set(error, FANIN_ERR_STALE, NULL, "the catalog has changed");
    pthread_mutex_unlock(&server->lock);
    return found;
}

static void reply_page(session *s, uint64_t request, message_type type,
                       const buffer *blob, uint64_t offset)
{
    msg_blob_page page = {.total = blob->size, .offset = offset};
    if (offset > blob->size || (offset == blob->size && offset > 0)) {
        reply_fault(s, request, FANIN_ERR_ARGUMENT,
                    "the page is beyond the table's end");
        return;
    }
    page.data.data = blob->data ? blob->data + offset : (const uint8_t *)"";
    page.data.size =
        blob->size - offset < LIMIT_PAGE ? blob->size - offset : LIMIT_PAGE;
    encode_blob_page(&s->out.bytes, request, type, &page);
}

/* Of all keys, or of those that are asked for. */
static fanin_status reply_boxes(session *s, uint64_t request, shard_catalog *catalog,
                                const msg_blob_request *m, body *in)
{
    fanin_server *server = s->control->server;
    const part_room room = {
        {{&server->parts, server->max_memory / PARTS_SHARE},
         {&server->memory, server->max_memory},
         {&server->network_memory,
          s->from->is_own ? UINT64_MAX : memory_of_network(server)}},
        s->from->is_own};
    const buffer *blob = &catalog->boxes_blob;
    fanin_status status = FANIN_OK;
    if (m->keys.size > 0)
        status = shard_catalog_part(catalog, m->keys, room, &blob, &in->why);
    if (status == FANIN_OK)
        reply_page(s, request, MSG_BOXES_OK, blob, m->offset);
    return status;
}

fanin_status handle_blob(session *s, uint64_t request, message_type type, body *in)
{
    fanin_server *server = s->control->server;
    fanin_error error = FANIN_ERROR_INIT;
    msg_blob_request m;
    fanin_status status = decode_blob_request(in, type, &m);
    if (status != FANIN_OK)
        return status;
    /* A buffer grows by doubling; requests before this one may have made it grow already. */
    (void)session_account(s);
    size_t grown = 2 * (s->out.bytes.size + LIMIT_REPLY);
    if (grown > s->out.bytes.capacity &&
        !memory_fits(server, s->from, grown - s->out.bytes.capacity)) {
        reply_fault(s, request, FANIN_ERR_LIMIT,
                    "the server's connections have all the memory they may");
        return FANIN_OK;
    }
    shard_catalog *catalog = find_catalog(server, type, &m, &error);
    if (!catalog) {
        reply_error(s, request, &error);
        return FANIN_OK;
    }
    buffer regions = {0};
    if (type == MSG_KEYS)
        reply_page(s, request, MSG_KEYS_OK, &catalog->keys_blob, m.offset);
    else if (type == MSG_BOXES)
        status = reply_boxes(s, request, catalog, &m, in);
    else if (encode_regions(s, catalog, &m, &regions, &error) == FANIN_OK)
        reply_page(s, request, MSG_REGIONS_OK, &regions, m.offset);
    else
        reply_error(s, request, &error);
    buffer_free(&regions);
    catalog_retire(server, catalog);
    return status;
}

/* ------------------------------------------------------------- begin, end */

/* Why a begin is refused, NULL: it is not. Lock held. */
static const char *refusal(const fanin_server *server, const publication *p,
                           const msg_begin *m)
{
    if (server->stopping)
        return SHUTTING_DOWN;
    if (p->state == STATE_DRAINING && RULE(RULE_REFUSAL))
        return "busy: an update is about to begin";
    if (p->state != STATE_STABLE && p->state != STATE_DRAINING)
        return p->has_step ? "the weights are being rewritten"
                           : "nothing has been committed yet";
    if (p->step != m->step && RULE(RULE_STEP))
        return "it is at another step";
    if (p->catalog->version != m->catalog_version && RULE(RULE_CATALOG))
        return "its catalog has changed";
    /* Filling the published arena is what commits never do: a second guard. */
    if (p->catalog->plan && p->filling == p->catalog->plan->arenas &&
        p->filling_arena == p->arena && RULE(RULE_ARENA_BEGIN))
        return "the snapshot is being rewritten";
    return NULL;
}

void answer_begin(session *s, publication *p, uint64_t request, const msg_begin *m,
                  msg_begin_ok *reply, fanin_error *error)
{
    fanin_server *server = s->control->server;
    if (publication_is_away(p) && !server->stopping) {
        describe_paused(p->name, p->reason, error);
        return;
    }
    const char *why = refusal(server, p, m);
    if (why) {
        reply->state = state_for(s, p->state);
        reply->step = p->step;
        reply->catalog_version = p->catalog ? p->catalog->version : 0;
        snprintf(reply->why, sizeof reply->why, "%s", why);
        return;
    }
    lease *l = lease_grant(server, s->reader, p, request);
    if (!l) {
        error_set(error, FANIN_ERR_LIMIT, NULL, "a session may have %d leases",
                  SESSION_LEASES);
        return;
    }
    reply->granted = true;
    memcpy(reply->token, l->token, sizeof reply->token);
    reply->epoch = l->epoch;
    reply->lease_ms = server->lease_ms;
    reply->first_region = l->first_region;
    server->stats.begins_granted++;
}

fanin_status handle_begin(session *s, uint64_t request, body *in)
{
    fanin_server *server = s->control->server;
    fanin_error error = FANIN_ERROR_INIT;
    msg_begin m;
    fanin_status status = decode_begin(in, &m);
    if (status != FANIN_OK)
        return status;
    msg_begin_ok reply = {0};
    pthread_mutex_lock(&server->lock);
    publication *p = find_present(server, m.publication);
    if (p) {
        answer_begin(s, p, request, &m, &reply, &error);
        server->stats.begins_refused += !reply.granted;
    } else {
        describe_missing(server, m.publication, &error);
    }
    pthread_mutex_unlock(&server->lock);
    if (error.status != FANIN_OK)
        reply_error(s, request, &error);
    else
        encode_begin_ok(&s->out.bytes, request, &reply);
    return FANIN_OK;
}

fanin_status handle_end(session *s, uint64_t request, body *in)
{
    fanin_server *server = s->control->server;
    msg_end m;
    fanin_status status = decode_end(in, &m);
    if (status != FANIN_OK)
        return status;
    msg_end_ok reply = {0};
    fanin_error failed = FANIN_ERROR_INIT;
    pthread_mutex_lock(&server->lock);
    /* A lease that is there has a standing epoch: the turn of the epoch removes it. */
    lease *l =
        m.begin ? lease_find_begun(s->reader, m.begin) : lease_find(s->reader, m.token);
    const publication *p = l ? l->of : lease_find_void(s->reader, m.token);
    reply.good = l || !RULE(RULE_END_CHECK);
    if (!l && lease_failed(s->reader, m.token))
        error_copy(&failed, lease_failed(s->reader, m.token));
    reply.step = p ? p->step : 0;
    bool confirms = m.keep && !m.abandon, counts = !m.keep && !m.abandon;
    if (l && counts)
        count_one_sided(s, l, &m);
    if (l && !confirms)
        lease_drop(server, l);
    if (p && counts) {
        server->stats.pulls_good += reply.good;
        server->stats.pulls_stale += !reply.good;
    }
    pthread_mutex_unlock(&server->lock);
    parked_stir(s); /* who asks under this lease hears that it is gone */
    if (failed.status != FANIN_OK && !m.quiet && !m.abandon)
        reply_error(s, request, &failed);
    else if (!m.quiet)
        encode_end_ok(&s->out.bytes, request, &reply);
    return FANIN_OK;
}

/* ------------------------------------------------------------------- stats */

#define LEASES_LOOKED_AT                                                               \
    1024 /* of a publication, the oldest: the lock is held meanwhile */

typedef struct tale {
    msg_stats_ok m;
    stats_entry entries[LIMIT_STATS];
    stats_holder holders[LIMIT_STATS];
    stats_relay relays[LIMIT_STATS];
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
    e->bytes = p->catalog ? p->catalog->bytes : 0;
    e->bytes_left = p->bytes_left;
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
        if (!may_know_who(s))
            continue;
        add_holders(server, t, p);
        t->m.n_told_relays = offers_tell(s->control, p->name, t->m.n_entries - 1,
                                         t->relays, t->m.n_told_relays);
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
    t->m.told_relays = t->relays;
    pthread_mutex_lock(&server->lock);
    tell(s, t, name);
    pthread_mutex_unlock(&server->lock);
    encode_stats_ok(&s->out.bytes, request, &t->m);
    free(t);
    return FANIN_OK;
}
