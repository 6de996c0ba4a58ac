/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Pieces become atoms (what one-sided memory holds of them), atoms are sorted by where they
 * lie, neighbours are joined.
 */
#include "error_set.h"
#include "plan/plan_internal.h"

#include <stdlib.h>
#include <string.h>

#define LENGTH_MIN 16 /* of a span: more than any unit */

typedef struct atom {
    uint64_t offset, length, to;
    uint32_t region, view;
} atom;

/* Where the box of the present piece lies, in units. */
typedef struct remote_box {
    uint32_t key, ordinal;
    uint32_t n_dims;
    uint32_t unit;
    uint64_t extent[FANIN_MAX_DIMS];
    int64_t packed[FANIN_MAX_DIMS]; /* strides of its packed bytes */
    const int64_t *stride; /* in the region: those or the place's, never a copy */
    box_place place;
} remote_box;

typedef struct spanner {
    const plan *plan;
    const key_table *keys;
    const plan_source *source;
    const region_table *regions;
    const span_rule *rule;
    work_stop *stop;
    cut_rule cut;
    remote_box box;
    uint64_t atom_from, atom_to; /* of the block that is being cut */
    atom *atoms;
    uint64_t n_atoms, atom_capacity;
    uint32_t *view_of; /* spans' view of a plan's view, 0: not copied yet */
    view_set views;
    plan_spans *spans;
    uint64_t span_capacity;
} spanner;

static bool add_atom(spanner *s, uint64_t offset, uint64_t length, uint64_t to,
                     uint32_t view)
{
    if (work_stopped(s->stop) ||
        !array_reserve(&s->atoms, &s->atom_capacity, s->n_atoms + 1, sizeof *s->atoms))
        return false;
    s->atoms[s->n_atoms++] = (atom){.offset = offset,
                                    .length = length,
                                    .to = to,
                                    .region = s->box.place.region,
                                    .view = view};
    return true;
}

static fanin_status refuse_box(const spanner *s, const char *why, fanin_error *error)
{
    const char *name = s->keys->entries[s->box.key].name;
    error_place place = {
        .phase = "plan", .key = name, .rank_plus_1 = (int32_t)s->source->rank + 1};
    return error_set(error, FANIN_ERR_PROTOCOL, &place, "rank %u places %.256s %s",
                     s->source->rank, name, why);
}

/* Whether all of the box's bytes are inside of its region, whatever its strides. */
static bool box_is_inside(const remote_box *b, uint64_t region_length)
{
    uint64_t low = b->place.offset, high = b->place.offset, reach;
    for (uint32_t i = 0; i < b->n_dims; i++) {
        uint64_t step =
            b->stride[i] < 0 ? -(uint64_t)b->stride[i] : (uint64_t)b->stride[i];
        if (__builtin_mul_overflow(b->extent[i] - 1, step, &reach))
            return false;
        if (b->stride[i] < 0) {
            if (reach > low)
                return false;
            low -= reach;
        } else if (__builtin_add_overflow(high, reach, &high)) {
            return false;
        }
    }
    return !__builtin_add_overflow(high, b->unit, &high) && high <= region_length;
}

static fanin_status open_box(spanner *s, uint32_t ordinal, fanin_error *error)
{
    remote_box *r = &s->box;
    uint64_t unused[FANIN_MAX_DIMS];
    block b;
    box_table_get(s->source->boxes, ordinal, &r->key, &b, &r->place);
    dtype_unit unit = dtype_get_unit(s->keys->entries[r->key].dtype);
    r->ordinal = ordinal;
    r->unit = unit.bytes;
    r->n_dims = block_to_units(&b, unit, unused, r->extent);
    block_packed_strides(r->n_dims, r->extent, r->unit, r->packed);
    bool packed = r->place.packed || b.n_dims == 0;
    r->stride = packed ? r->packed : r->place.stride;
    r->place.packed = packed;
    if (r->place.region >= s->regions->count)
        return refuse_box(s, "in a region that it does not list", error);
    if (!box_is_inside(r, s->regions->entries[r->place.region].length))
        return refuse_box(s, "outside of its region", error);
    return FANIN_OK;
}

