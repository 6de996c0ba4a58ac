/* SPDX-License-Identifier: Apache-2.0 */
/* What a publication consists of: shards and metadata, put and removed by the trainer. */
#include "array.h"
#include "error_set.h"
#include "publish/commit.h"
#include "publish/patches.h"
#include "shards/registration.h"
#include "text.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Finds or makes the publication's object and takes its writer lock. */
static fanin_status lock_publication(fanin_server *s, const char *name,
                                     publication **out, fanin_error *error)
{
    pthread_mutex_lock(&s->lock);
    fanin_status status = publication_obtain(s, name, out, error);
    pthread_mutex_unlock(&s->lock);
    if (status == FANIN_OK)
        pthread_mutex_lock(&(*out)->writer);
    return status;
}

static fanin_status appear(fanin_server *s, publication *p, fanin_error *error)
{
    pthread_mutex_lock(&s->lock);
    fanin_status status = publication_appear(s, p, error);
    pthread_mutex_unlock(&s->lock);
    return status;
}

static fanin_status fault(const publication *p, const char *name, fanin_status code,
                          const char *remedy, const char *why, fanin_error *error)
{
    char key[640];
    snprintf(key, sizeof key, "%s:%.512s", p->name, name);
    error_place place = {.phase = "publish", .key = key, .remedy = remedy};
    return error_set(error, code, &place, "%s", why);
}

/* Readers of the shards have finished when it returns, and get none any more. Lock held, given up
   while waiting. */
static void end_readers(fanin_server *s, publication *p, const char *why)
{
    commit_withdraw(s, p, why);
    if (p->state == STATE_STABLE)
        publication_advance(s, p, STATE_WRITING);
    else
        publication_wait_for_reads(s, p);
}

/* For changes outside of begin_update: nobody reads the shards when it returns, at most lease_ms
   later. An unreadable publication only loses its pending commit, a snapshot publication stays
   readable. */
static void make_unreadable(fanin_server *s, publication *p)
{
    pthread_mutex_lock(&s->lock);
    /* Nobody reads the shards of a paused one, and no commit is due to resume. */
    if (!p->paused) {
        publication_wait_for_drain(s, p);
        if (publication_has_copies(p))
            p->update_open = true;
        else
            end_readers(s, p, "shards of it were replaced or removed");
    }
    pthread_mutex_unlock(&s->lock);
}

/* The trainer's own again. With the writer lock. */
static void forget(fanin_server *s, publication *p, const shard *old)
{
    if (p->catalog && !p->catalog->plan)
        region_set_forget(&s->registrar, &p->catalog->regions, old);
}

/* A new catalog is due. With the writer lock. */
static void changed(fanin_server *s, publication *p)
{
    p->revision++;
    pthread_mutex_lock(&s->lock);
    p->n_shards = p->shards.count;
    pthread_mutex_unlock(&s->lock);
}

/* -------------------------------------------------------------------- put */

/* What a put will do, found out before anything is changed. */
typedef struct put_plan {
    size_t added, changed;
    uint64_t boxes; /* of the publication afterwards */
} put_plan;

static fanin_status plan_put(const publication *p, const shard_set *fresh, bool replace,
                             put_plan *plan, fanin_error *error)
{
    *plan = (put_plan){.boxes = p->shards.n_boxes};
    for (size_t i = 0; i < fresh->count; i++) {
        const shard *s = fresh->shards[i];
        ptrdiff_t at = shard_set_find(&p->shards, s->name);
        plan->boxes += s->n_boxes;
        if (at < 0) {
            plan->added++;
            continue;
        }
        if (!replace)
            return fault(p, s->name, FANIN_ERR_EXISTS,
                         "put with replace, or remove it first",
                         "the shard is published already", error);
        plan->boxes -= p->shards.shards[at]->n_boxes;
        plan->changed += !shard_equal(p->shards.shards[at], s);
    }
    error_place place = {.phase = "publish",
                         .remedy = "spread the tensors over several publications"};
    if (p->shards.count + plan->added > LIMIT_KEYS)
        return error_set(error, FANIN_ERR_LIMIT, &place,
                         "%s would have %zu tensors, the most is %d", p->name,
                         p->shards.count + plan->added, LIMIT_KEYS);
    if (plan->boxes > LIMIT_BOXES)
        return error_set(error, FANIN_ERR_LIMIT, &place,
                         "%s would have %" PRIu64 " boxes, the most is %d", p->name,
                         plan->boxes, LIMIT_BOXES);
    return FANIN_OK;
}

