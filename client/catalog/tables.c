/* SPDX-License-Identifier: Apache-2.0 */
#include "catalog/tables.h"

#include "error_set.h"
#include "text.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Boxes from which threads decode tables: a box takes some 50 ns. */
#define THREADS_FROM 16384

/* ------------------------------------------------------------------ keeping */

publication *tables_of(fanin_client *client, const char *name)
{
    publication **at = &client->publications, *p;
    while (*at && strcmp((*at)->name, name) != 0)
        at = &(*at)->next;
    if ((p = *at)) {
        *at = p->next;
        p->next = client->publications;
        return client->publications = p;
    }
    p = calloc(1, sizeof *p);
    shard_table *shards = calloc(client->n_peers, sizeof *shards);
    if (!p || !shards) {
        free(p);
        free(shards);
        return NULL;
    }
    snprintf(p->name, sizeof p->name, "%s", name);
    p->shards = shards;
    p->n_peers = client->n_peers;
    p->next = client->publications;
    client->publications = p;
    return p;
}

static void drop_shard(shard_table *s)
{
    box_table_free(&s->boxes);
    *s = (shard_table){0};
}

void tables_forget(publication *p)
{
    for (size_t i = 0; i < p->n_peers; i++)
        drop_shard(&p->shards[i]); /* box tables point into the key table */
    key_table_free(&p->keys);
    key_set_free(&p->wanted);
    p->n_needs = 0;
}

void tables_free(publication **at)
{
    publication *p = *at;
    *at = p->next;
    tables_forget(p);
    free(p->shards);
    free(p);
}

/* -------------------------------------------------------------------- keys */

/* An error of a table that some rank sent. */
static fanin_status add_announced_rank(const peer *p, fanin_status status,
                                       fanin_error *error)
{
    if (!error || error->rank >= 0 || status == FANIN_ERR_MEMORY ||
        status == FANIN_ERR_CANCELLED)
        return status; /* known already, or not the rank's fault */
    fanin_error inner = FANIN_ERROR_INIT;
    error_copy(&inner, error);
    error_place place = connection_place(p->control, "catalog");
    place.key = inner.key;
    place.remedy = inner.remedy;
    return error_set(error, status, &place, "rank %u at %s: %s", p->control->peer.rank,
                     p->control->text, inner.message);
}

fanin_status tables_end_decoding(const client_work *work, const peer *p,
                                 fanin_status status, fanin_error *error)
{
    return add_announced_rank(p, client_work_end(work, status, error), error);
}

/* Says what two ranks' entries of one key differ in. */
static bool entries_differ(const key_entry *x, uint32_t rank_x, const key_entry *y,
                           uint32_t rank_y, const error_place *place,
                           fanin_error *error)
{
    char shapes[400];
    text both = text_in(shapes, sizeof shapes);
    if (x->dtype != y->dtype) {
        (void)error_set(error, FANIN_ERR_MISMATCH, place,
                        "the key is %s on rank %u but %s on rank %u",
                        fanin_dtype_name(x->dtype), rank_x, fanin_dtype_name(y->dtype),
                        rank_y);
        return true;
    }
    if (x->n_dims == y->n_dims &&
        memcmp(x->shape, y->shape, x->n_dims * sizeof *x->shape) == 0)
        return false;
    text_add_shape(&both, x->shape, x->n_dims);
    text_add(&both, " and ");
    text_add_shape(&both, y->shape, y->n_dims);
    (void)error_set(error, FANIN_ERR_MISMATCH, place,
                    "ranks %u and %u give the key different global shapes: %s", rank_x,
                    rank_y, shapes);
    return true;
}

/* Says what the key tables of two ranks that announce different digests differ in. */
static fanin_status explain_difference(const fanin_client *client, const key_table *a,
                                       size_t peer_a, const key_table *b, size_t peer_b,
                                       fanin_error *error)
{
    uint32_t rank_a = client->peers[peer_a].control->peer.rank;
    uint32_t rank_b = client->peers[peer_b].control->peer.rank;
    error_place place = connection_place(client->peers[peer_b].control, "catalog");
    place.remedy =
        "every rank must put every key (an empty shard where it holds nothing) "
        "and the same metadata";
    uint32_t i = 0, j = 0;
    while (i < a->count || j < b->count) {
        int order = i == a->count   ? 1
                    : j == b->count ? -1
                                    : strcmp(a->entries[i].name, b->entries[j].name);
        const key_entry *x = &a->entries[i], *y = &b->entries[j];
        place.key = order <= 0 ? x->name : y->name;
        if (order != 0)
            return error_set(error, FANIN_ERR_MISMATCH, &place,
                             "the key is on rank %u but not on rank %u",
                             order < 0 ? rank_a : rank_b, order < 0 ? rank_b : rank_a);
        if (entries_differ(x, rank_a, y, rank_b, &place, error))
            return FANIN_ERR_MISMATCH;
        i++;
        j++;
    }
    place.key = NULL;
    for (i = 0; i < a->n_pairs && i < b->n_pairs; i++) {
        if (strcmp(a->pairs[i].key, b->pairs[i].key) != 0 ||
            strcmp(a->pairs[i].value, b->pairs[i].value) != 0)
            break;
    }
    const char *name = i < a->n_pairs   ? a->pairs[i].key
                       : i < b->n_pairs ? b->pairs[i].key
                                        : "?";
    return error_set(error, FANIN_ERR_MISMATCH, &place,
                     "ranks %u and %u have different metadata (at \"%s\")", rank_a,
                     rank_b, name);
}

