/* SPDX-License-Identifier: Apache-2.0 */
#include "delta/delta.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

delta_base *delta_base_create(void)
{
    delta_base *b = calloc(1, sizeof *b);
    if (!b)
        return NULL;
    pthread_mutex_init(&b->lock, NULL);
    b->users = 1;
    return b;
}

delta_base *delta_base_retain(delta_base *b)
{
    if (!b)
        return NULL;
    pthread_mutex_lock(&b->lock);
    b->users++;
    pthread_mutex_unlock(&b->lock);
    return b;
}

void delta_base_release(delta_base *b)
{
    if (!b)
        return;
    pthread_mutex_lock(&b->lock);
    bool last = --b->users == 0;
    pthread_mutex_unlock(&b->lock);
    if (!last)
        return;
    pthread_mutex_destroy(&b->lock);
    free(b->held);
    free(b);
}

void delta_base_enter(delta_base *b)
{
    pthread_mutex_lock(&b->lock);
    b->writers++;
    pthread_mutex_unlock(&b->lock);
}

void delta_base_leave(delta_base *b)
{
    pthread_mutex_lock(&b->lock);
    b->writers--;
    /* It may have written later than those that are left. */
    b->drops += b->writers > 0;
    pthread_mutex_unlock(&b->lock);
}

uint64_t delta_base_drop(delta_base *b)
{
    pthread_mutex_lock(&b->lock);
    base_step *held = b->held;
    b->held = NULL;
    uint64_t drops = ++b->drops;
    pthread_mutex_unlock(&b->lock);
    free(held);
    return drops;
}

void delta_base_set(delta_base *b, base_step *step, uint64_t drops)
{
    pthread_mutex_lock(&b->lock);
    if (b->drops == drops && b->writers <= 1) {
        base_step *before = b->held;
        b->held = step;
        step = before;
    }
    pthread_mutex_unlock(&b->lock);
    free(step);
}

static size_t size_for(size_t n)
{
    return sizeof(base_step) + n * sizeof(base_rank);
}

base_step *delta_base_copy(delta_base *b, uint64_t *drops)
{
    base_step *copy = NULL;
    pthread_mutex_lock(&b->lock);
    *drops = b->drops;
    if (b->held && (copy = malloc(size_for(b->held->n))))
        memcpy(copy, b->held, size_for(b->held->n));
    pthread_mutex_unlock(&b->lock);
    return copy;
}

/* Without what is between its members: another process has to find the same name. */
static void append_view(buffer *b, const strided *view)
{
    size_t n = view->n_dims;
    const uint64_t numbers[] = {view->n_dims, view->run, view->convert};
    buffer_append(b, numbers, sizeof numbers);
    buffer_append(b, view->extent, n * sizeof *view->extent);
    buffer_append(b, view->from, n * sizeof *view->from);
    buffer_append(b, view->to, n * sizeof *view->to);
}

digest base_name(const publication *p, const plan *plan)
{
    char name[sizeof p->name] = {0};
    buffer b = {0};
    snprintf(name, sizeof name, "%s", p->name);
    buffer_append(&b, name, sizeof name);
    for (size_t i = 0; i < plan->n_ranks; i++) {
        const plan_rank *r = &plan->ranks[i];
        digest pieces = digest_of(r->pieces, r->n_pieces * sizeof *r->pieces);
        buffer_append(&b, &pieces, sizeof pieces);
    }
    for (size_t i = 0; i < plan->n_views; i++)
        append_view(&b, &plan->views[i]);
    digest all = {0};
    if (!b.failed)
        all = digest_of(b.data, b.size);
    buffer_free(&b);
    return all;
}

base_step *base_step_of(const fanin_client *client, const digest *name,
                        const path_plan *plan, const announcement *announced,
                        const reader_lease *leases)
{
    base_step *now = calloc(1, size_for(plan->n_sources));
    if (!now)
        return NULL;
    now->of = *name;
    now->n = plan->n_sources;
    for (size_t i = 0; i < plan->n_sources; i++) {
        size_t peer = plan->peer_of[i];
        const announcement *a = &announced[peer];
        if (plan->plan->ranks[i].n_pieces == 0)
            continue;
        if (a->patches.generation == 0 || a->patches.generation != leases[peer].epoch) {
            free(now);
            return NULL;
        }
        now->step = a->step;
        now->ranks[i].version = a->version;
        now->ranks[i].generation = a->patches.generation;
        memcpy(now->ranks[i].incarnation, client->peers[peer].control->peer.incarnation,
               sizeof now->ranks[i].incarnation);
    }
    return now;
}

/* ------------------------------------------------------------------------ json */

static json_t *copy_json(const base_rank *rank)
{
    char incarnation[33];
    digest_hex(rank->incarnation, incarnation);
    return json_pack("{s:s, s:I, s:I}", "incarnation", incarnation, "catalog_version",
                     (json_int_t)rank->version, "generation",
                     (json_int_t)rank->generation);
}

json_t *base_json(const base_step *step, uint64_t seed)
{
    char plan[33], number[17];
    json_t *ranks = json_array();
    bool good = ranks != NULL;
    for (size_t i = 0; i < step->n && good; i++)
        good = json_array_append_new(ranks, copy_json(&step->ranks[i])) == 0;
    digest_hex(step->of.bytes, plan);
    snprintf(number, sizeof number, "%016" PRIx64, seed);
    json_t *json = good ? json_pack("{s:s, s:s, s:O}", "plan", plan, "seed", number,
                                    "ranks", ranks)
                        : NULL;
    json_decref(ranks);
    return json;
}

static bool read_digits(const json_t *json, uint8_t *out, size_t size)
{
    const char *text = json_string_value(json);
    return text && strlen(text) == 2 * size && hex_read(text, out, size);
}

static bool read_copy(const json_t *json, base_rank *out)
{
    const json_t *version = json_object_get(json, "catalog_version");
    const json_t *generation = json_object_get(json, "generation");
    out->version = (uint64_t)json_integer_value(version);
    out->generation = (uint64_t)json_integer_value(generation);
    return json_is_integer(version) && json_is_integer(generation) &&
           read_digits(json_object_get(json, "incarnation"), out->incarnation,
                       sizeof out->incarnation);
}

base_step *base_of_json(const json_t *json, uint64_t step, uint64_t *seed)
{
    const json_t *ranks = json_object_get(json, "ranks");
    const char *number = json_string_value(json_object_get(json, "seed"));
    size_t n = json_array_size(ranks);
    base_step *out = calloc(1, sizeof *out + n * sizeof out->ranks[0]);
    if (!out)
        return NULL;
    out->step = step;
    out->n = n;
    bool good = number && read_digits(json_object_get(json, "plan"), out->of.bytes,
                                      sizeof out->of.bytes);
    for (size_t i = 0; i < n && good; i++)
        good = read_copy(json_array_get(ranks, i), &out->ranks[i]);
    if (good) {
        *seed = strtoull(number, NULL, 16);
        return out;
    }
    free(out);
    return NULL;
}