/* Exchanges the shards that are there; what is left in @p fresh is to be freed. */
static void exchange(fanin_server *s, publication *p, shard_set *fresh)
{
    for (size_t i = 0; i < fresh->count; i++) {
        ptrdiff_t at = shard_set_find(&p->shards, fresh->shards[i]->name);
        if (at < 0 || shard_equal(p->shards.shards[at], fresh->shards[i]))
            continue;
        shard *old = p->shards.shards[at];
        p->shards.shards[at] = fresh->shards[i];
        fresh->shards[i] = old;
        forget(s, p, old);
    }
}

/* Inserts the new ones, from the last to the first, so that every old shard moves once. */
static void insert(publication *p, shard_set *fresh, size_t added)
{
    shard_set *set = &p->shards;
    size_t left = added, tail = set->count; /* shards[tail..] have moved already */
    for (size_t i = fresh->count; i-- > 0 && left > 0;) {
        ptrdiff_t at = shard_set_find(
            &(shard_set){.shards = set->shards, .count = tail}, fresh->shards[i]->name);
        if (at >= 0)
            continue;
        size_t before = (size_t)(-1 - at);
        memmove(&set->shards[before + left], &set->shards[before],
                (tail - before) * sizeof *set->shards);
        set->shards[before + left - 1] = fresh->shards[i];
        fresh->shards[i] = NULL;
        tail = before;
        left--;
    }
    set->count += added;
}

static fanin_status put(fanin_server *s, publication *p, shard_set *fresh, bool replace,
                        fanin_error *error)
{
    put_plan plan;
    fanin_status status = plan_put(p, fresh, replace, &plan, error);
    if (status == FANIN_OK &&
        !array_reserve(&p->shards.shards, &p->shards.capacity,
                       p->shards.count + plan.added, sizeof *p->shards.shards))
        status = error_set_memory(error);
    if (status == FANIN_OK)
        status = appear(s, p, error);
    if (status != FANIN_OK || plan.added + plan.changed == 0)
        return status;
    shard_set_log_origins(fresh, p->name, &s->log);
    if (plan.changed > 0) {
        status = commit_wait_for_copies(s, p, error);
        if (status != FANIN_OK)
            return status;
        make_unreadable(s, p);
        exchange(s, p, fresh);
        /* Earlier catalogs may hold the old memory registered; not when this returns. */
        commit_tidy(s);
        mappers_tell(&s->registrar, p->name, "replaced");
    }
    insert(p, fresh, plan.added);
    p->shards.n_boxes = plan.boxes;
    changed(s, p);
    return FANIN_OK;
}

fanin_status fanin_server_put(fanin_server *server, const char *name,
                              const fanin_tensor *tensors, size_t count, bool replace,
                              fanin_error *error)
{
    fanin_status status = publication_call_check(server, name, error);
    if (status != FANIN_OK)
        return status;
    shard_set fresh;
    publication *p = NULL;
    memory_probe probe = {.log = &server->log};
    status = shard_set_build(&probe, name, tensors, count, &fresh, error);
    if (status == FANIN_OK && probe.found_device)
        atomic_store(&server->gpu, probe.finder.g);
    gpu_finder_free(&probe.finder);
    if (status == FANIN_OK)
        status = lock_publication(server, name, &p, error);
    if (status == FANIN_OK) {
        status = put(server, p, &fresh, replace, error);
        pthread_mutex_unlock(&p->writer);
    }
    shard_set_free(&fresh);
    return status;
}

/* ----------------------------------------------------------------- remove */

static const char *const removed = "the publication was removed";

