/* SPDX-License-Identifier: Apache-2.0 */
#include "plan_world.h"

#include "convert.h"
#include "testing.h"

#define UNTOUCHED 0xEE

uint64_t world_random(world *w, uint64_t below)
{
    w->random += 0x9E3779B97F4A7C15;
    uint64_t x = w->random;
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9;
    x = (x ^ x >> 27) * 0x94D049BB133111EB;
    x ^= x >> 31;
    return below ? x % below : x;
}

uint8_t world_byte(uint32_t key, uint64_t index)
{
    uint64_t x = (index + 1) * 0x9E3779B97F4A7C15 + (key + 1) * 0xD1B54A32D192ED03;
    x = (x ^ x >> 31) * 0xBF58476D1CE4E5B9;
    uint8_t byte = (uint8_t)(x >> 56);
    return byte == UNTOUCHED ? 0 : byte;
}

void world_init(world *w, uint32_t n_ranks, uint64_t seed)
{
    memset(w, 0, sizeof *w);
    w->n_ranks = n_ranks;
    w->random = seed;
}

uint32_t world_key(world *w, fanin_dtype dtype, uint32_t n_dims, const uint64_t *shape)
{
    w->entries = realloc(w->entries, (w->n_keys + 1) * sizeof *w->entries);
    assert_non_null(w->entries);
    key_entry *e = &w->entries[w->n_keys];
    char *name = malloc(16);
    assert_non_null(name);
    snprintf(name, 16, "key%05u", w->n_keys);
    *e = (key_entry){.name = name, .dtype = dtype, .n_dims = n_dims};
    for (uint32_t i = 0; i < n_dims; i++)
        e->shape[i] = shape[i];
    assert_true(dtype_bytes(dtype, n_dims, shape, &e->bytes));
    return w->n_keys++;
}

/* ---------------------------------------------------------- coordinates */

typedef struct units {
    uint32_t n, bytes;
    uint64_t offset[FANIN_MAX_DIMS], extent[FANIN_MAX_DIMS];
} units;

static units in_units(const key_entry *e, const block *b)
{
    dtype_unit unit = dtype_get_unit(e->dtype);
    units u = {.n = e->n_dims, .bytes = unit.bytes};
    for (uint32_t i = 0; i < e->n_dims; i++) {
        uint64_t by = i + 1 == e->n_dims ? unit.elements : 1;
        u.offset[i] = b->offset[i] / by;
        u.extent[i] = b->extent[i] / by;
    }
    return u;
}

static uint64_t volume(const units *u)
{
    uint64_t n = 1;
    for (uint32_t i = 0; i < u->n; i++)
        n *= u->extent[i];
    return n;
}

/* Coordinates of the unit with that row-major number. */
static void coordinates(const units *u, uint64_t number, uint64_t *at)
{
    for (uint32_t i = u->n; i-- > 0;) {
        at[i] = number % u->extent[i];
        number /= u->extent[i];
    }
}

static int64_t dot(uint32_t n, const uint64_t *at, const int64_t *stride)
{
    int64_t sum = 0;
    for (uint32_t i = 0; i < n; i++)
        sum += (int64_t)at[i] * stride[i];
    return sum;
}

static void packed_strides(const units *u, int64_t *stride)
{
    int64_t step = u->bytes;
    for (uint32_t i = u->n; i-- > 0;) {
        stride[i] = step;
        step *= (int64_t)u->extent[i];
    }
}

static units whole_tensor(const key_entry *e)
{
    block all = {.n_dims = e->n_dims};
    for (uint32_t i = 0; i < e->n_dims; i++)
        all.extent[i] = e->shape[i];
    return in_units(e, &all);
}

/* Number of a block's unit in the whole tensor. */
static uint64_t number_in(const units *whole, const units *u, const uint64_t *at)
{
    uint64_t number = 0;
    for (uint32_t i = 0; i < u->n; i++)
        number = number * whole->extent[i] + u->offset[i] + at[i];
    return number;
}

/* ---------------------------------------------------------------- boxes */

