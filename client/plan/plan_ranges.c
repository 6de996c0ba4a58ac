/* SPDX-License-Identifier: Apache-2.0 */
/* Pieces for paths that ask for bytes by ranges: they are told range by range, never kept so. */
#include "messages.h"
#include "plan/plan_internal.h"

#include <stdlib.h>

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
