/* SPDX-License-Identifier: Apache-2.0 */
#include "error_set.h"
#include "plan/plan_internal.h"

#include <stdlib.h>

/* Pieces of one source, while they are collected. */
typedef struct collector {
    uint64_t capacity;
    uint64_t key_start; /* first piece of the present key */
    uint32_t key;
    bool disordered; /* this key's pieces are to be sorted */
} collector;

typedef struct builder {
    const plan_target *targets;
    const uint64_t *to_of_key;
    uint32_t convert; /* what becomes of F32 */
    uint64_t seed;
    cover cover;
    fill_set fills;
    uint32_t *fill_of;   /* by target */
    uint64_t *key_first; /* targets of key k: by_key[key_first[k] ..] */
    uint32_t *by_key;
    collector *collectors;
    uint32_t *disordered; /* sources */
    size_t n_disordered;
    plan *plan;
} builder;

static fanin_status refuse_target(const key_table *keys, const plan_target *t,
                                  const char *why, fanin_error *error)
{
    const char *name = t->key < keys->count ? keys->entries[t->key].name : "";
    error_place place = {.phase = "plan", .key = name};
    return error_set(error, FANIN_ERR_ARGUMENT, &place, "a block wanted of %.256s %s",
                     *name ? name : "a tensor", why);
}

/* Whether the last dimension's offset and extent are whole units. */
static bool block_on_units(const block *b, dtype_unit unit)
{
    if (b->n_dims == 0)
        return unit.elements == 1;
    return b->offset[b->n_dims - 1] % unit.elements == 0 &&
           b->extent[b->n_dims - 1] % unit.elements == 0;
}

static fanin_status check_plan_targets(const key_table *keys,
                                       const plan_target *targets, size_t n,
                                       const plan_rules *rules, fanin_error *error)
{
    work_stop *stop = rules->stop;
    if (n >= PLAN_NONE)
        return error_set(error, FANIN_ERR_ARGUMENT, NULL, "too many blocks wanted");
    for (size_t i = 0; i < n; i++) {
        const plan_target *t = &targets[i];
        if (work_stopped(stop))
            return plan_broken_off(stop, error);
        if (t->key >= keys->count)
            return refuse_target(keys, t, "that is not in the key table", error);
        if (rules->keys && !key_set_has(rules->keys, t->key))
            return refuse_target(keys, t, "that the tables do not tell of", error);
        const key_entry *e = &keys->entries[t->key];
        if (t->block.n_dims != e->n_dims)
            return refuse_target(keys, t, "has another number of dimensions", error);
        if (!block_inside(&t->block, e->shape))
            return refuse_target(keys, t, "lies outside of the tensor", error);
        if (!block_on_units(&t->block, dtype_get_unit(e->dtype)))
            return refuse_target(
                keys, t, "does not begin and end on whole bytes in the last dimension",
                error);
    }
    return FANIN_OK;
}

static uint32_t target_convert(const builder *b, uint32_t key)
{
    return b->convert != CONVERT_NONE &&
                   b->cover.keys->entries[key].dtype == FANIN_DTYPE_F32
               ? b->convert
               : CONVERT_NONE;
}

/* The reader has named no memory, of which the dtype would say what is wanted. */
static uint32_t convert_whole(const builder *b, uint32_t key)
{
    return b->cover.keys->entries[key].keep ? CONVERT_NONE : target_convert(b, key);
}

/* Whole tensors: a fill a key is the geometry's; here the uses are counted. */
static bool fill_keys(builder *b)
{
    cover *c = &b->cover;
    uint32_t id;
    for (uint32_t key = 0; key < c->keys->count; key++) {
        if (work_stopped(c->stop) ||
            !fill_whole(&b->fills, c, c->of_key[key], convert_whole(b, key), &id))
            return false;
        b->fills.fills[id].uses++;
    }
    b->plan->bytes = c->keys->bytes;
    b->plan->tensors = c->keys->count;
    return true;
}

static bool fill_targets(builder *b, size_t n)
{
    const key_table *keys = b->cover.keys;
    b->fill_of = malloc((n + 1) * sizeof *b->fill_of);
    b->by_key = malloc((n + 1) * sizeof *b->by_key);
    b->key_first = calloc((size_t)keys->count + 2, sizeof *b->key_first);
    if (!b->fill_of || !b->by_key || !b->key_first)
        return false;
    for (size_t i = 0; i < n; i++) {
        const plan_target *t = &b->targets[i];
        uint64_t bytes = 0;
        if (work_stopped(b->cover.stop) ||
            !fill_target(&b->fills, &b->cover, b->cover.of_key[t->key],
                         t->as_is ? CONVERT_NONE : target_convert(b, t->key), t,
                         &b->fill_of[i]))
            return false;
        b->fills.fills[b->fill_of[i]].uses++;
        dtype_bytes(keys->entries[t->key].dtype, t->block.n_dims, t->block.extent,
                    &bytes);
        b->plan->bytes += bytes;
        b->plan->tensors += b->key_first[t->key + 2]++ == 0;
    }
    /* Counts to starts; starts are moved on while by_key is filled, and end one further. */
    for (size_t k = 2; k < (size_t)keys->count + 2; k++)
        b->key_first[k] += b->key_first[k - 1];
    for (size_t i = 0; i < n; i++)
        b->by_key[b->key_first[b->targets[i].key + 1]++] = (uint32_t)i;
    return true;
}