/* Random strides that never make two elements meet; *size_out: bytes from lowest to end,
   *first_out: where the first element is in them. */
static void spread(world *w, const units *u, world_layout layout, int64_t *stride,
                   uint64_t *size_out, uint64_t *first_out)
{
    uint32_t order[FANIN_MAX_DIMS];
    uint64_t size = u->bytes, first = 0;
    for (uint32_t i = 0; i < u->n; i++)
        order[i] = i;
    for (uint32_t i = u->n; layout == LAYOUT_MIXED && i > 1; i--) {
        uint32_t j = (uint32_t)world_random(w, i), keep = order[i - 1];
        order[i - 1] = order[j];
        order[j] = keep;
    }
    for (uint32_t i = u->n; i-- > 0;) {
        uint32_t dim = order[i];
        uint64_t room = 0;
        if (layout == LAYOUT_ROWS && i + 2 >= u->n && i + 1 != u->n)
            room = world_random(w, 3) * u->bytes;
        if (layout == LAYOUT_MIXED)
            room = world_random(w, 3) == 0 ? world_random(w, 9) : 0;
        uint64_t step = size + room;
        bool back = layout == LAYOUT_MIXED && world_random(w, 4) == 0;
        stride[dim] = back ? -(int64_t)step : (int64_t)step;
        first += back ? step * (u->extent[dim] - 1) : 0;
        size += step * (u->extent[dim] - 1);
    }
    *size_out = size;
    *first_out = first;
}

void world_hold(world *w, uint32_t rank, uint32_t key, const block *b, uint32_t region,
                uint64_t gap, world_layout layout)
{
    world_rank *r = &w->ranks[rank];
    units u = in_units(&w->entries[key], b);
    box_record record = {.key = key, .block = *b};
    uint64_t size, first = 0;
    record.place.region = region;
    record.place.packed = layout == LAYOUT_PACKED || u.n == 0;
    if (record.place.packed)
        size = volume(&u) * u.bytes;
    else
        spread(w, &u, layout, record.place.stride, &size, &first);
    record.place.offset = r->used[region] + gap + first;
    r->used[region] += gap + size;
    if (r->n_records == r->capacity) {
        r->capacity = r->capacity ? 2 * r->capacity : 16;
        r->records = realloc(r->records, r->capacity * sizeof *r->records);
        assert_non_null(r->records);
    }
    r->records[r->n_records++] = record;
}

void world_hold_chunks(world *w, uint32_t rank, uint32_t dim, uint32_t parts,
                       uint32_t index)
{
    for (uint32_t key = 0; key < w->n_keys; key++) {
        const key_entry *e = &w->entries[key];
        block b = block_chunk(e->n_dims, e->shape, dim, parts, index);
        if (!block_is_empty(&b))
            world_hold(w, rank, key, &b, 0, world_random(w, 2) * 64, LAYOUT_PACKED);
    }
}

static void fill_box(const world *w, world_rank *r, const box_record *record)
{
    const key_entry *e = &w->entries[record->key];
    units u = in_units(e, &record->block), whole = whole_tensor(e);
    uint64_t at[FANIN_MAX_DIMS];
    int64_t stride[FANIN_MAX_DIMS];
    memcpy(stride, record->place.stride, sizeof stride);
    if (record->place.packed)
        packed_strides(&u, stride);
    for (uint64_t i = 0; i < volume(&u); i++) {
        coordinates(&u, i, at);
        uint64_t number = number_in(&whole, &u, at);
        uint64_t to = record->place.offset + (uint64_t)dot(u.n, at, stride);
        for (uint32_t k = 0; k < u.bytes; k++)
            r->memory[record->place.region][to + k] =
                world_byte(record->key, number * u.bytes + k);
    }
}