/* Where the byte at @p packed of the view's source lands, as measured by a copy_block. */
static uint64_t view_land(const strided *v, uint64_t packed)
{
    uint64_t to = 0;
    if (!v)
        return packed;
    for (uint32_t i = 0; i < v->n_dims; i++) {
        uint64_t at = packed / (uint64_t)v->from[i];
        packed -= at * (uint64_t)v->from[i];
        to += at * (uint64_t)copy_measure(v->convert, v->to[i]);
    }
    return to + packed;
}

static int64_t negated(int64_t stride)
{
    return (int64_t)(0 - (uint64_t)stride);
}

/* Dimensions in the order in which memory is walked, upwards; start and landing follow. */
static void walk_upwards(copy_block *b, uint64_t *from, uint64_t *to)
{
    for (uint32_t i = 0; i < b->n_dims; i++) {
        uint64_t steps = b->extent[i] - 1;
        if (b->from[i] >= 0)
            continue;
        *from += steps * (uint64_t)b->from[i];
        *to += steps * (uint64_t)b->to[i];
        b->from[i] = negated(b->from[i]);
        b->to[i] = negated(b->to[i]);
    }
    for (uint32_t i = 1; i < b->n_dims; i++) {
        uint64_t extent = b->extent[i];
        int64_t stride = b->from[i], land = b->to[i];
        uint32_t j = i;
        for (; j > 0 && b->from[j - 1] < stride; j--) {
            b->extent[j] = b->extent[j - 1];
            b->from[j] = b->from[j - 1];
            b->to[j] = b->to[j - 1];
        }
        b->extent[j] = extent;
        b->from[j] = stride;
        b->to[j] = land;
    }
}

static bool add_span_part(void *cookie, const copy_block *part, uint64_t from,
                          uint64_t to, uint64_t length)
{
    spanner *s = cookie;
    uint32_t view;
    return view_of_block(&s->views, part, &view) &&
           add_atom(s, s->atom_from + from, length,
                    s->atom_to + (uint64_t)copy_landed(part->convert, (int64_t)to),
                    view);
}

/* A piece is the block between its first and its last element: each piece was cut as one
   (cut_block()). So its block can be told, and laid over the memory's own strides. */
static bool add_block(spanner *s, const piece *p)
{
    const remote_box *r = &s->box;
    uint64_t first = p->offset, last = p->offset + p->length - r->unit;
    const strided *view = p->view ? &s->plan->views[p->view - 1] : NULL;
    copy_block b = {.n_dims = r->n_dims, .unit = r->unit};
    b.convert = view ? view->convert : CONVERT_NONE;
    uint64_t turned = 0; /* how far the landing's start moves */
    s->atom_from = r->place.offset;
    for (uint32_t i = 0; i < r->n_dims; i++) {
        uint64_t step = (uint64_t)r->packed[i];
        uint64_t a = first / step, z = last / step;
        first -= a * step;
        last -= z * step;
        b.extent[i] = z - a + 1;
        b.from[i] = r->stride[i];
        b.to[i] = b.extent[i] > 1 ? (int64_t)view_land(view, step) : 0;
        s->atom_from += a * (uint64_t)r->stride[i];
        if (b.extent[i] == 1)
            b.from[i] = 0;
    }
    walk_upwards(&b, &s->atom_from, &turned);
    s->atom_to = p->to + (uint64_t)copy_landed(b.convert, (int64_t)turned);
    return cut_block(&b, &s->cut, add_span_part, s);
}

/* Whether what is between the piece's runs may be read, or stepped over, as one with them. */
static bool is_simple(const spanner *s, const piece *p)
{
    const strided *v = p->view ? &s->plan->views[p->view - 1] : NULL;
    return s->box.place.packed && p->length <= s->cut.max_length &&
           (!v || cut_joined(v->n_dims, v->extent, v->from, v->run, &s->cut) == 0);
}

static bool add_packed(spanner *s, const piece *p)
{
    uint32_t view = 0;
    if (p->view != 0) {
        uint32_t *known = &s->view_of[p->view - 1];
        if (*known == 0 && !view_intern(&s->views, &s->plan->views[p->view - 1], known))
            return false;
        view = *known;
    }
    return add_atom(s, s->box.place.offset + p->offset, p->length, p->to, view);
}

