/* SPDX-License-Identifier: Apache-2.0 */
/* Looking at trainers: ranks, publications, tensors and their owners, metadata, pings. */
#include "agree.h"
#include "dtype.h"
#include "error_set.h"
#include "peft_config.h"
#include "pull.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* -------------------------------------------------------------------- ranks */

static fanin_rank_info describe(const peer *p)
{
    const msg_hello_ok *hello = connection_peer(p->control);
    bool known = connection_known(p->control), ready = peer_ready(p);
    const fanin_error *fault = connection_fault(p->control);
    fanin_rank_info info = {
        .struct_size = sizeof(info),
        .rank = known ? (int32_t)hello->rank : -1,
        .world_size = known ? hello->world_size : 0,
        .address = connection_text(p->control),
        .server_name = hello->server_name,
        .software = hello->software,
        .ucx_version = hello->ucx_version,
        .status = ready ? FANIN_OK : fault->status,
        .message = ready ? "" : fault->message,
    };
    memcpy(info.world_id, hello->world_id, sizeof(info.world_id));
    memcpy(info.incarnation, hello->incarnation, sizeof(info.incarnation));
    return info;
}

fanin_status fanin_client_ranks(fanin_client *client, fanin_rank_fn fn, void *cookie,
                                fanin_error *error)
{
    fanin_status status = client_check_connected(client, error);
    for (size_t i = 0; status == FANIN_OK && i < client->n_peers; i++) {
        fanin_rank_info info = describe(&client->peers[i]);
        if (!fn(cookie, &info))
            break;
    }
    return status;
}

/* ---------------------------------------------------- one request, all ranks */

typedef struct question {
    size_t *left;
    fanin_status status;
    fanin_error error;
    uint64_t asked_ns, answered_ns;
    msg_list_entry *entries;
    uint32_t count;
} question;

static void on_listed(void *cookie, connection *c, message_type type, body *b)
{
    question *q = cookie;
    --*q->left;
    q->answered_ns = clock_ns();
    q->error = (fanin_error)FANIN_ERROR_INIT;
    fanin_status status = FANIN_ERR_PROTOCOL;
    if (type == MSG_LIST_OK)
        status = decode_list_ok(b, &q->entries, &q->count);
    if (status == FANIN_ERR_MEMORY)
        q->status = error_set_memory(&q->error);
    else if (status != FANIN_OK)
        q->status = connection_reply_error(c, "catalog", type, b, &q->error);
}

static void on_pong(void *cookie, connection *c, message_type type, body *b)
{
    question *q = cookie;
    --*q->left;
    q->answered_ns = clock_ns();
    q->error = (fanin_error)FANIN_ERROR_INIT;
    if (type != MSG_PONG)
        q->status = connection_reply_error(c, "ping", type, b, &q->error);
}

/* Asks all READY ranks; questions[i].asked_ns is 0 for the others. */
static fanin_status ask_all(fanin_client *client, question *questions, bool list,
                            deadline at, fanin_error *error)
{
    size_t left = 0;
    for (size_t i = 0; i < client->n_peers; i++) {
        connection *c = client->peers[i].control;
        if (!peer_ready(&client->peers[i]))
            continue;
        questions[i] = (question){.left = &left, .asked_ns = clock_ns()};
        left++;
        uint64_t request = connection_next_request(c);
        if (list)
            encode_list(connection_out(c), request, NULL);
        else
            encode_empty(connection_out(c), request, MSG_PING);
        connection_ask(c, request, list ? on_listed : on_pong, &questions[i]);
    }
    fanin_status status =
        client_run(client, &left, at, list ? "catalog" : "ping", error);
    for (size_t i = 0; i < client->n_peers; i++) {
        if (questions[i].asked_ns)
            connection_forget(client->peers[i].control, &questions[i]);
    }
    return status;
}

static bool report_list(const peer *p, const question *q, fanin_publication_fn fn,
                        void *cookie)
{
    for (uint32_t i = 0; i < q->count; i++) {
        const msg_list_entry *e = &q->entries[i];
        fanin_publication_info info = {
            .struct_size = sizeof(info),
            .name = e->publication,
            .rank = connection_peer(p->control)->rank,
            .state = e->state,
            .step = e->step,
            .epoch = e->epoch,
            .catalog_version = e->catalog_version,
            .tensors = e->tensors,
            .bytes = e->bytes,
        };
        memcpy(info.key_digest, e->key_digest, sizeof(info.key_digest));
        if (!fn(cookie, &info))
            return false;
    }
    return true;
}