void world_seal(world *w, const bool *leave_out)
{
    buffer blob = {0};
    fanin_error error = FANIN_ERROR_INIT;
    key_table_encode(&blob, w->entries, w->n_keys, NULL, 0);
    assert_int_equal(key_table_decode(blob.data, blob.size, NULL, &w->keys, &error),
                     FANIN_OK);
    buffer_free(&blob);
    w->n_sources = 0;
    for (uint32_t i = 0; i < w->n_ranks; i++) {
        world_rank *r = &w->ranks[i];
        for (int k = 0; k < WORLD_REGIONS; k++) {
            r->memory[k] = malloc(r->used[k] + 1);
            assert_non_null(r->memory[k]);
            memset(r->memory[k], 0xAA, r->used[k] + 1);
        }
        for (uint64_t k = 0; k < r->n_records; k++)
            fill_box(w, r, &r->records[k]);
        box_table_encode(&blob, w->keys->entries, w->keys->count, r->records,
                         r->n_records, i, w->n_ranks);
        fanin_status status =
            box_table_decode(blob.data, blob.size, w->keys, NULL, &r->boxes, &error);
        if (status != FANIN_OK)
            fail_msg("box table of rank %u: %s", i, error.message);
        buffer_free(&blob);
        if (!leave_out || !leave_out[i])
            w->sources[w->n_sources++] = (plan_source){.rank = i, .boxes = r->boxes};
    }
}

void world_free(world *w)
{
    for (uint32_t i = 0; i < w->n_ranks; i++) {
        box_table_free(&w->ranks[i].boxes);
        free(w->ranks[i].records);
        for (int k = 0; k < WORLD_REGIONS; k++)
            free(w->ranks[i].memory[k]);
    }
    key_table_free(&w->keys);
    for (uint32_t i = 0; i < w->n_keys; i++)
        free((char *)(uintptr_t)w->entries[i].name);
    free(w->entries);
}

/* ------------------------------------------------------------- landings */

static uint32_t convert_of(const landing *l, const key_entry *e)
{
    return l->dtype ? (uint32_t)(e->dtype == FANIN_DTYPE_F32) *
                          (uint32_t)convert_between(FANIN_DTYPE_F32, l->dtype)
                    : CONVERT_NONE;
}

static uint32_t target_convert_of(const landing *l, const key_entry *e,
                                  const plan_target *t)
{
    return t->as_is ? CONVERT_NONE : convert_of(l, e);
}

void landing_init(landing *l, fanin_dtype dtype)
{
    *l = (landing){.dtype = dtype};
}

void landing_whole(landing *l, const world *w, fanin_dtype dtype)
{
    *l = (landing){.to_of_key = calloc(w->n_keys + 1, sizeof *l->to_of_key),
                   .dtype = dtype};
    assert_non_null(l->to_of_key);
    for (uint32_t i = 0; i < w->n_keys; i++) {
        const key_entry *e = &w->entries[i];
        l->to_of_key[i] = l->size;
        l->size += convert_bytes(convert_of(l, e), e->bytes) + i % 3;
    }
    l->bytes = malloc(l->size + 1);
    assert_non_null(l->bytes);
}

void landing_add(landing *l, world *w, uint32_t key, const block *b, bool strided)
{
    plan_target t = {
        .key = key, .block = *b, .as_is = l->as_is, .group = (uint32_t)l->n_targets};
    units u = in_units(&w->entries[key], b);
    u.bytes =
        (uint32_t)convert_bytes(target_convert_of(l, &w->entries[key], &t), u.bytes);
    uint64_t size = volume(&u) * u.bytes, first = 0;
    if (strided && size > 0)
        spread(w, &u, world_random(w, 2) ? LAYOUT_ROWS : LAYOUT_MIXED, t.stride, &size,
               &first);
    t.to = l->size + first;
    l->size += size + world_random(w, 3);
    l->targets = realloc(l->targets, (l->n_targets + 1) * sizeof *l->targets);
    l->bytes = realloc(l->bytes, l->size + 1);
    assert_non_null(l->targets);
    assert_non_null(l->bytes);
    l->targets[l->n_targets++] = t;
}

void landing_free(landing *l)
{
    free(l->bytes);
    free(l->targets);
    free(l->to_of_key);
    *l = (landing){0};
}

