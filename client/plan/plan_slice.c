/* SPDX-License-Identifier: Apache-2.0 */
#include "messages.h"

#include "array.h"
#include "dtype.h"
#include "error_set.h"
#include "plan/plan_internal.h"
#include "plan/plan.h"
#include <stdlib.h>
#include <string.h>

/* ---------------------------------------------- pieces as ranges of bytes */

/* Pieces for paths that ask for bytes by ranges: they are told range by range, never kept so. */

/* Reading along a gap costs less than another range (an entry of a request) where the gap is at
   most this, and the runs beside it are short. */
#define SHORT_RUN ((uint64_t)512)
#define GAP_MAX ((uint64_t)4096)

_Static_assert(PIECE_RANGES == LIMIT_READ_ENTRIES, "a piece fits into one request");

static const cut_rule range_rule = {
    .short_run = SHORT_RUN, .max_gap = GAP_MAX, .min_step = PIECE_MAX / PIECE_RANGES};

/* From the view's first run of dimension @p outer on to the end of the last one. */
static uint64_t range_length(const strided *view, uint32_t outer)
{
    uint64_t length = view->run;
    for (uint32_t i = outer; i < view->n_dims; i++)
        length += (view->extent[i] - 1) * (uint64_t)view->from[i];
    return length;
}

/* The view from its ranges, one behind the other. */
static bool land_ranges(view_set *views, const strided *view, uint32_t outer,
                        uint32_t *landing_out)
{
    uint64_t step = range_length(view, outer);
    copy_block part = {
        .n_dims = view->n_dims, .unit = (uint32_t)view->run, .convert = view->convert};
    for (uint32_t i = view->n_dims; i-- > 0;) {
        part.extent[i] = view->extent[i];
        part.from[i] = i < outer ? (int64_t)step : view->from[i];
        part.to[i] = copy_measure(view->convert, view->to[i]);
        if (i < outer)
            step *= view->extent[i];
    }
    return view_of_block(views, &part, landing_out);
}

bool views_read(view_set *views, work_stop *stop, plan_reading **out)
{
    uint64_t n = views->n; /* landings come behind them */
    plan_reading *readings = malloc((n + 1) * sizeof *readings);
    bool ok = readings != NULL;
    for (uint64_t i = 0; i < n && ok; i++) {
        const strided view = views->views[i];
        plan_reading *r = &readings[i];
        r->outer =
            cut_joined(view.n_dims, view.extent, view.from, view.run, &range_rule);
        r->landing = (uint32_t)i + 1;
        ok = !work_stopped(stop) &&
             (r->outer == 0 || land_ranges(views, &view, r->outer, &r->landing));
    }
    *out = readings;
    return ok;
}

uint64_t piece_bytes(const plan *plan, const piece *p)
{
    return p->view ? strided_bytes(&plan->views[p->view - 1]) : p->length;
}

piece_ranges piece_ranges_of(const plan *plan, const piece *p)
{
    piece_ranges r = {.count = 1, .length = p->length};
    if (p->view == 0)
        return r;
    const strided *view = &plan->views[p->view - 1];
    const plan_reading *reading = &plan->readings[p->view - 1];
    if (reading->outer > 0)
        r.length = range_length(view, reading->outer);
    for (uint32_t i = 0; i < reading->outer; i++)
        r.count *= view->extent[i];
    r.landing = reading->landing ? &plan->views[reading->landing - 1] : NULL;
    return r;
}

uint64_t piece_range_at(const plan *plan, const piece *p, uint64_t index)
{
    uint64_t offset = p->offset;
    if (p->view == 0)
        return offset;
    const strided *view = &plan->views[p->view - 1];
    for (uint32_t i = plan->readings[p->view - 1].outer; i-- > 0;) {
        offset += index % view->extent[i] * (uint64_t)view->from[i];
        index /= view->extent[i];
    }
    return offset;
}

/* ----------------------------------------------------------------- slices */

/* A plan's pieces by what they fill, and plans of some of them. */

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

static int by_slice_place(const void *a, const void *b)
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
        if (by_slice_place(&places[i - 1], &places[i]) < 0)
            continue;
        qsort(places, n, sizeof *places, by_slice_place);
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

/* NULL: out of memory. */
static plan_place *places_of(const plan_index *index, const group_run *runs,
                             size_t n_runs, uint64_t *n_out, uint64_t *groups_out)
{
    uint64_t n = 0, groups = 0;
    for (size_t i = 0; i < n_runs; i++)
        n += index->first[runs[i].first + runs[i].count] - index->first[runs[i].first];
    plan_place *places = malloc((n + 1) * sizeof *places);
    n = 0;
    for (size_t i = 0; places && i < n_runs; i++) {
        const uint64_t *first = &index->first[runs[i].first];
        uint64_t here = first[runs[i].count] - first[0];
        memcpy(places + n, index->places + first[0], here * sizeof *places);
        n += here;
        for (size_t g = 0; g < runs[i].count; g++)
            groups += first[g + 1] > first[g];
    }
    *n_out = n;
    *groups_out = groups;
    return places;
}