static fanin_status get_key_table(fanin_client *client, const publication *p,
                                  size_t index, const digest *id, client_work *work,
                                  key_table **out, fanin_error *error)
{
    fetch f = {.peer = index, .type = MSG_KEYS};
    memcpy(f.request.digest, id->bytes, sizeof f.request.digest);
    snprintf(f.request.publication, sizeof f.request.publication, "%s", p->name);
    fanin_status status = fetch_all(client, &f, 1, work->at, error);
    if (status != FANIN_OK) {
        fetch_free(&f, 1);
        return status;
    }
    digest got = digest_of(f.data.data, f.data.size);
    error_place place = connection_place(client->peers[index].control, "catalog");
    if (!digest_equal(&got, id))
        status =
            error_set(error, FANIN_ERR_PROTOCOL, &place,
                      "rank %u at %s sent a key table that is not the announced one",
                      client->peers[index].control->peer.rank,
                      client->peers[index].control->text);
    else if ((status = key_table_decode(f.data.data, f.data.size, &work->stop, out,
                                        error)) != FANIN_OK)
        status = tables_end_decoding(work, &client->peers[index], status, error);
    fetch_free(&f, 1);
    return status;
}

/* The first peer from @p turn on that is used and, if @p other is given, announces another key
   table than that; none: n_peers. */
static size_t find_table_peer(const fanin_client *client, const announcement *announced,
                              const bool *use, size_t turn, const digest *other)
{
    size_t n = client->n_peers;
    for (size_t i = 0; i < n; i++) {
        size_t at = (turn + i) % n;
        if (use[at] && !(other && digest_equal(&announced[at].keys, other)))
            return at;
    }
    return n;
}

static fanin_status refuse_difference(fanin_client *client, const publication *p,
                                      const announcement *announced, size_t first,
                                      size_t odd, client_work *work, fanin_error *error)
{
    key_table *a = NULL, *b = NULL;
    fanin_status status =
        get_key_table(client, p, first, &announced[first].keys, work, &a, error);
    if (status == FANIN_OK)
        status = get_key_table(client, p, odd, &announced[odd].keys, work, &b, error);
    if (status == FANIN_OK)
        status = explain_difference(client, a, first, b, odd, error);
    key_table_free(&a);
    key_table_free(&b);
    return status;
}

static fanin_status sync_keys(fanin_client *client, publication *p,
                              const announcement *announced, const bool *use,
                              client_work *work, fanin_error *error)
{
    size_t n = client->n_peers,
           first = find_table_peer(client, announced, use, 0, NULL);
    if (first == n)
        return FANIN_OK;
    const digest *id = &announced[first].keys;
    size_t odd = find_table_peer(client, announced, use, 0, id);
    if (odd < n)
        return refuse_difference(client, p, announced, first, odd, work, error);
    if (p->keys && digest_equal(&p->keys->id, id))
        return FANIN_OK;
    /* Of another rank for each client of a fleet, which all come at once. */
    size_t turn = (size_t)(client->plan_seed % n);
    key_table *fresh = NULL;
    fanin_status status =
        get_key_table(client, p, find_table_peer(client, announced, use, turn, NULL),
                      id, work, &fresh, error);
    if (status != FANIN_OK)
        return status;
    tables_forget(p);
    p->keys = fresh;
    return FANIN_OK;
}

/* ------------------------------------------------------------ what is wanted */

static digest name_all(void *cookie)
{
    (void)cookie;
    return (digest){0};
}

static void mark_all(void *cookie, const key_table *keys, bool *marks)
{
    (void)cookie;
    memset(marks, true, keys->count * sizeof *marks);
}

const key_need need_all = {.name = name_all, .mark = mark_all};