fanin_status world_plan(const world *w, const landing *l, plan **out,
                        fanin_error *error)
{
    plan_rules rules = {.dtype = l->dtype, .seed = w->seed};
    return plan_build(w->keys, w->sources, w->n_sources, l->targets, l->n_targets,
                      l->to_of_key, &rules, out, error);
}

/* One unit of a tensor, as it is to land. */
static void expect_unit(uint32_t key, uint64_t number, uint32_t bytes, uint32_t convert,
                        uint8_t *expected)
{
    uint8_t unit[16];
    for (uint32_t k = 0; k < bytes; k++)
        unit[k] = world_byte(key, number * bytes + k);
    convert_run(convert, expected, unit, bytes);
}

/* What must lie at the landing, unit by unit, without any of the planner's arithmetic. */
static void expect_target(const world *w, const landing *l, const plan_target *t,
                          uint8_t *expected)
{
    const key_entry *e = &w->entries[t->key];
    units u = in_units(e, &t->block), landed = u, whole = whole_tensor(e);
    uint32_t convert = target_convert_of(l, e, t);
    uint64_t at[FANIN_MAX_DIMS];
    int64_t stride[FANIN_MAX_DIMS];
    bool packed = true;
    landed.bytes = (uint32_t)convert_bytes(convert, u.bytes);
    for (uint32_t i = 0; i < u.n; i++) {
        stride[i] = t->stride[i];
        packed = packed && stride[i] == 0;
    }
    if (packed)
        packed_strides(&landed, stride);
    for (uint64_t i = 0; i < volume(&u); i++) {
        coordinates(&u, i, at);
        uint64_t number = number_in(&whole, &u, at);
        uint64_t to = t->to + (uint64_t)dot(u.n, at, stride);
        expect_unit(t->key, number, u.bytes, convert, expected + to);
    }
}

void landing_clear(landing *l)
{
    memset(l->bytes, UNTOUCHED, l->size + 1);
}

void landing_compare(const world *w, const landing *l)
{
    uint8_t *expected = malloc(l->size + 1);
    assert_non_null(expected);
    memset(expected, UNTOUCHED, l->size + 1);
    for (size_t i = 0; i < l->n_targets; i++)
        expect_target(w, l, &l->targets[i], expected);
    for (uint32_t i = 0; l->to_of_key && i < w->n_keys; i++) {
        const key_entry *e = &w->entries[i];
        uint32_t convert = convert_of(l, e), unit = dtype_get_unit(e->dtype).bytes;
        for (uint64_t k = 0; k < e->bytes / unit; k++)
            expect_unit(i, k, unit, convert,
                        expected + l->to_of_key[i] + k * convert_bytes(convert, unit));
    }
    for (uint64_t i = 0; i < l->size; i++)
        if (expected[i] != l->bytes[i])
            fail_msg("byte %llu of %llu is %02x instead of %02x", (unsigned long long)i,
                     (unsigned long long)l->size, l->bytes[i], expected[i]);
    free(expected);
}

/* -------------------------------------------------------------- executor */

static uint64_t wanted_bytes(const world *w, const landing *l)
{
    uint64_t bytes = 0;
    for (size_t i = 0; i < l->n_targets; i++) {
        units u = in_units(&w->entries[l->targets[i].key], &l->targets[i].block);
        bytes += volume(&u) * u.bytes;
    }
    for (uint32_t i = 0; l->to_of_key && i < w->n_keys; i++)
        bytes += w->entries[i].bytes;
    return bytes;
}

static uint64_t box_bytes(const world *w, const plan_source *source, uint32_t box,
                          uint32_t *key, block *b, box_place *place)
{
    box_table_get(source->boxes, box, key, b, place);
    units u = in_units(&w->entries[*key], b);
    return volume(&u) * u.bytes;
}

/* Of boxes that several sources hold, one source is asked. */
static void check_one_holder(const world *w, const plan *p, size_t source, uint32_t box)
{
    uint32_t key, other_key;
    block b, other;
    box_place place;
    box_bytes(w, &w->sources[source], box, &key, &b, &place);
    for (size_t s = 0; s < p->n_ranks; s++) {
        const plan_rank *r = &p->ranks[s];
        for (uint64_t i = 0; i < r->n_pieces && s != source; i++) {
            box_table_get(w->sources[s].boxes, r->pieces[i].box, &other_key, &other,
                          NULL);
            assert_false(key == other_key && block_equal(&b, &other));
        }
    }
}