static fanin_status remove_shard(fanin_server *s, publication *p, const char *name,
                                 fanin_error *error)
{
    ptrdiff_t at = shard_set_find(&p->shards, name);
    if (at < 0) {
        char why[128];
        snprintf(why, sizeof why, "%s has no shard of this name", p->name);
        return fault(p, name, FANIN_ERR_NOT_FOUND, NULL, why, error);
    }
    fanin_status status = commit_wait_for_copies(s, p, error);
    if (status != FANIN_OK)
        return status;
    make_unreadable(s, p);
    shard *old = p->shards.shards[at];
    forget(s, p, old);
    mappers_tell(&s->registrar, p->name, "removed");
    p->shards.count--;
    p->shards.n_boxes -= old->n_boxes;
    memmove(&p->shards.shards[at], &p->shards.shards[at + 1],
            (p->shards.count - (size_t)at) * sizeof *p->shards.shards);
    free(old);
    changed(s, p);
    return FANIN_OK;
}

/* Nobody reads anything of it afterwards, copies neither. The catalog that it had, or NULL. Lock
   held, given up while waiting. */
static shard_catalog *close_publication(fanin_server *s, publication *p)
{
    shard_catalog *old;
    publication_wait_for_drain(s, p);
    end_readers(s, p, removed);
    p->present = p->paused = p->aborted = false;
    p->mode = MODE_UNKNOWN;
    p->cast = 0;
    p->arena = 0;
    p->filling = NULL;
    p->n_shards = 0;
    old = p->catalog;
    p->catalog = NULL;
    patches_drop(s, p);
    publication_advance(s, p, STATE_UNPUBLISHED);
    return old;
}

static fanin_status remove_all(fanin_server *s, publication *p, fanin_error *error)
{
    pthread_mutex_lock(&s->lock);
    commit_withdraw(s, p, removed);
    pthread_mutex_unlock(&s->lock);
    fanin_status status = commit_wait_for_copies(s, p, error);
    if (status != FANIN_OK)
        return status;
    pthread_mutex_lock(&s->lock);
    shard_catalog *old = close_publication(s, p);
    pthread_mutex_unlock(&s->lock);
    if (old)
        region_set_forget(&s->registrar, &old->regions, NULL);
    mappers_tell(&s->registrar, p->name, "removed");
    shard_catalog_release(old);
    shard_set_free(&p->shards);
    free(p->pairs);
    p->pairs = NULL;
    p->n_pairs = 0;
    p->revision++;
    return FANIN_OK;
}

fanin_status fanin_server_remove(fanin_server *server, const char *publication_name,
                                 const char *name, fanin_error *error)
{
    publication *p = NULL;
    fanin_status status = publication_call_check(server, publication_name, error);
    if (status == FANIN_OK)
        status =
            publication_lock_present(server, publication_name, "publish", &p, error);
    if (status != FANIN_OK)
        return status;
    status = name ? remove_shard(server, p, name, error) : remove_all(server, p, error);
    pthread_mutex_unlock(&p->writer);
    commit_tidy(server);
    return status;
}

/* --------------------------------------------------------------- metadata */

static int by_key(const void *a, const void *b)
{
    return strcmp(((const fanin_pair *)a)->key, ((const fanin_pair *)b)->key);
}

static fanin_status check_pairs(const fanin_pair *pairs, size_t count, size_t *size_out,
                                fanin_error *error)
{
    error_place place = {.phase = "publish"};
    size_t size = 0, bytes = 0;
    if (count > 0 && !pairs)
        return error_set(error, FANIN_ERR_ARGUMENT, &place, "the metadata are NULL");
    for (size_t i = 0; i < count; i++) {
        const char *key = pairs[i].key, *value = pairs[i].value;
        if (!key || !*key || !value)
            return error_set(error, FANIN_ERR_ARGUMENT, &place,
                             "pair %zu of the metadata has no key or no value", i);
        size_t key_size = strlen(key), value_size = strlen(value);
        if (!utf8_valid(key, key_size) || !utf8_valid(value, value_size))
            return error_set(error, FANIN_ERR_ARGUMENT, &place,
                             "pair %zu of the metadata is not UTF-8", i);
        bytes += key_size + value_size;
        size += key_size + value_size + 2 + sizeof *pairs;
        if (bytes > LIMIT_METADATA || size > 16 * LIMIT_METADATA)
            return error_set(error, FANIN_ERR_ARGUMENT, &place,
                             "the metadata are larger than 1 MiB");
    }
    *size_out = size;
    return FANIN_OK;
}

