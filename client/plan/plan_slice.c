/* SPDX-License-Identifier: Apache-2.0 */
/* A plan's pieces by what they fill, and plans of some of them. */
#include "plan/plan_internal.h"

#include "error_set.h"
#include <stdlib.h>
#include <string.h>

/* ------------------------------------------------------------------- index */

/* Counts go to first[group + 2]: they become starts, which are moved on while places are filled,
   and end one further. */
static fanin_status count_groups(const plan *plan, size_t n_groups, uint64_t *first,
                                 work_stop *stop, fanin_error *error)
{
    for (size_t s = 0; s < plan->n_ranks; s++) {
        const plan_rank *r = &plan->ranks[s];
        if (r->n_pieces > UINT32_MAX)
            return error_set(error, FANIN_ERR_LIMIT, NULL,
                             "one rank serves more than 2^32 pieces");
        for (uint64_t i = 0; i < r->n_pieces; i++) {
            if (work_stopped(stop))
                return plan_broken_off(stop, error);
            if (r->pieces[i].group >= n_groups)
                return error_set(error, FANIN_ERR_INTERNAL, NULL,
                                 "a piece belongs to nothing that is wanted");
            first[r->pieces[i].group + 2]++;
        }
    }
    for (size_t g = 2; g < n_groups + 2; g++)
        first[g] += first[g - 1];
    return FANIN_OK;
}

fanin_status plan_index_build(const plan *plan, size_t n_groups, work_stop *stop,
                              plan_index *out, fanin_error *error)
{
    plan_index x = {.n_groups = n_groups,
                    .first = calloc(n_groups + 2, sizeof *x.first)};
    if (!x.first)
        return error_set_memory(error);
    fanin_status status = count_groups(plan, n_groups, x.first, stop, error);
    uint64_t total = status == FANIN_OK ? x.first[n_groups + 1] : 0;
    if (status == FANIN_OK && !(x.places = malloc((total + 1) * sizeof *x.places)))
        status = error_set_memory(error);
    for (size_t s = 0; s < plan->n_ranks && status == FANIN_OK; s++) {
        const plan_rank *r = &plan->ranks[s];
        for (uint64_t i = 0; i < r->n_pieces; i++)
            x.places[x.first[r->pieces[i].group + 1]++] =
                (plan_place){(uint32_t)s, (uint32_t)i};
    }
    if (status != FANIN_OK)
        plan_index_free(&x);
    *out = x;
    return status;
}

void plan_index_free(plan_index *index)
{
    free(index->first);
    free(index->places);
    *index = (plan_index){0};
}

/* ------------------------------------------------------------------- slices */

static int by_place(const void *a, const void *b)
{
    const plan_place *x = a, *y = b;
    if (x->source != y->source)
        return x->source < y->source ? -1 : 1;
    return x->piece < y->piece ? -1 : x->piece > y->piece;
}

/* Sorts them, unless they are: tensors are mostly wanted in the order in which they are held. */
static void sort_places(plan_place *places, uint64_t n)
{
    for (uint64_t i = 1; i < n; i++) {
        if (by_place(&places[i - 1], &places[i]) < 0)
            continue;
        qsort(places, n, sizeof *places, by_place);
        return;
    }
}

/* @p places: sorted. */
static bool fill_slice(plan *slice, const plan *whole, const plan_place *places,
                       uint64_t n, work_stop *stop)
{
    for (uint64_t i = 0; i < n;) {
        uint32_t source = places[i].source;
        uint64_t end = i;
        while (end < n && places[end].source == source)
            end++;
        plan_rank *r = &slice->ranks[source];
        r->pieces = malloc((end - i) * sizeof *r->pieces);
        if (!r->pieces)
            return false;
        for (; i < end; i++) {
            const piece *p = &whole->ranks[source].pieces[places[i].piece];
            if (work_stopped(stop))
                return false;
            r->pieces[r->n_pieces++] = *p;
            r->bytes += piece_bytes(whole, p);
        }
        slice->bytes += r->bytes;
    }
    return true;
}

fanin_status plan_slice_build(const plan *whole, const plan_index *index, size_t first,
                              size_t count, work_stop *stop, plan **out,
                              fanin_error *error)
{
    uint64_t start = index->first[first], n = index->first[first + count] - start;
    plan_place *places = malloc((n + 1) * sizeof *places);
    plan *slice = calloc(1, sizeof *slice);
    if (slice)
        slice->ranks = calloc(whole->n_ranks + 1, sizeof *slice->ranks);
    bool ok = places && slice && slice->ranks;
    if (ok) {
        slice->n_ranks = whole->n_ranks;
        slice->views = whole->views;
        slice->n_views = whole->n_views;
        slice->readings = whole->readings;
        slice->has_replicas = whole->has_replicas;
        for (size_t g = first; g < first + count; g++)
            slice->tensors += index->first[g + 1] > index->first[g];
        memcpy(places, index->places + start, n * sizeof *places);
        sort_places(places, n);
        ok = fill_slice(slice, whole, places, n, stop);
    }
    free(places);
    if (!ok)
        plan_slice_free(&slice);
    *out = slice;
    return ok ? FANIN_OK : plan_broken_off(stop, error);
}

void plan_slice_free(plan **slice)
{
    if (*slice) { /* the whole's */
        (*slice)->views = NULL;
        (*slice)->readings = NULL;
    }
    plan_free(slice);
}

void plan_piece_reach(const plan *plan, const piece *p, uint64_t *low, uint64_t *high)
{
    const strided *view = p->view ? &plan->views[p->view - 1] : NULL;
    *low = p->to;
    *high = p->to + (view ? convert_bytes(view->convert, view->run) : p->length);
    for (uint32_t i = 0; view && i < view->n_dims; i++) {
        uint64_t reach = (view->extent[i] - 1) * (uint64_t)view->to[i];
        *low += view->to[i] < 0 ? reach : 0;
        *high += view->to[i] > 0 ? reach : 0;
    }
}