void world_check_plan(const world *w, const landing *l, const plan *p)
{
    assert_int_equal(p->n_ranks, w->n_sources);
    assert_int_equal(p->bytes, wanted_bytes(w, l));
    for (size_t s = 0; s < p->n_ranks; s++) {
        const plan_rank *r = &p->ranks[s];
        uint64_t bytes = 0;
        for (uint64_t i = 0; i < r->n_pieces; i++) {
            const piece *a = &r->pieces[i];
            uint32_t key;
            block b;
            box_place place;
            assert_true(a->box < box_table_count(w->sources[s].boxes));
            uint64_t size = box_bytes(w, &w->sources[s], a->box, &key, &b, &place);
            assert_true(a->length > 0 && a->length <= PIECE_MAX);
            assert_true(a->offset < size && a->length <= size - a->offset);
            assert_true(a->view <= p->n_views);
            if (i > 0)
                assert_true(a[-1].box < a->box ||
                            (a[-1].box == a->box && a[-1].offset <= a->offset));
            if (i == 0 || a[-1].box != a->box)
                check_one_holder(w, p, s, a->box);
            bytes += piece_bytes(p, a);
        }
        assert_int_equal(bytes, r->bytes);
    }
}

/* The packed bytes of a box, as a server would send them. */
static uint8_t *pack_box(const world *w, size_t source, uint32_t box)
{
    const plan_source *from = &w->sources[source];
    uint32_t key;
    block b;
    box_place place;
    uint64_t at[FANIN_MAX_DIMS];
    uint8_t *packed = malloc(box_bytes(w, from, box, &key, &b, &place) + 1);
    assert_non_null(packed);
    units u = in_units(&w->entries[key], &b);
    if (place.packed)
        packed_strides(&u, place.stride);
    const uint8_t *memory = w->ranks[from->rank].memory[place.region];
    for (uint64_t i = 0; i < volume(&u); i++) {
        coordinates(&u, i, at);
        memcpy(packed + i * u.bytes,
               memory + place.offset + (uint64_t)dot(u.n, at, place.stride), u.bytes);
    }
    return packed;
}

/* The range a view touches on either side must lie in what it may touch. */
static void check_view(const strided *v, uint64_t length, const landing *l, uint64_t to)
{
    uint64_t reach = v->run;
    int64_t low = (int64_t)to;
    int64_t high = (int64_t)(to + convert_bytes(v->convert, v->run));
    for (uint32_t i = 0; i < v->n_dims; i++) {
        int64_t move = (int64_t)(v->extent[i] - 1) * v->to[i];
        reach += (v->extent[i] - 1) * (uint64_t)v->from[i];
        low += move < 0 ? move : 0;
        high += move > 0 ? move : 0;
    }
    assert_true(low >= 0 && (uint64_t)high <= l->size);
    /* Mixed layouts walk backwards inside of a span, never out of it. */
    assert_true(reach <= length);
}

static void land(const landing *l, const strided *views, uint32_t view,
                 const uint8_t *from, uint64_t length, uint64_t to)
{
    if (view == 0) {
        assert_true(to <= l->size && length <= l->size - to);
        memcpy(l->bytes + to, from, length);
    } else {
        check_view(&views[view - 1], length, l, to);
        strided_copy(&views[view - 1], l->bytes + to, from);
    }
}

static void land_pieces(const world *w, landing *l, const plan *p)
{
    for (size_t s = 0; s < p->n_ranks; s++) {
        uint8_t *packed = NULL;
        for (uint64_t i = 0; i < p->ranks[s].n_pieces; i++) {
            const piece *a = &p->ranks[s].pieces[i];
            if (i == 0 || a[-1].box != a->box) {
                free(packed);
                packed = pack_box(w, s, a->box);
            }
            land(l, p->views, a->view, packed + a->offset, a->length, a->to);
        }
        free(packed);
    }
}