bool tables_at_hand(const publication *p, size_t peer)
{
    const shard_table *s = &p->shards[peer];
    return s->boxes && box_table_has(s->boxes, &p->wanted);
}

static bool want_all(publication *p)
{
    key_set_free(&p->wanted);
    return key_set_add(&p->wanted, 0, p->keys->count);
}

static bool wants_all(const publication *p)
{
    return key_set_count(&p->wanted) == p->keys->count;
}

static bool need_is_known(const publication *p, const digest *name)
{
    size_t known = p->n_needs < NEEDS_KNOWN ? p->n_needs : NEEDS_KNOWN;
    for (size_t i = 0; i < known; i++)
        if (digest_equal(&p->needs[i], name))
            return true;
    return false;
}

/* Adds what the need marks; a little less than all is all. */
static bool want_more(publication *p, const key_need *need)
{
    uint32_t n = p->keys->count;
    bool *marks = calloc(n, sizeof *marks);
    key_set more = {0}, both = {0};
    bool ok = marks != NULL;
    if (ok)
        need->mark(need->cookie, p->keys, marks);
    ok = ok && key_set_of_marks(marks, n, &more) &&
         key_set_join(&p->wanted, &more, &both);
    if (ok) {
        key_set_free(&p->wanted);
        p->wanted = both;
        ok = key_set_count(&both) <= n - n / 4 || want_all(p);
    }
    key_set_free(&more);
    free(marks);
    return ok;
}

static fanin_status sync_wanted(publication *p, fanin_error *error)
{
    bool first = p->wanted.n == 0, ok = true;
    if (p->keys->count == 0 || (!first && (!p->need || wants_all(p))))
        return FANIN_OK;
    if (p->keys->count < PARTS_FROM || !p->need) {
        ok = want_all(p);
    } else {
        digest name = p->need->name(p->need->cookie);
        if (need_is_known(p, &name))
            return FANIN_OK;
        ok = want_more(p, p->need);
        if (ok)
            p->needs[p->n_needs++ % NEEDS_KNOWN] = name;
    }
    return ok ? FANIN_OK : error_set_memory(error);
}

/* ------------------------------------------------------------------- boxes */

/* The boxes that came, which may be of all keys, whatever was asked for. */
static fanin_status take_table(shard_table *s, fetch *f, box_table *boxes,
                               fanin_error *error)
{
    static const error_place place = {.phase = "catalog"};
    key_set keys;
    fanin_status status = FANIN_OK;
    if (!box_table_keys(boxes, &keys)) {
        box_table_free(&boxes);
        return error_set_memory(error);
    }
    bool fits = box_table_is_whole(boxes) || key_set_equal(&keys, &f->keys);
    if (!fits) {
        box_table_free(&boxes);
        status = error_set(error, FANIN_ERR_PROTOCOL, &place,
                           "boxes of other keys than those asked for");
    } else if (s->boxes && !box_table_is_whole(boxes)) {
        status = box_table_join(&s->boxes, boxes, error);
    } else {
        box_table_free(&s->boxes);
        s->boxes = boxes;
    }
    key_set_free(&keys);
    return status;
}

/* The tables of the ranks that were asked, each decoded by a worker thread while others come. */
typedef struct box_fetches {
    workers *decoders;
    const key_table *keys;
    fetch *fetches;
    box_table **boxes; /* one a fetch; NULL: not decoded, or taken */
    size_t n;
} box_fetches;

static fanin_status decode_boxes(void *cookie, size_t part, work_stop *stop,
                                 fanin_error *error)
{
    const box_fetches *b = cookie;
    const buffer *data = &b->fetches[part].data;
    return box_table_decode(data->data, data->size, b->keys, stop, &b->boxes[part],
                            error);
}

static void decode_fetched(void *cookie, fetch *f)
{
    const box_fetches *b = cookie;
    workers_begin(b->decoders, (size_t)(f - b->fetches));
}

/* Those that could be decoded. */
static fanin_status take_boxes(fanin_client *client, publication *p,
                               const announcement *announced, const box_fetches *b,
                               fanin_error *error)
{
    for (size_t i = 0; i < b->n; i++) {
        fetch *f = &b->fetches[i];
        shard_table *s = &p->shards[f->peer];
        box_table *boxes = b->boxes[i];
        b->boxes[i] = NULL;
        if (!boxes) {
            drop_shard(s);
            continue;
        }
        fanin_status status = take_table(s, f, boxes, error);
        if (status != FANIN_OK) {
            drop_shard(s);
            return add_announced_rank(&client->peers[f->peer], status, error);
        }
        s->generation = client->peers[f->peer].generation;
        s->version = announced[f->peer].version;
        s->serial = ++p->serials;
        buffer_free(&f->data);
    }
    return FANIN_OK;
}

