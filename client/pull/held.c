/* SPDX-License-Identifier: Apache-2.0 */
/* What ranks hold, of which step: a pull without bytes. */
#include "adapter/adapter.h"
#include "catalog/survey.h"
#include "dtype.h"
#include "error_set.h"
#include "peft/peft_config.h"
#include "pull/plan_cache.h"
#include "pull/pull.h"
#include <stdlib.h>
#include <string.h>

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

static fanin_status snapshot_make(fanin_client *client, const char *name, snapshot *s,
                                  fanin_error *error)
{
    if (!name || strlen(name) >= sizeof s->publication->name)
        return error_set(error, FANIN_ERR_ARGUMENT, NULL,
                         "the publication's name is missing or too long");
    s->publication = kept_of(client, name);
    s->announced = calloc(client->n_peers, sizeof *s->announced);
    s->use = calloc(client->n_peers, sizeof *s->use);
    if (!s->publication || !s->announced || !s->use)
        return error_set_memory(error);
    return FANIN_OK;
}

/* One rank's announcement, of the first that makes one. */
static fanin_status ask_any(fanin_client *client, snapshot *s, deadline at,
                            fanin_error *error)
{
    survey any = {.client = client,
                  .type = MSG_WAIT,
                  .publication = s->publication->name,
                  .first = true,
                  .at = at};
    fanin_status status = survey_take(&any, error);
    bool found = false;
    for (size_t i = 0; i < client->n_peers && status == FANIN_OK; i++) {
        s->use[i] = !found && survey_answered(&any, i);
        found = found || s->use[i];
        if (s->use[i])
            s->announced[i] = any.answers[i].announced;
    }
    survey_finish(&any);
    return status;
}

/* Current tables of all ranks that announce one step; with @p any of one rank: metadata are the
   same on all. */
static fanin_status snapshot_take(fanin_client *client, const char *name,
                                  uint32_t timeout_ms, bool any, snapshot *s,
                                  fanin_error *error)
{
    fanin_pull_options options;
    fanin_pull_options_init(&options, sizeof options);
    options.publication = name;
    deadline at = deadline_in_ms(timeout_ms);
    fanin_status status = client_check_connected(client, error);
    if (status == FANIN_OK && !any)
        status = client_ensure_connected(client, false, at, error);
    if (status == FANIN_OK)
        status = snapshot_make(client, name, s, error);
    if (status != FANIN_OK)
        return status;
    /* Of one rank only the key table is looked at, whatever is wanted of the others. */
    s->publication->need = any ? NULL : &need_all;
    do {
        status = any ? ask_any(client, s, at, error)
                     : agree(client, s->publication, &options, NULL, NULL, at,
                             s->announced, s->use, error);
        if (status == FANIN_OK)
            status =
                tables_sync(client, s->publication, s->announced, s->use, at, error);
    } while (status == FANIN_ERR_STALE && !deadline_passed(at));
    s->publication->need = NULL;
    return status;
}

const key_table *pull_known_keys(fanin_client *client, const char *name)
{
    const publication *p = client->publications;
    while (p && strcmp(p->name, name) != 0)
        p = p->next;
    return p ? p->keys : NULL;
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
        memcpy(o->offset, b.offset, sizeof o->offset);
        memcpy(o->extent, b.extent, sizeof o->extent);
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
    fanin_owner *owners = calloc(count + 1, sizeof *owners);
    if (!owners)
        return error_set_memory(error);
    uint64_t n = 0;
    for (size_t i = 0; i < client->n_peers; i++) {
        if (s->use[i])
            n += add_owners(s->publication, i, client->peers[i].control->peer.rank, key,
                            owners + n);
    }
    fanin_entry entry = {.struct_size = sizeof entry,
                         .name = e->name,
                         .dtype = e->dtype,
                         .n_dims = e->n_dims,
                         .bytes = e->bytes,
                         .owners = owners,
                         .n_owners = n};
    memcpy(entry.shape, e->shape, sizeof entry.shape);
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
    fanin_status status = client_check_told(client, fn, error);
    if (status == FANIN_OK)
        status = snapshot_take(client, publication, timeout_ms, false, &s, error);
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
    fanin_status status = client_check_told(client, fn, error);
    if (status == FANIN_OK)
        status = snapshot_take(client, publication, timeout_ms, true, &s, error);
    const key_table *keys = status == FANIN_OK ? s.publication->keys : NULL;
    for (uint32_t i = 0; keys && i < keys->n_pairs; i++) {
        if (!fn(cookie, keys->pairs[i].key, keys->pairs[i].value))
            break;
    }
    snapshot_free(&s);
    return status;
}