/* The fills are made: their views become the plan's. */
static bool take_views(builder *b)
{
    plan *p = b->plan;
    view_set *views = &b->fills.views;
    if (!views_read(views, b->cover.stop, &p->readings))
        return false;
    array_shrink(&views->views, views->n, sizeof *views->views);
    p->views = views->views;
    p->n_views = (uint32_t)views->n;
    views->views = NULL;
    return true;
}

/* Counts what is wanted of each class. Balancing matters only where there is a choice. */
static bool share_out(builder *b)
{
    cover *c = &b->cover;
    for (uint64_t i = 0; i < b->fills.n; i++) {
        const fill *f = &b->fills.fills[i];
        const geometry *g = &c->geometries[f->geometry];
        for (uint64_t j = f->first; j < f->first + f->count; j++) {
            const piece *p = &b->fills.templates[j];
            holder_class *k = &c->classes[g->class_of[p->box]];
            if (work_stopped(c->stop))
                return false;
            k->weight += piece_bytes(b->plan, p) * f->uses;
            k->pieces += f->uses;
        }
    }
    return c->n_classes == c->n_sources || classes_balance(c, b->seed);
}

/* Exact where a box has one holder, near to it where replicas share. */
static bool reserve_pieces(builder *b)
{
    const cover *c = &b->cover;
    uint64_t *wanted = calloc(c->n_sources + 1, sizeof *wanted);
    bool ok = wanted != NULL;
    for (uint64_t i = 0; i < c->n_classes && ok; i++) {
        const holder_class *k = &c->classes[i];
        ok = !work_stopped(c->stop);
        for (uint32_t j = 0; j < k->count; j++)
            wanted[c->class_sources[k->first + j]] += k->pieces / k->count;
    }
    for (size_t s = 0; s < c->n_sources && ok; s++)
        ok = wanted[s] == 0 ||
             array_reserve(&b->plan->ranks[s].pieces, &b->collectors[s].capacity,
                           wanted[s], sizeof(piece));
    free(wanted);
    return ok;
}

static bool is_before(const piece *a, const piece *b)
{
    return a->box != b->box ? a->box < b->box : a->offset < b->offset;
}

/* Once the work is to stop all are equal, so that sorting ends soon. */
static int compare_pieces(const void *a, const void *b, void *stop)
{
    if (work_stopped(stop))
        return 0;
    return is_before(a, b) ? -1 : is_before(b, a);
}

static bool push_piece(builder *b, uint32_t source, uint32_t key, const piece *p)
{
    plan_rank *r = &b->plan->ranks[source];
    collector *k = &b->collectors[source];
    if (r->n_pieces == k->capacity &&
        !array_reserve(&r->pieces, &k->capacity, r->n_pieces + 1, sizeof *r->pieces))
        return false;
    if (k->key != key) {
        k->key = key;
        k->key_start = r->n_pieces;
    } else if (!k->disordered && is_before(p, &r->pieces[r->n_pieces - 1])) {
        k->disordered = true;
        b->disordered[b->n_disordered++] = source;
    }
    r->pieces[r->n_pieces++] = *p;
    r->bytes += piece_bytes(b->plan, p);
    return true;
}

/* Whether so much is wanted of the box whose first template that is that several holders share it.
   */
static bool is_large(const builder *b, const fill *f, uint64_t first)
{
    const piece *templates = b->fills.templates;
    uint64_t bytes = 0;
    for (uint64_t i = first;
         i < f->first + f->count && templates[i].box == templates[first].box; i++)
        bytes += piece_bytes(b->plan, &templates[i]);
    return bytes > PLAN_SPLIT;
}

static bool emit(builder *b, uint32_t key, const fill *f, uint64_t to, uint32_t group)
{
    cover *c = &b->cover;
    const geometry *g = &c->geometries[f->geometry];
    uint32_t last = PLAN_NONE;
    bool large = false;
    for (uint64_t i = f->first; i < f->first + f->count; i++) {
        piece p = b->fills.templates[i];
        uint32_t u = p.box, class_id = g->class_of[u];
        const holder *h = &g->holders[g->first[u]];
        if (class_id >= c->n_sources) {
            holder_class *k = &c->classes[class_id];
            large = u == last ? large : is_large(b, f, i);
            last = u;
            h += class_holder(c, k, key, large);
            k->given += piece_bytes(b->plan, &p);
        }
        p.box = (uint32_t)(c->cursor[h->source] + h->local);
        p.to += to;
        p.group = group;
        if (work_stopped(c->stop) || !push_piece(b, h->source, key, &p))
            return false;
    }
    return true;
}