static fanin_status fetch_boxes(fanin_client *client, publication *p,
                                const announcement *announced, box_fetches *b,
                                deadline at, fanin_error *error)
{
    size_t failed = 0;
    bool worth = b->n > 1 && (uint64_t)key_set_count(&p->wanted) * b->n >= THREADS_FROM;
    b->decoders = workers_open(client, at, b->n, worth, decode_boxes, b);
    if (!b->decoders)
        return error_set_memory(error);
    for (size_t i = 0; i < b->n; i++) {
        b->fetches[i].here = decode_fetched;
        b->fetches[i].cookie = b;
    }
    fanin_status status = fetch_all(client, b->fetches, b->n, at, error);
    if (status == FANIN_OK && p->need && p->need->meanwhile)
        p->need->meanwhile(p->need->cookie, p->keys);
    if (status == FANIN_OK) {
        status = workers_finish(b->decoders, &failed, error);
        if (status != FANIN_OK)
            status = add_announced_rank(&client->peers[b->fetches[failed].peer], status,
                                        error);
        fanin_status taken =
            take_boxes(client, p, announced, b, status == FANIN_OK ? error : NULL);
        status = status == FANIN_OK ? taken : status;
    }
    workers_close(&b->decoders); /* before anything goes that its threads may look at */
    return status;
}

/* What of the wanted keys is to be fetched of a peer whose table is as old as that. */
static fanin_status ask_for_tables(const publication *p, shard_table *s, bool current,
                                   fetch *f, fanin_error *error)
{
    if (!current)
        drop_shard(s);
    if (wants_all(p))
        return FANIN_OK;
    key_set known = {0}, none = {0};
    bool ok = (!s->boxes || box_table_keys(s->boxes, &known)) &&
              key_set_less(&p->wanted, &known, &f->keys);
    key_set_free(&known);
    if (ok && f->keys.n > LIMIT_KEY_RANGES) {
        /* With its gaps filled it might have keys that are known, which are not joined. */
        drop_shard(s);
        key_set_free(&f->keys);
        ok = key_set_less(&p->wanted, &none, &f->keys);
        key_set_coarsen(&f->keys, LIMIT_KEY_RANGES);
    }
    key_set_encode(&f->ranges, &f->keys);
    f->request.keys = (bytes_view){f->ranges.data, f->ranges.size};
    return ok && !f->ranges.failed ? FANIN_OK : error_set_memory(error);
}

/* Requests for what is not there. */
static fanin_status list_fetches(const fanin_client *client, publication *p,
                                 const announcement *announced, const bool *use,
                                 fetch *fetches, size_t *n, fanin_error *error)
{
    fanin_status status = FANIN_OK;
    for (size_t i = 0; i < client->n_peers && status == FANIN_OK; i++) {
        shard_table *s = &p->shards[i];
        bool current = s->boxes && s->generation == client->peers[i].generation &&
                       s->version == announced[i].version;
        if (!use[i] || (current && tables_at_hand(p, i)))
            continue;
        fetch *f = &fetches[(*n)++];
        *f = (fetch){.peer = i, .type = MSG_BOXES};
        snprintf(f->request.publication, sizeof f->request.publication, "%s", p->name);
        f->request.catalog_version = announced[i].version;
        status = ask_for_tables(p, s, current, f, error);
    }
    return status;
}

fanin_status tables_sync(fanin_client *client, publication *p,
                         const announcement *announced, const bool *use, deadline at,
                         fanin_error *error)
{
    client_work work;
    client_work_start(&work, client, at);
    fanin_status status = sync_keys(client, p, announced, use, &work, error);
    if (status == FANIN_OK && p->keys)
        status = sync_wanted(p, error);
    if (status != FANIN_OK)
        return status;
    box_fetches b = {.keys = p->keys,
                     .fetches = calloc(client->n_peers, sizeof *b.fetches),
                     .boxes = calloc(client->n_peers, sizeof *b.boxes)};
    status = b.fetches && b.boxes
                 ? list_fetches(client, p, announced, use, b.fetches, &b.n, error)
                 : error_set_memory(error);
    if (status == FANIN_OK && b.n > 0)
        status = fetch_boxes(client, p, announced, &b, at, error);
    for (size_t i = 0; i < b.n; i++)
        box_table_free(&b.boxes[i]);
    fetch_free(b.fetches, b.n);
    free(b.fetches);
    free(b.boxes);
    return status;
}