/* As it comes from who is asked for ranges: one behind the other, inside of the piece. */
static void land_ranges(landing *l, const plan *p, const piece *a, const uint8_t *box)
{
    piece_ranges ranges = piece_ranges_of(p, a);
    uint64_t size = ranges.count * ranges.length, end = a->offset;
    assert_in_range(ranges.count, 1, PIECE_RANGES);
    assert_in_range(size, piece_bytes(p, a), a->length);
    uint8_t *came = malloc(size);
    assert_non_null(came);
    for (uint64_t i = 0; i < ranges.count; i++) {
        uint64_t at = piece_range_at(p, a, i);
        assert_true(at >= end);
        end = at + ranges.length;
        memcpy(came + i * ranges.length, box + at, ranges.length);
    }
    assert_int_equal(end, a->offset + a->length);
    uint32_t view = ranges.landing ? (uint32_t)(ranges.landing - p->views) + 1 : 0;
    land(l, p->views, view, came, size, a->to);
    free(came);
}

static void land_all_ranges(const world *w, landing *l, const plan *p)
{
    for (size_t s = 0; s < p->n_ranks; s++) {
        for (uint64_t i = 0; i < p->ranks[s].n_pieces; i++) {
            const piece *a = &p->ranks[s].pieces[i];
            uint8_t *packed = pack_box(w, s, a->box);
            land_ranges(l, p, a, packed);
            free(packed);
        }
    }
}

void world_execute(const world *w, landing *l, const plan *p)
{
    memset(l->bytes, UNTOUCHED, l->size + 1);
    land_pieces(w, l, p);
    landing_compare(w, l);
    memset(l->bytes, UNTOUCHED, l->size + 1);
    land_all_ranges(w, l, p);
    landing_compare(w, l);
}

/* ---------------------------------------------------------------- slices */

static bool is_in_runs(const group_run *runs, size_t n_runs, size_t group)
{
    bool is = false;
    for (size_t i = 0; i < n_runs; i++)
        is = is || (group >= runs[i].first && group - runs[i].first < runs[i].count);
    return is;
}

/* Pieces of these groups, in order, which reach where they land. */
static void check_slice(const plan *slice, const group_run *runs, size_t n_runs,
                        const landing *l)
{
    for (size_t s = 0; s < slice->n_ranks; s++) {
        const plan_rank *r = &slice->ranks[s];
        uint64_t bytes = 0;
        for (uint64_t i = 0; i < r->n_pieces; i++) {
            const piece *a = &r->pieces[i];
            uint64_t low, high;
            plan_piece_reach(slice, a, &low, &high);
            assert_true(is_in_runs(runs, n_runs, a->group));
            assert_true(low <= a->to && a->to < high && high <= l->size);
            if (i > 0)
                assert_true(a[-1].box < a->box ||
                            (a[-1].box == a->box && a[-1].offset <= a->offset));
            bytes += piece_bytes(slice, a);
        }
        assert_int_equal(bytes, r->bytes);
    }
}

/* The groups of one of several slices, as runs: some touch one another, some are empty. */
static size_t list_runs(world *w, const uint8_t *slice_of, size_t n_groups,
                        uint8_t number, group_run *out)
{
    size_t n = 0;
    for (size_t g = 0; g < n_groups; g++) {
        group_run *last = n > 0 ? &out[n - 1] : NULL;
        if (slice_of[g] == number && last && last->first + last->count == g &&
            world_random(w, 2))
            last->count++;
        else if (slice_of[g] == number || world_random(w, 8) == 0)
            out[n++] = (group_run){g, slice_of[g] == number};
    }
    return n;
}

