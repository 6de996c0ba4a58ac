/* SPDX-License-Identifier: Apache-2.0 */
#include "pull/prepared.h"

#include "error_set.h"
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

struct fanin_destination {
    described all; /* its tensors: the three arrays below */
    fanin_tensor *tensors;
    fanin_box *boxes;
    char *names;
    pthread_mutex_t lock; /* held for the members below */
    places *now;          /* those that were found last, one use of which is this */
};

/* ------------------------------------------------------------------ copying */

static fanin_status allocate(fanin_destination *d, const described *from,
                             fanin_error *error)
{
    size_t boxes = 0, names = 0;
    for (size_t i = 0; i < from->count; i++) {
        const fanin_tensor *t = described_at(from, i);
        boxes += t->n_boxes;
        names += strlen(t->name) + 1;
    }
    d->tensors = calloc(from->count, sizeof *d->tensors);
    d->boxes = malloc((boxes + 1) * sizeof *d->boxes);
    d->names = malloc(names);
    if (!d->tensors || !d->boxes || !d->names)
        return error_set_memory(error);
    return FANIN_OK;
}

static void copy(fanin_destination *d, const described *from)
{
    fanin_box *box = d->boxes;
    char *name = d->names;
    for (size_t i = 0; i < from->count; i++) {
        fanin_tensor *to = &d->tensors[i];
        const fanin_tensor *t = described_at(from, i);
        size_t length = strlen(t->name) + 1;
        *to = *t;
        to->struct_size = sizeof *to;
        to->name = memcpy(name, t->name, length);
        to->boxes = box;
        if (t->n_boxes > 0)
            memcpy(box, t->boxes, t->n_boxes * sizeof *box);
        name += length;
        box += t->n_boxes;
    }
    d->all = (described){.tensors = d->tensors, .count = from->count};
}

/* ------------------------------------------------------------------- places */

/* Lock held. */
static void let_go(places *p)
{
    if (!p || --p->users > 0)
        return;
    places_clear(p);
    free(p);
}

/* Lock held. */
static fanin_status find_again(fanin_destination *d, gpu_finder *f, fanin_error *error)
{
    places *found = calloc(1, sizeof *found);
    if (!found)
        return error_set_memory(error);
    found->users = 1;
    fanin_status status = places_find(&d->all, f, found, error);
    if (status != FANIN_OK) {
        let_go(found);
        return status;
    }
    let_go(d->now);
    d->now = found;
    return FANIN_OK;
}

fanin_status prepared_take(fanin_destination *d, gpu_finder *f, const described **all,
                           const places **where, fanin_error *error)
{
    fanin_status status = FANIN_OK;
    *where = NULL;
    pthread_mutex_lock(&d->lock);
    if (!places_stand(d->now, f->g))
        status = find_again(d, f, error);
    if (status == FANIN_OK) {
        d->now->users++;
        *where = d->now;
        *all = &d->all;
    }
    pthread_mutex_unlock(&d->lock);
    return status;
}

void prepared_give(fanin_destination *d, const places *where)
{
    pthread_mutex_lock(&d->lock);
    let_go((places *)where);
    pthread_mutex_unlock(&d->lock);
}

/* -------------------------------------------------------------------- whole */

static fanin_status create(const described *from, fanin_destination **out,
                           fanin_error *error)
{
    gpu_finder finder = {.g = gpu_present()};
    fanin_destination *d = calloc(1, sizeof *d);
    if (!d)
        return error_set_memory(error);
    pthread_mutex_init(&d->lock, NULL);
    fanin_status status = allocate(d, from, error);
    if (status == FANIN_OK) {
        copy(d, from);
        status = find_again(d, &finder, error);
    }
    gpu_finder_free(&finder);
    if (status != FANIN_OK)
        fanin_destination_free(&d);
    *out = d;
    return status;
}

fanin_status fanin_destination_create(const fanin_tensor *tensors, size_t count,
                                      fanin_destination **destination_out,
                                      fanin_error *error)
{
    described from;
    if (!destination_out)
        return error_set(error, FANIN_ERR_ARGUMENT, NULL, "destination_out is NULL");
    *destination_out = NULL;
    fanin_status status = described_open(&from, tensors, count, error);
    if (status == FANIN_OK)
        status = create(&from, destination_out, error);
    described_close(&from);
    return status;
}

void fanin_destination_free(fanin_destination **destination)
{
    if (!destination || !*destination)
        return;
    fanin_destination *d = *destination;
    *destination = NULL;
    let_go(d->now);
    pthread_mutex_destroy(&d->lock);
    free(d->tensors);
    free(d->boxes);
    free(d->names);
    free(d);
}