static fanin_status spans_broken_off(const spanner *s, fanin_error *error)
{
    return work_broken_off(s->stop, "plan", "one-sided reads were cut", error);
}

static fanin_status collect_parts(spanner *s, const plan_rank *r, fanin_error *error)
{
    for (uint64_t i = 0; i < r->n_pieces; i++) {
        const piece *p = &r->pieces[i];
        if (i == 0 || p->box != s->box.ordinal) {
            fanin_status status = open_box(s, p->box, error);
            if (status != FANIN_OK)
                return status;
        }
        if (!(is_simple(s, p) ? add_packed(s, p) : add_block(s, p)))
            return spans_broken_off(s, error);
    }
    return FANIN_OK;
}

static bool lies_before(const atom *a, const atom *b)
{
    return a->region != b->region ? a->region < b->region : a->offset < b->offset;
}

/* Merges the sorted from[start .. middle) and from[middle .. end) into to. */
static void merge_runs(const atom *from, atom *to, uint64_t start, uint64_t middle,
                       uint64_t end, work_stop *stop)
{
    uint64_t a = start, b = middle;
    for (uint64_t i = start; i < end && !work_stopped(stop); i++) {
        bool second = b < end && (a == middle || lies_before(&from[b], &from[a]));
        to[i] = second ? from[b++] : from[a++];
    }
}

/* A merge sort that takes the order that is there: servers mostly list boxes as they lie. */
static bool sort_atoms(spanner *s)
{
    uint64_t n = s->n_atoms;
    atom *from = s->atoms, *to = NULL;
    for (;;) {
        uint64_t runs = 0;
        for (uint64_t i = 0; i < n && !work_stopped(s->stop); runs++) {
            uint64_t middle = i + 1, end;
            while (middle < n && !lies_before(&from[middle], &from[middle - 1]))
                middle++;
            end = middle < n ? middle + 1 : n;
            while (end < n && !lies_before(&from[end], &from[end - 1]))
                end++;
            if (i == 0 && middle >= n)
                break;
            if (!to && !(to = array_large(n, sizeof *to)))
                return false;
            merge_runs(from, to, i, middle, end, s->stop);
            i = end;
        }
        if (runs == 0 || work_stopped(s->stop))
            break;
        atom *swap = from;
        from = to;
        to = swap;
    }
    free(to);
    s->atoms = from;
    return !work_stopped(s->stop);
}

/* Contiguous atoms that follow one another on both sides are one. */
static void fuse_atoms(spanner *s)
{
    uint64_t kept = 0;
    for (uint64_t i = 0; i < s->n_atoms && !work_stopped(s->stop); i++) {
        const atom *a = &s->atoms[i];
        atom *last = kept > 0 ? &s->atoms[kept - 1] : NULL;
        if (last && last->view == 0 && a->view == 0 && last->region == a->region &&
            last->offset + last->length == a->offset &&
            last->to + last->length == a->to &&
            last->length + a->length <= s->rule->max_length)
            last->length += a->length;
        else
            s->atoms[kept++] = *a;
    }
    s->n_atoms = kept;
}

static bool is_large_span(const spanner *s, const atom *a)
{
    return a->view == 0 && a->length >= s->rule->direct_from;
}

/* Whether the open span may grow by @p a; *length_out: its length then. */
static bool may_join(const spanner *s, const span *open, const atom *a,
                     uint64_t *length_out)
{
    uint64_t start = a->offset - open->offset;
    if (a->region != open->region ||
        (start > open->length && start - open->length > s->rule->max_gap))
        return false;
    uint64_t end = start + a->length;
    *length_out = end > open->length ? end : open->length;
    return *length_out <= s->rule->max_length;
}

/* Each atom becomes the piece in its place: memory that nobody has touched yet costs more than all
   that is done here with it. */
static void become_piece(atom *a, uint64_t span_offset)
{
    const span_piece p = {.offset = a->offset - span_offset,
                          .length = a->length,
                          .to = a->to,
                          .view = a->view};
    memcpy(a, &p, sizeof p);
}

