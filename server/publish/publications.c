/* SPDX-License-Identifier: Apache-2.0 */
/* The publications of a server, by name. */
#include "array.h"
#include "error_set.h"
#include "publish/publication.h"
#include "text.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define NAMES_MOST 65536 /**< in one server's life */

fanin_status publication_call_check(const fanin_server *server, const char *name,
                                    fanin_error *error)
{
    fanin_status status = server_check(server, error);
    return status == FANIN_OK ? publication_name_check(name, error) : status;
}

static int compare_name(const void *key, const void *element)
{
    return strcmp(key, (*(publication *const *)element)->name);
}

static size_t position(const fanin_server *s, const char *name, bool *found)
{
    return array_search(name, s->publications, s->n_publications,
                        sizeof *s->publications, compare_name, found);
}

publication *publication_find(const fanin_server *s, const char *name)
{
    bool found;
    size_t at = position(s, name, &found);
    return found ? s->publications[at] : NULL;
}

publication *publication_look_up(fanin_server *s, const char *name)
{
    pthread_mutex_lock(&s->lock);
    publication *p = publication_find(s, name);
    pthread_mutex_unlock(&s->lock);
    return p;
}

fanin_status publication_absent(const char *phase, const char *name, fanin_error *error)
{
    error_place place = {.phase = phase};
    return error_set(error, FANIN_ERR_NOT_FOUND, &place, "there is no publication %s",
                     name);
}

fanin_status publication_lock_present(fanin_server *s, const char *name,
                                      const char *phase, publication **out,
                                      fanin_error *error)
{
    publication *p = *out = publication_look_up(s, name);
    if (!p)
        return publication_absent(phase, name, error);
    pthread_mutex_lock(&p->writer);
    pthread_mutex_lock(&s->lock);
    bool present = p->present;
    pthread_mutex_unlock(&s->lock);
    if (present)
        return FANIN_OK;
    pthread_mutex_unlock(&p->writer);
    return publication_absent(phase, name, error);
}

fanin_status publication_obtain(fanin_server *s, const char *name, publication **out,
                                fanin_error *error)
{
    bool found;
    size_t at = position(s, name, &found);
    if (found) {
        *out = s->publications[at];
        return FANIN_OK;
    }
    if (s->n_publications == NAMES_MOST) {
        error_place place = {.phase = "publish",
                             .remedy = "use run names again, or start a new server"};
        return error_set(error, FANIN_ERR_LIMIT, &place,
                         "this server has seen %d names of publications", NAMES_MOST);
    }
    if (!array_reserve(&s->publications, &s->publications_capacity,
                       s->n_publications + 1, sizeof *s->publications))
        return error_set_memory(error);
    publication *p = calloc(1, sizeof *p);
    if (!p || pthread_mutex_init(&p->writer, NULL) != 0) {
        free(p);
        return error_set_memory(error);
    }
    snprintf(p->name, sizeof p->name, "%s", name);
    p->epoch = next_odd(s);
    memmove(&s->publications[at + 1], &s->publications[at],
            (s->n_publications - at) * sizeof *s->publications);
    s->publications[at] = p;
    s->n_publications++;
    *out = p;
    return FANIN_OK;
}

fanin_status publication_appear(fanin_server *s, publication *p, fanin_error *error)
{
    if (p->present)
        return FANIN_OK;
    size_t present = 0;
    for (size_t i = 0; i < s->n_publications; i++)
        present += s->publications[i]->present;
    if (present >= LIMIT_PUBLICATIONS) {
        error_place place = {.phase = "publish", .remedy = "remove old ones first"};
        return error_set(error, FANIN_ERR_LIMIT, &place,
                         "this server has %d publications already", LIMIT_PUBLICATIONS);
    }
    p->present = true;
    p->entered_at = clock_ns();
    return FANIN_OK;
}

void publication_names(const fanin_server *s, char *out, size_t size)
{
    text names = text_in(out, size);
    for (size_t i = 0; i < s->n_publications; i++)
        if (s->publications[i]->present)
            text_add(&names, "%s%s", names.used ? ", " : "", s->publications[i]->name);
    if (names.used >= size)
        snprintf(out + size - 5, 5, " ...");
}

void publications_free(fanin_server *s)
{
    for (size_t i = 0; i < s->n_publications; i++) {
        publication *p = s->publications[i];
        shard_catalog_release(p->catalog);
        shard_set_free(&p->shards);
        free(p->pairs);
        pthread_mutex_destroy(&p->writer);
        free(p);
    }
    free(s->publications);
    s->publications = NULL;
    s->n_publications = s->publications_capacity = 0;
}

/* ------------------------------------------------------------------- trace */

void publication_span(const fanin_server *s, trace_name name, uint64_t began,
                      const char *about, uint64_t step, fanin_status outcome)
{
    if (!trace_on())
        return;
    trace_span span = trace_span_of(name, began, outcome, about);
    span.rank = (int32_t)s->rank;
    span.step = step;
    trace_add(&span);
}