fanin_status fanin_client_list(fanin_client *client, uint32_t timeout_ms,
                               fanin_publication_fn fn, void *cookie,
                               fanin_error *error)
{
    deadline at;
    fanin_status status = client_enter(client, timeout_ms, &at, error);
    if (status != FANIN_OK)
        return status;
    question *questions = calloc(client->n_peers, sizeof(*questions));
    if (!questions)
        return error_set_memory(error);
    status = ask_all(client, questions, true, at, error);
    bool more = true;
    for (size_t i = 0; i < client->n_peers; i++) {
        if (status == FANIN_OK && questions[i].status != FANIN_OK) {
            status = questions[i].status;
            error_copy(error, &questions[i].error);
        }
        if (status == FANIN_OK && more)
            more = report_list(&client->peers[i], &questions[i], fn, cookie);
        free(questions[i].entries);
    }
    free(questions);
    return status;
}

fanin_status fanin_client_ping(fanin_client *client, uint32_t timeout_ms,
                               fanin_ping_fn fn, void *cookie, fanin_error *error)
{
    fanin_status status = client_check_connected(client, error);
    if (status != FANIN_OK)
        return status;
    deadline at = deadline_in_ms(timeout_ms);
    fanin_error why = FANIN_ERROR_INIT;
    status = client_ensure_connected(client, false, at, &why);
    if (status == FANIN_ERR_CANCELLED) {
        error_copy(error, &why);
        return status;
    }
    question *questions = calloc(client->n_peers, sizeof(*questions));
    if (!questions)
        return error_set_memory(error);
    fanin_status asked = ask_all(client, questions, false, at, &why);
    if (status == FANIN_OK)
        status = asked;
    for (size_t i = 0; i < client->n_peers; i++) {
        const question *q = &questions[i];
        fanin_rank_info info = describe(&client->peers[i]);
        bool answered = q->asked_ns && q->answered_ns && q->status == FANIN_OK;
        if (!answered && info.status == FANIN_OK) {
            info.status = FANIN_ERR_TIMEOUT;
            info.message = "connected, but the ping was not answered in time";
        }
        if (!fn(cookie, &info, answered ? q->answered_ns - q->asked_ns : 0))
            break;
    }
    free(questions);
    if (status != FANIN_OK)
        error_copy(error, &why);
    return status;
}

/* ------------------------------------------------------------------ catalog */

typedef struct snapshot {
    publication *publication;
    announcement *announced;
    bool *use;
} snapshot;

static void snapshot_free(snapshot *s)
{
    free(s->announced);
    free(s->use);
}

/* Current tables of all ranks that announce one step. */
static fanin_status snapshot_take(fanin_client *client, const char *name,
                                  uint32_t timeout_ms, snapshot *s, fanin_error *error)
{
    fanin_pull_options options;
    fanin_pull_options_init(&options, sizeof(options));
    options.publication = name;
    deadline at;
    fanin_status status = client_enter(client, timeout_ms, &at, error);
    if (status != FANIN_OK)
        return status;
    if (!name || strlen(name) >= sizeof(s->publication->name))
        return error_set(error, FANIN_ERR_ARGUMENT, NULL,
                         "the publication's name is missing or too long");
    s->publication = tables_of(client, name);
    s->announced = calloc(client->n_peers, sizeof(*s->announced));
    s->use = calloc(client->n_peers, sizeof(*s->use));
    if (!s->publication || !s->announced || !s->use)
        return error_set_memory(error);
    do {
        status = agree(client, s->publication, &options, NULL, at, s->announced, s->use,
                       error);
        if (status == FANIN_OK)
            status =
                tables_sync(client, s->publication, s->announced, s->use, at, error);
    } while (status == FANIN_ERR_STALE && !deadline_passed(at));
    return status;
}

static uint64_t add_owners(const publication *p, size_t index, uint32_t rank,
                           uint32_t key, fanin_owner *owners)
{
    const shard_table *s = &p->shards[index];
    const key_entry *e = &p->keys->entries[key];
    uint64_t count, first = box_table_of_key(s->boxes, key, &count);
    for (uint64_t i = 0; owners && i < count; i++) {
        block b;
        box_place place;
        box_table_get(s->boxes, first + i, NULL, &b, &place);
        fanin_owner *o = &owners[i];
        *o = (fanin_owner){.rank = rank,
                           .region = place.region,
                           .region_offset = place.offset,
                           .packed = place.packed};
        memcpy(o->offset, b.offset, sizeof(o->offset));
        memcpy(o->extent, b.extent, sizeof(o->extent));
        (void)dtype_bytes(e->dtype, b.n_dims, b.extent, &o->bytes);
    }
    return count;
}