void world_execute_slices(world *w, landing *l, const plan *p)
{
    fanin_error error = FANIN_ERROR_INIT;
    plan_index index;
    size_t n_groups = l->targets ? l->n_targets : w->n_keys;
    uint64_t bytes = 0, tensors = 0;
    uint8_t *slice_of = calloc(n_groups + 1, 1);
    group_run *runs = calloc(n_groups + 1, sizeof *runs);
    assert_true(slice_of && runs);
    for (size_t g = 0; g < n_groups; g++)
        slice_of[g] = (uint8_t)world_random(w, 4);
    assert_ok(plan_index_build(p, n_groups, NULL, &index, &error), error);
    memset(l->bytes, UNTOUCHED, l->size + 1);
    for (uint8_t number = 0; number < 4; number++) {
        plan *slice;
        size_t n = list_runs(w, slice_of, n_groups, number, runs);
        assert_ok(plan_slice_build(p, &index, runs, n, NULL, &slice, &error), error);
        check_slice(slice, runs, n, l);
        bytes += slice->bytes;
        tensors += slice->tensors;
        land_pieces(w, l, slice);
        plan_slice_free(&slice);
        assert_null(slice);
    }
    assert_int_equal(bytes, p->bytes);
    assert_true(tensors <= n_groups);
    landing_compare(w, l);
    plan_index_free(&index);
    free(slice_of);
    free(runs);
}

/* ----------------------------------------------------------------- spans */

static void check_spans(const plan_spans *spans, const region_table *regions,
                        const span_rule *rule)
{
    uint64_t pieces = 0;
    for (uint64_t i = 0; i < spans->n_spans; i++) {
        const span *a = &spans->spans[i];
        uint64_t reached = 0;
        assert_true(a->region < regions->count);
        assert_true(a->length > 0 && a->length <= rule->max_length);
        assert_true(a->offset + a->length <= regions->entries[a->region].length);
        assert_int_equal(a->first, pieces);
        assert_true(a->count > 0);
        pieces += a->count;
        if (i > 0)
            assert_true(a[-1].region < a->region ||
                        (a[-1].region == a->region && a[-1].offset <= a->offset));
        for (uint64_t k = a->first; k < pieces; k++) {
            const span_piece *b = &spans->pieces[k];
            assert_true(b->offset <= reached + rule->max_gap);
            assert_true(b->view <= spans->n_views);
            reached = b->offset + b->length > reached ? b->offset + b->length : reached;
            if (a->count > 1 && b->view == 0)
                assert_true(b->length < rule->direct_from);
        }
        assert_int_equal(reached, a->length);
        const span_piece *only = &spans->pieces[a->first];
        assert_int_equal(a->direct, a->count == 1 && only->view == 0);
        if (a->direct)
            assert_true(only->offset == 0 && only->length == a->length);
    }
    assert_int_equal(pieces, spans->n_pieces);
}

void world_execute_spans(const world *w, landing *l, const plan *p,
                         const span_rule *rule)
{
    memset(l->bytes, UNTOUCHED, l->size + 1);
    for (size_t s = 0; s < p->n_ranks; s++) {
        const world_rank *r = &w->ranks[w->sources[s].rank];
        region_entry entries[WORLD_REGIONS] = {{0}};
        region_table regions = {.entries = entries, .count = WORLD_REGIONS};
        fanin_error error = FANIN_ERROR_INIT;
        plan_spans *spans;
        for (uint32_t i = 0; i < WORLD_REGIONS; i++)
            entries[i] = (region_entry){.id = i, .length = r->used[i]};
        fanin_status status = plan_spans_build(p, w->keys, w->sources, s, &regions,
                                               rule, NULL, &spans, &error);
        if (status != FANIN_OK)
            fail_msg("spans of rank %u: %s", w->sources[s].rank, error.message);
        check_spans(spans, &regions, rule);
        for (uint64_t i = 0; i < spans->n_spans; i++) {
            const span *a = &spans->spans[i];
            uint8_t *staging = malloc(a->length);
            assert_non_null(staging);
            memcpy(staging, r->memory[a->region] + a->offset, a->length);
            for (uint64_t k = a->first; k < a->first + a->count; k++) {
                const span_piece *b = &spans->pieces[k];
                land(l, spans->views, b->view, staging + b->offset, b->length, b->to);
            }
            free(staging);
        }
        plan_spans_free(&spans);
    }
    landing_compare(w, l);
}