_Static_assert(sizeof(span_piece) == sizeof(atom), "a piece takes its atom's place");

/* The atoms become the pieces. */
static bool join_atoms(spanner *s)
{
    plan_spans *out = s->spans;
    bool closed = true;
    /* For kernels nothing is joined. */
    if (s->rule->walks_views &&
        !array_reserve(&out->spans, &s->span_capacity, s->n_atoms, sizeof *out->spans))
        return false;
    for (uint64_t i = 0; i < s->n_atoms; i++) {
        atom *a = &s->atoms[i];
        span *open = out->n_spans ? &out->spans[out->n_spans - 1] : NULL;
        uint64_t length;
        if (work_stopped(s->stop))
            return false;
        if (closed || is_large_span(s, a) || !may_join(s, open, a, &length)) {
            if (!array_reserve(&out->spans, &s->span_capacity, out->n_spans + 1,
                               sizeof *out->spans))
                return false;
            open = &out->spans[out->n_spans++];
            *open = (span){.region = a->region, .offset = a->offset, .first = i};
            length = a->length;
        }
        closed = is_large_span(s, a);
        open->length = length;
        open->count++;
        open->direct = open->count == 1 && a->view == 0;
        become_piece(a, open->offset);
    }
    out->pieces = (span_piece *)(void *)s->atoms;
    out->n_pieces = s->n_atoms;
    s->atoms = NULL;
    return true;
}

static fanin_status build(spanner *s, const plan_rank *r, fanin_error *error)
{
    s->view_of = calloc((size_t)s->plan->n_views + 1, sizeof *s->view_of);
    s->spans = calloc(1, sizeof *s->spans);
    if (!s->view_of || !s->spans ||
        !array_reserve(&s->atoms, &s->atom_capacity, r->n_pieces + 1, sizeof *s->atoms))
        return error_set_memory(error);
    fanin_status status = collect_parts(s, r, error);
    if (status != FANIN_OK)
        return status;
    if (!sort_atoms(s))
        return spans_broken_off(s, error);
    fuse_atoms(s);
    if (!join_atoms(s))
        return spans_broken_off(s, error);
    array_shrink(&s->spans->spans, s->spans->n_spans, sizeof(span));
    array_shrink(&s->spans->pieces, s->spans->n_pieces, sizeof(span_piece));
    s->spans->views = s->views.views;
    s->spans->n_views = (uint32_t)s->views.n;
    s->views.views = NULL;
    return FANIN_OK;
}

fanin_status plan_spans_build(const plan *plan, const key_table *keys,
                              const plan_source *sources, size_t index,
                              const region_table *regions, const span_rule *rule,
                              work_stop *stop, plan_spans **out, fanin_error *error)
{
    *out = NULL;
    if (index >= plan->n_ranks || rule->max_length < LENGTH_MIN)
        return error_set(error, FANIN_ERR_ARGUMENT, NULL,
                         "no such rank in the plan, or spans shorter than %d bytes",
                         LENGTH_MIN);
    static const cut_rule uncut = {
        .max_length = UINT64_MAX, .short_run = UINT64_MAX, .max_gap = UINT64_MAX};
    spanner s = {
        .plan = plan,
        .keys = keys,
        .source = &sources[index],
        .regions = regions,
        .rule = rule,
        .stop = stop,
        .cut = {.max_length = rule->max_length,
                .short_run = rule->short_run ? rule->short_run : rule->direct_from,
                .max_gap = rule->max_gap}};
    if (rule->walks_views)
        s.cut = uncut;
    fanin_status status = build(&s, &plan->ranks[index], error);
    free(s.atoms);
    free(s.view_of);
    view_set_free(&s.views);
    if (status != FANIN_OK)
        plan_spans_free(&s.spans);
    *out = s.spans;
    return status;
}

void plan_spans_free(plan_spans **spans)
{
    if (!*spans)
        return;
    free((*spans)->spans);
    free((*spans)->pieces);
    free((*spans)->views);
    free(*spans);
    *spans = NULL;
}