static fanin_status report_key(fanin_client *client, const snapshot *s, uint32_t key,
                               fanin_entry_fn fn, void *cookie, bool *more,
                               fanin_error *error)
{
    const key_entry *e = &s->publication->keys->entries[key];
    uint64_t count = 0;
    for (size_t i = 0; i < client->n_peers; i++)
        count += s->use[i] ? add_owners(s->publication, i, 0, key, NULL) : 0;
    fanin_owner *owners = calloc(count + 1, sizeof(*owners));
    if (!owners)
        return error_set_memory(error);
    uint64_t n = 0;
    for (size_t i = 0; i < client->n_peers; i++) {
        if (s->use[i])
            n += add_owners(s->publication, i,
                            connection_peer(client->peers[i].control)->rank, key,
                            owners + n);
    }
    fanin_entry entry = {.struct_size = sizeof(entry),
                         .name = e->name,
                         .dtype = e->dtype,
                         .n_dims = e->n_dims,
                         .bytes = e->bytes,
                         .owners = owners,
                         .n_owners = n};
    memcpy(entry.shape, e->shape, sizeof(entry.shape));
    *more = fn(cookie, &entry);
    free(owners);
    return FANIN_OK;
}

static fanin_status report_catalog(fanin_client *client, const snapshot *s,
                                   const char *name, fanin_entry_fn fn, void *cookie,
                                   fanin_error *error)
{
    const key_table *keys = s->publication->keys;
    bool more = true;
    if (name) {
        int64_t key = key_table_find(keys, name);
        error_place place = {.phase = "catalog",
                             .key = name,
                             .remedy = "`nixl-fetch list` shows the names"};
        if (key < 0)
            return error_set(error, FANIN_ERR_NOT_FOUND, &place, "%s has no tensor %s",
                             s->publication->name, name);
        return report_key(client, s, (uint32_t)key, fn, cookie, &more, error);
    }
    for (uint32_t key = 0; key < keys->count && more; key++) {
        fanin_status status = report_key(client, s, key, fn, cookie, &more, error);
        if (status != FANIN_OK)
            return status;
    }
    return FANIN_OK;
}

fanin_status fanin_client_catalog(fanin_client *client, const char *publication,
                                  const char *name, uint32_t timeout_ms,
                                  fanin_entry_fn fn, void *cookie, fanin_error *error)
{
    snapshot s = {0};
    fanin_status status = snapshot_take(client, publication, timeout_ms, &s, error);
    if (status == FANIN_OK)
        status = report_catalog(client, &s, name, fn, cookie, error);
    snapshot_free(&s);
    return status;
}

fanin_status fanin_client_metadata(fanin_client *client, const char *publication,
                                   uint32_t timeout_ms, fanin_pair_fn fn, void *cookie,
                                   fanin_error *error)
{
    snapshot s = {0};
    fanin_status status = snapshot_take(client, publication, timeout_ms, &s, error);
    const key_table *keys = status == FANIN_OK ? s.publication->keys : NULL;
    for (uint32_t i = 0; keys && i < keys->n_pairs; i++) {
        if (!fn(cookie, keys->pairs[i].key, keys->pairs[i].value))
            break;
    }
    snapshot_free(&s);
    return status;
}

static fanin_status make_config(const key_table *keys, const char *publication,
                                bool trusted, fanin_pair_fn fn, void *cookie,
                                fanin_error *error)
{
    peft_names names = {0};
    peft_config config = {0};
    fanin_status status = peft_names_make(keys, publication, &names, error);
    if (status == FANIN_OK)
        status = peft_config_make(keys, &names, publication, trusted, &config, error);
    if (status == FANIN_OK)
        (void)fn(cookie, "adapter_config.json", config.text);
    peft_config_free(&config);
    peft_names_free(&names);
    return status;
}

fanin_status fanin_client_adapter_config(fanin_client *client,
                                         const fanin_pull_options *options,
                                         fanin_pair_fn fn, void *cookie,
                                         fanin_error *error)
{
    snapshot s = {0};
    fanin_pull_options checked;
    fanin_status status = pull_check(client, options, &checked, error);
    if (status == FANIN_OK)
        status =
            snapshot_take(client, checked.publication, checked.timeout_ms, &s, error);
    if (status == FANIN_OK)
        status = make_config(s.publication->keys, checked.publication,
                             checked.trust_config, fn, cookie, error);
    snapshot_free(&s);
    return status;
}