/* Several targets of one key, or boxes in odd order: only such keys need sorting. */
static void sort_key(builder *b)
{
    while (b->n_disordered > 0) {
        uint32_t source = b->disordered[--b->n_disordered];
        plan_rank *r = &b->plan->ranks[source];
        collector *k = &b->collectors[source];
        qsort_r(r->pieces + k->key_start, r->n_pieces - k->key_start, sizeof *r->pieces,
                compare_pieces, b->cover.stop);
        k->disordered = false;
    }
}

static bool emit_key(builder *b, uint32_t key)
{
    const cover *c = &b->cover;
    if (!b->targets) {
        const geometry *g = &c->geometries[c->of_key[key]];
        const fill *f =
            &b->fills.fills[g->whole[convert_whole(b, key) != CONVERT_NONE]];
        return emit(b, key, f, b->to_of_key[key], key);
    }
    for (uint64_t i = b->key_first[key]; i < b->key_first[key + 1]; i++) {
        uint32_t target = b->by_key[i];
        const plan_target *t = &b->targets[target];
        if (!emit(b, key, &b->fills.fills[b->fill_of[target]], t->to, t->group))
            return false;
    }
    return true;
}

static bool emit_range(builder *b, const key_range *keys)
{
    cover *c = &b->cover;
    cover_seek(c, keys);
    for (uint32_t key = keys->first; key - keys->first < keys->count; key++) {
        const geometry *g = &c->geometries[c->of_key[key]];
        if (!emit_key(b, key))
            return false;
        sort_key(b);
        if (work_stopped(c->stop))
            return false;
        for (uint32_t i = 0; i < g->n_owners; i++)
            c->cursor[g->sources[i]]++;
    }
    return true;
}

static bool emit_all(builder *b)
{
    cover *c = &b->cover;
    b->collectors = calloc(c->n_sources + 1, sizeof *b->collectors);
    b->disordered = malloc((c->n_sources + 1) * sizeof *b->disordered);
    if (!b->collectors || !b->disordered)
        return false;
    for (size_t s = 0; s < c->n_sources; s++)
        b->collectors[s] = (collector){.key = PLAN_NONE};
    if (!reserve_pieces(b))
        return false;
    for (size_t i = 0; i < c->proven.n; i++)
        if (!emit_range(b, &c->proven.ranges[i]))
            return false;
    return true;
}

static void finish_plan(builder *b)
{
    plan *p = b->plan;
    for (size_t s = 0; s < p->n_ranks; s++) {
        array_shrink(&p->ranks[s].pieces, p->ranks[s].n_pieces, sizeof(piece));
        p->has_replicas =
            p->has_replicas ||
            (!b->cover.sole[s] && box_table_count(b->cover.sources[s].boxes) > 0);
    }
}

static plan *plan_new(size_t n_sources)
{
    plan *p = calloc(1, sizeof *p);
    if (!p)
        return NULL;
    p->n_ranks = n_sources;
    p->ranks = calloc(n_sources + 1, sizeof *p->ranks);
    if (!p->ranks)
        plan_free(&p);
    return p;
}

fanin_status plan_build(const key_table *keys, const plan_source *sources,
                        size_t n_sources, const plan_target *targets, size_t n_targets,
                        const uint64_t *to_of_key, const plan_rules *rules, plan **out,
                        fanin_error *error)
{
    builder b = {.targets = n_targets ? targets : NULL,
                 .to_of_key = to_of_key,
                 .seed = rules->seed};
    fanin_dtype dtype = rules->dtype;
    work_stop *stop = rules->stop;
    int convert = dtype == 0 ? CONVERT_NONE : convert_between(FANIN_DTYPE_F32, dtype);
    *out = NULL;
    if (convert < 0)
        return error_set(error, FANIN_ERR_ARGUMENT, NULL,
                         "F32 tensors are not converted to %s",
                         fanin_dtype_name(dtype) ? fanin_dtype_name(dtype)
                                                 : "a dtype of that number");
    b.convert = (uint32_t)convert;
    if (n_targets == 0 && keys->count > 0 && !to_of_key)
        return error_set(error, FANIN_ERR_ARGUMENT, NULL, "nothing is wanted");
    fanin_status status = check_plan_targets(keys, targets, n_targets, rules, error);
    if (status != FANIN_OK)
        return status;
    status = cover_build(&b.cover, keys, sources, n_sources, rules, error);
    if (status == FANIN_OK) {
        b.plan = plan_new(n_sources);
        if (b.plan && (n_targets ? fill_targets(&b, n_targets) : fill_keys(&b)) &&
            take_views(&b) && share_out(&b) && emit_all(&b))
            finish_plan(&b);
        else
            status = plan_broken_off(stop, error);
    }
    cover_free(&b.cover);
    fill_set_free(&b.fills);
    free(b.fill_of);
    free(b.key_first);
    free(b.by_key);
    free(b.collectors);
    free(b.disordered);
    if (status != FANIN_OK)
        plan_free(&b.plan);
    *out = b.plan;
    return status;
}

void plan_free(plan **p)
{
    if (!*p)
        return;
    for (size_t i = 0; (*p)->ranks && i < (*p)->n_ranks; i++)
        free((*p)->ranks[i].pieces);
    free((*p)->ranks);
    free((*p)->views);
    free((*p)->readings);
    free(*p);
    *p = NULL;
}