/* A sorted copy in one allocation. */
static fanin_status copy_pairs(const fanin_pair *pairs, size_t count, fanin_pair **out,
                               fanin_error *error)
{
    size_t size = 0;
    fanin_status status = check_pairs(pairs, count, &size, error);
    if (status != FANIN_OK)
        return status;
    fanin_pair *copy = malloc(size + 1);
    if (!copy)
        return error_set_memory(error);
    char *text = (char *)(copy + count);
    for (size_t i = 0; i < count; i++) {
        copy[i].key = text;
        text = stpcpy(text, pairs[i].key) + 1;
        copy[i].value = text;
        text = stpcpy(text, pairs[i].value) + 1;
    }
    if (count > 1)
        qsort(copy, count, sizeof *copy, by_key);
    for (size_t i = 1; i < count; i++) {
        if (strcmp(copy[i - 1].key, copy[i].key) != 0)
            continue;
        error_place place = {.phase = "publish"};
        status = error_set(error, FANIN_ERR_ARGUMENT, &place,
                           "the metadata have the key \"%s\" twice", copy[i].key);
        free(copy);
        return status;
    }
    *out = copy;
    return FANIN_OK;
}

static bool pairs_equal(const publication *p, const fanin_pair *pairs, size_t count)
{
    bool equal = p->n_pairs == count;
    for (size_t i = 0; equal && i < count; i++)
        equal = strcmp(p->pairs[i].key, pairs[i].key) == 0 &&
                strcmp(p->pairs[i].value, pairs[i].value) == 0;
    return equal;
}

fanin_status fanin_server_set_metadata(fanin_server *server, const char *name,
                                       const fanin_pair *pairs, size_t count,
                                       fanin_error *error)
{
    fanin_pair *copy = NULL;
    publication *p = NULL;
    fanin_status status = publication_call_check(server, name, error);
    if (status == FANIN_OK)
        status = copy_pairs(pairs, count, &copy, error);
    if (status == FANIN_OK)
        status = lock_publication(server, name, &p, error);
    if (status == FANIN_OK) {
        status = appear(server, p, error);
        if (status == FANIN_OK && !pairs_equal(p, copy, count)) {
            fanin_pair *old = p->pairs;
            p->pairs = copy;
            p->n_pairs = count;
            p->revision++;
            copy = old;
        }
        pthread_mutex_unlock(&p->writer);
    }
    free(copy);
    return status;
}

/* ------------------------------------------------------------------- list */

/* Names one after another, each with its NUL. */
static void append_name(buffer *names, const char *name)
{
    buffer_append(names, name, strlen(name) + 1);
}

static fanin_status collect_shards(fanin_server *s, const char *name, buffer *names,
                                   fanin_error *error)
{
    publication *p = NULL;
    fanin_status status = publication_name_check(name, error);
    if (status == FANIN_OK)
        status = publication_lock_present(s, name, "list", &p, error);
    if (status != FANIN_OK)
        return status;
    for (size_t i = 0; i < p->shards.count; i++)
        append_name(names, p->shards.shards[i]->name);
    pthread_mutex_unlock(&p->writer);
    return FANIN_OK;
}

fanin_status fanin_server_list(fanin_server *server, const char *name, fanin_name_fn fn,
                               void *cookie, fanin_error *error)
{
    fanin_status status = server_check(server, error);
    if (status != FANIN_OK)
        return status;
    if (!fn)
        return error_set(error, FANIN_ERR_ARGUMENT, NULL, "the function is NULL");
    buffer names = {0};
    if (name) {
        status = collect_shards(server, name, &names, error);
    } else {
        pthread_mutex_lock(&server->lock);
        for (size_t i = 0; i < server->n_publications; i++)
            if (server->publications[i]->present)
                append_name(&names, server->publications[i]->name);
        pthread_mutex_unlock(&server->lock);
    }
    if (status == FANIN_OK && names.failed)
        status = error_set_memory(error);
    bool more = status == FANIN_OK;
    for (size_t at = 0; more && at < names.size;) {
        const char *one = (const char *)names.data + at;
        at += strlen(one) + 1;
        more = fn(cookie, one);
    }
    buffer_free(&names);
    return status;
}