fanin_status plan_slice_build(const plan *whole, const plan_index *index,
                              const group_run *runs, size_t n_runs, work_stop *stop,
                              plan **out, fanin_error *error)
{
    uint64_t n, groups;
    plan_place *places = places_of(index, runs, n_runs, &n, &groups);
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
        slice->tensors = groups;
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

/* ---------------------------------------------------------- read requests */

/* Large enough that a request's cost vanishes, small enough that several are under way. */
#define REQUEST_BYTES ((uint64_t)1 << 20)

static bool is_whole_box(const piece *p, const box_table *boxes, const key_table *keys)
{
    uint32_t key;
    block b;
    uint64_t bytes;
    if (p->offset != 0)
        return false;
    box_table_get(boxes, p->box, &key, &b, NULL);
    return dtype_bytes(keys->entries[key].dtype, b.n_dims, b.extent, &bytes) &&
           bytes == p->length;
}

/* Appends a piece to the open request, as an entry or as one more box of the last one. */
static void add_read_piece(read_list *list, read_request *r, uint64_t *n_entries,
                           const piece *p, const piece_ranges *ranges, bool whole)
{
    read_entry *last = r->n_entries > 0 ? &list->entries[*n_entries - 1] : NULL;
    if (whole && last && last->count > 0 && last->box + last->count == p->box) {
        last->count++;
    } else {
        list->entries[*n_entries] = whole ? (read_entry){.box = p->box, .count = 1}
                                          : (read_entry){.box = p->box,
                                                         .offset = p->offset,
                                                         .length = ranges->length};
        ++*n_entries;
        r->n_entries += (uint32_t)ranges->count;
    }
    r->n_pieces++;
    r->bytes += ranges->count * ranges->length;
    r->spread = r->spread || ranges->count > 1;
}

static bool is_request_full(const read_request *r, const piece_ranges *next)
{
    return r->n_pieces > 0 && (r->bytes + next->count * next->length > REQUEST_BYTES ||
                               r->n_entries + next->count > LIMIT_READ_ENTRIES);
}

void read_list_spread(const read_list *list, const read_request *r, const plan *plan,
                      const plan_rank *pieces, read_entry *out)
{
    const read_entry *e = &list->entries[r->first_entry];
    uint64_t end = r->first_piece + r->n_pieces;
    for (uint64_t i = r->first_piece; i < end; e++) {
        const piece *p = &pieces->pieces[i];
        uint64_t n = e->count ? 1 : piece_ranges_of(plan, p).count;
        for (uint64_t j = 0; j < n; j++, out++) {
            *out = *e;
            if (j > 0)
                out->offset = piece_range_at(plan, p, j);
        }
        i += e->count ? e->count : 1;
    }
}

static fanin_status give_up_list(read_list *list, const work_stop *stop,
                                 fanin_error *error)
{
    free(list->entries);
    free(list->requests);
    return work_broken_off(stop, "plan", "requests were made", error);
}

fanin_status read_list_build(const plan *plan, size_t index, const box_table *boxes,
                             const key_table *keys, work_stop *stop, read_list *out,
                             fanin_error *error)
{
    const plan_rank *pieces = &plan->ranks[index];
    read_list list = {0};
    uint64_t n_entries = 0;
    list.entries = malloc((pieces->n_pieces + 1) * sizeof *list.entries);
    list.requests = malloc((pieces->n_pieces + 1) * sizeof *list.requests);
    if (!list.entries || !list.requests)
        return give_up_list(&list, stop, error);
    read_request *open = &list.requests[0];
    *open = (read_request){0};
    for (uint64_t i = 0; i < pieces->n_pieces; i++) {
        const piece *p = &pieces->pieces[i];
        piece_ranges ranges = piece_ranges_of(plan, p);
        if (work_stopped(stop))
            return give_up_list(&list, stop, error);
        bool another = !boxes && i > 0 && p->box != p[-1].box;
        if (another || is_request_full(open, &ranges)) {
            list.n_requests++;
            open = &list.requests[list.n_requests];
            *open = (read_request){.first_piece = i, .first_entry = n_entries};
        }
        bool whole = boxes && ranges.count == 1 && is_whole_box(p, boxes, keys);
        add_read_piece(&list, open, &n_entries, p, &ranges, whole);
    }
    list.n_requests += open->n_pieces > 0;
    /* Reserved for the worst case; most lists are a few entries. */
    array_shrink(&list.entries, n_entries, sizeof *list.entries);
    array_shrink(&list.requests, list.n_requests, sizeof *list.requests);
    *out = list;
    return FANIN_OK;
}