/* What would be written beside a model; without a configuration @p fn is not called. */
static fanin_status tell_model_config(const key_table *keys, bool trusted,
                                      fanin_pair_fn fn, void *cookie,
                                      fanin_error *error)
{
    peft_config config;
    fanin_status status = model_config_make(keys, trusted, &config, error);
    if (status == FANIN_OK && config.text)
        (void)fn(cookie, MODEL_CONFIG_FILE, config.text);
    peft_config_free(&config);
    return status;
}

static fanin_status make_config(fanin_client *client, const key_table *keys,
                                const fanin_pull_options *options, deadline at,
                                fanin_pair_fn fn, void *cookie, fanin_error *error)
{
    const char *publication = options->publication;
    if (strncmp(publication, "full:", 5) == 0)
        return tell_model_config(keys, options->trust_config, fn, cookie, error);
    client_work work;
    peft_names names = {0};
    peft_config config = {0};
    fanin_status status = peft_names_make(keys, publication, &names, error);
    client_work_start(&work, client, at);
    if (status == FANIN_OK)
        status = peft_config_make(keys, &names, publication, options->trust_config,
                                  &work.stop, &config, error);
    status = client_work_end(&work, status, error);
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
    fanin_status status = client_check_told(client, fn, error);
    if (status == FANIN_OK)
        status = pull_check(client, options, &checked, error);
    deadline at = status == FANIN_OK ? deadline_in_ms(checked.timeout_ms) : 0;
    if (status == FANIN_OK)
        status = snapshot_take(client, checked.publication, checked.timeout_ms, false,
                               &s, error);
    if (status == FANIN_OK)
        status =
            make_config(client, s.publication->keys, &checked, at, fn, cookie, error);
    snapshot_free(&s);
    return status;
}

/* ------------------------------------------------------- waiting for a step */

typedef struct waiter {
    fanin_client *client;
    publication *publication;
    deadline at;
} waiter;

/* Nobody says what will be read: all of it. */
static fanin_status all_without(void *cookie, const bool *use, bool *vain,
                                fanin_error *error)
{
    const waiter *w = cookie;
    bool enough = false;
    *vain = false;
    fanin_status status =
        agree_sufficient(w->client, w->publication, use, w->at, &enough, error);
    if (status != FANIN_OK || enough)
        return status;
    size_t culprit = agree_culprit(w->client, w->publication, use, w->at);
    if (culprit == w->client->n_peers)
        return FANIN_OK;
    *vain = true;
    return error_copy(error, &w->client->peers[culprit].control->fault);
}

/* Some may have agreed because the others are gone: then these must suffice, as a pull's plan would
   tell. */
static fanin_status prove_step(waiter *w, const announcement *announced,
                               const bool *use, fanin_error *error)
{
    const fanin_client *client = w->client;
    bool all = true, vain = false;
    for (size_t i = 0; i < client->n_peers; i++)
        all = all && use[i];
    if (all)
        return FANIN_OK;
    fanin_status status =
        tables_sync(w->client, w->publication, announced, use, w->at, error);
    return status == FANIN_OK ? all_without(w, use, &vain, error) : status;
}

/* Patient: ranks that have not answered yet are waited for first. */
static fanin_status look_for_step(waiter *w, const fanin_pull_options *options,
                                  bool patient, uint64_t *step, fanin_error *error)
{
    fanin_client *client = w->client;
    const agree_need need = {.without = all_without, .cookie = w};
    snapshot s = {0};
    fanin_status status = client_ensure_connected(client, patient, w->at, error);
    if (status == FANIN_OK)
        status = snapshot_make(client, w->publication->name, &s, error);
    if (status == FANIN_OK)
        status = agree(client, w->publication, options, &need, NULL, w->at, s.announced,
                       s.use, error);
    if (status == FANIN_OK)
        status = prove_step(w, s.announced, s.use, error);
    for (size_t i = 0; i < client->n_peers && status == FANIN_OK; i++) {
        if (s.use[i])
            *step = s.announced[i].step;
    }
    snapshot_free(&s);
    return status;
}

fanin_status fanin_client_wait(fanin_client *client, const fanin_pull_options *in,
                               uint64_t *step, fanin_error *error)
{
    fanin_pull_options options;
    uint64_t unasked = 0;
    fanin_status status = pull_check(client, in, &options, error);
    if (status != FANIN_OK)
        return status;
    waiter w = {client, kept_of(client, options.publication),
                deadline_in_ms(options.timeout_ms)};
    if (!w.publication)
        return error_set_memory(error);
    step = step ? step : &unasked;
    fanin_error first = FANIN_ERROR_INIT;
    status = look_for_step(&w, &options, false, step, &first);
    /* Maybe of the connection before that of a rank which is still to come. */
    bool of_ranks = status <= FANIN_ERR_UNREACHABLE && status >= FANIN_ERR_MISMATCH;
    if (!of_ranks || !client_expects_more(client)) {
        error_copy(error, &first);
        return status;
    }
    return look_for_step(&w, &options, true, step, error);
}
