/* SPDX-License-Identifier: Apache-2.0 */
/* Random tensors, cuts and targets against a model that looks at every single element. */
#include "plan_world.h"
#include "testing.h"

/* What a sanitizer sees of more of them it has seen. */
#ifdef __SANITIZE_ADDRESS__
#define ROUNDS 300
#else
#define ROUNDS 1500
#endif

typedef enum cut_style {
    CUT_CHUNK,       /* torch.chunk, maybe with replicas and a dimension other than 0 */
    CUT_GRID,        /* chunks on two dimensions */
    CUT_INTERLEAVED, /* several runs of rows a rank */
    CUT_RANDOM,      /* any rectangles, any owner, some replicas */
    CUT_STYLES
} cut_style;

static const fanin_dtype dtypes[] = {FANIN_DTYPE_U8,  FANIN_DTYPE_BF16,
                                     FANIN_DTYPE_F32, FANIN_DTYPE_F64,
                                     FANIN_DTYPE_F4,  FANIN_DTYPE_F6_E2M3};

static world_layout any_layout(world *w)
{
    return (world_layout)world_random(w, 3);
}

static void add_keys(world *w, cut_style style)
{
    uint32_t n_keys = 1 + (uint32_t)world_random(w, 7);
    for (uint32_t k = 0; k < n_keys; k++) {
        uint64_t shape[FANIN_MAX_DIMS];
        uint32_t least = style == CUT_GRID ? 2 : style == CUT_RANDOM ? 0 : 1;
        uint32_t n_dims = least + (uint32_t)world_random(w, 5 - least);
        /* Chunks of packed dtypes must not be cut inside of bytes. */
        uint64_t n_dtypes = style == CUT_RANDOM && n_dims > 0 ? 6 : 4;
        fanin_dtype dtype = dtypes[world_random(w, n_dtypes)];
        for (uint32_t i = 0; i < n_dims; i++)
            shape[i] =
                world_random(w, 40) == 0 ? 0 : 1 + world_random(w, n_dims > 2 ? 6 : 17);
        if (k > 0 && world_random(w, 2)) { /* like the one before */
            n_dims = w->entries[k - 1].n_dims;
            memcpy(shape, w->entries[k - 1].shape, sizeof shape);
            if (world_random(w, 2))
                dtype = w->entries[k - 1].dtype;
        }
        uint32_t elements = dtype_get_unit(dtype).elements;
        if (elements > 1 && (n_dims == 0 || shape[n_dims - 1] % elements != 0)) {
            if (n_dims == 0)
                dtype = FANIN_DTYPE_U8;
            else
                shape[n_dims - 1] *= elements;
        }
        world_key(w, dtype, n_dims, shape);
    }
}

/* Splits at random where bytes begin; each part goes to a rank or two. */
static void hold_parts(world *w, uint32_t key, const block *b)
{
    const key_entry *e = &w->entries[key];
    uint32_t dim = e->n_dims ? (uint32_t)world_random(w, e->n_dims) : 0;
    uint64_t unit = dim + 1 == e->n_dims ? dtype_get_unit(e->dtype).elements : 1;
    if (e->n_dims > 0 && b->extent[dim] > unit && world_random(w, 4) != 0) {
        block first = *b, second = *b;
        first.extent[dim] = unit * (1 + world_random(w, b->extent[dim] / unit - 1));
        second.offset[dim] += first.extent[dim];
        second.extent[dim] -= first.extent[dim];
        hold_parts(w, key, &first);
        hold_parts(w, key, &second);
        return;
    }
    uint32_t rank = (uint32_t)world_random(w, w->n_ranks);
    for (uint64_t copies = 1 + (world_random(w, 3) == 0); copies > 0; copies--) {
        world_hold(w, rank, key, b, (uint32_t)world_random(w, WORLD_REGIONS),
                   world_random(w, 20), any_layout(w));
        rank = (rank + 1) % w->n_ranks;
    }
}

static void hold_random(world *w)
{
    for (uint32_t key = 0; key < w->n_keys; key++) {
        block all = {.n_dims = w->entries[key].n_dims};
        memcpy(all.extent, w->entries[key].shape, sizeof all.extent);
        if (!block_is_empty(&all))
            hold_parts(w, key, &all);
    }
}

/* FSDP on one dimension times TP on another. */
static void hold_grid(world *w)
{
    uint32_t columns = 1 + (uint32_t)world_random(w, 3), rows = w->n_ranks / columns;
    for (uint32_t key = 0; key < w->n_keys; key++) {
        const key_entry *e = &w->entries[key];
        uint32_t x = (uint32_t)world_random(w, e->n_dims), y = (x + 1) % e->n_dims;
        world_layout layout = any_layout(w);
        for (uint32_t r = 0; r < w->n_ranks && rows > 0; r++) {
            block a = block_chunk(e->n_dims, e->shape, x, rows, r / columns % rows), b,
                  c;
            b = block_chunk(e->n_dims, e->shape, y, columns, r % columns);
            if (block_intersect(&a, &b, &c) && !block_is_empty(&c))
                world_hold(w, r, key, &c, r % WORLD_REGIONS, world_random(w, 9),
                           layout);
        }
    }
}

/* Rows go round: rank r holds every n_ranks-th group, as several boxes in random order. */
static void hold_interleaved(world *w)
{
    for (uint32_t key = 0; key < w->n_keys; key++) {
        const key_entry *e = &w->entries[key];
        uint32_t split = 1 + (uint32_t)world_random(w, 3), parts = split * w->n_ranks;
        bool backwards = world_random(w, 2);
        for (uint32_t i = 0; i < parts; i++) {
            uint32_t part = backwards ? parts - 1 - i : i;
            block b = block_chunk(e->n_dims, e->shape, 0, parts, part);
            if (!block_is_empty(&b))
                world_hold(w, part % w->n_ranks, key, &b, 0, 0, LAYOUT_PACKED);
        }
    }
}

static void hold(world *w, cut_style style)
{
    if (style == CUT_CHUNK) {
        uint32_t dims = FANIN_MAX_DIMS;
        for (uint32_t k = 0; k < w->n_keys; k++)
            dims = w->entries[k].n_dims < dims ? w->entries[k].n_dims : dims;
        uint32_t dim = (uint32_t)world_random(w, dims);
        uint32_t parts = 1 + (uint32_t)world_random(w, w->n_ranks);
        while (w->n_ranks % parts != 0)
            parts--;
        for (uint32_t r = 0; r < w->n_ranks; r++)
            world_hold_chunks(w, r, dim, parts, r % parts);
    } else if (style == CUT_GRID) {
        hold_grid(w);
    } else if (style == CUT_INTERLEAVED) {
        hold_interleaved(w);
    } else {
        hold_random(w);
    }
}

/* A box lost, moved or grown. */
static void break_something(world *w)
{
    world_rank *r = &w->ranks[world_random(w, w->n_ranks)];
    if (r->n_records == 0)
        return;
    uint64_t i = world_random(w, r->n_records);
    box_record *box = &r->records[i];
    const key_entry *e = &w->entries[box->key];
    uint32_t dim = e->n_dims ? (uint32_t)world_random(w, e->n_dims) : 0;
    uint64_t unit = dim + 1 == e->n_dims ? dtype_get_unit(e->dtype).elements : 1;
    uint64_t end = box->block.offset[dim] + box->block.extent[dim];
    if (world_random(w, 2) && e->n_dims > 0 && box->place.packed) {
        if (world_random(w, 2) && box->block.extent[dim] > unit)
            box->block.extent[dim] -= unit;
        else if (box->block.offset[dim] >= unit)
            box->block.offset[dim] -= unit;
        else if (end < e->shape[dim])
            box->block.offset[dim] += unit;
        return;
    }
    memmove(box, box + 1, (r->n_records - i - 1) * sizeof *box);
    r->n_records--;
}

static bool same_as_earlier(const world *w, size_t source, uint64_t box,
                            const bool *use)
{
    uint32_t key, other_key;
    block b, other;
    box_table_get(w->sources[source].boxes, box, &key, &b, NULL);
    for (size_t s = 0; s <= source; s++) {
        uint64_t n = s < source ? box_table_count(w->sources[s].boxes) : box;
        for (uint64_t i = 0; i < n && use[s]; i++) {
            box_table_get(w->sources[s].boxes, i, &other_key, &other, NULL);
            if (key == other_key && block_equal(&b, &other))
                return true;
        }
    }
    return false;
}

/* Different boxes must hold each element exactly once. */
static bool model_tiles(const world *w, const bool *use)
{
    bool exact = true;
    for (uint32_t key = 0; key < w->n_keys && exact; key++) {
        const key_entry *e = &w->entries[key];
        uint64_t elements = 1;
        for (uint32_t i = 0; i < e->n_dims; i++)
            elements *= e->shape[i];
        uint8_t *held = calloc(elements + 1, 1);
        assert_non_null(held);
        for (size_t s = 0; s < w->n_sources; s++) {
            for (uint64_t i = 0; use[s] && i < box_table_count(w->sources[s].boxes);
                 i++) {
                uint32_t box_key;
                block b;
                box_table_get(w->sources[s].boxes, i, &box_key, &b, NULL);
                if (box_key != key || same_as_earlier(w, s, i, use))
                    continue;
                for (uint64_t x = 0; x < elements; x++) {
                    uint64_t rest = x;
                    bool inside = true;
                    for (uint32_t d = e->n_dims; d-- > 0; rest /= e->shape[d])
                        inside = inside && rest % e->shape[d] >= b.offset[d] &&
                                 rest % e->shape[d] - b.offset[d] < b.extent[d];
                    held[x] += inside;
                }
            }
        }
        for (uint64_t x = 0; x < elements; x++)
            exact = exact && held[x] == 1;
        free(held);
    }
    return exact;
}

static void check_sufficient(world *w, bool has_replicas)
{
    bool use[WORLD_RANKS];
    bool spared = false;
    for (size_t s = 0; s < w->n_sources; s++) {
        for (size_t i = 0; i < w->n_sources; i++)
            use[i] = i != s;
        bool enough = model_tiles(w, use);
        assert_int_equal(plan_sufficient(w->keys, w->sources, w->n_sources, use, NULL),
                         enough);
        spared = spared || (enough && box_table_count(w->sources[s].boxes) > 0);
    }
    assert_int_equal(has_replicas, spared);
    for (size_t i = 0; i < w->n_sources; i++)
        use[i] = world_random(w, 4) != 0;
    assert_int_equal(plan_sufficient(w->keys, w->sources, w->n_sources, use, NULL),
                     model_tiles(w, use));
}

static fanin_dtype any_dtype(world *w)
{
    static const fanin_dtype wanted[] = {0, FANIN_DTYPE_BF16, FANIN_DTYPE_F16};
    return wanted[world_random(w, 3)];
}

static void add_targets(world *w, landing *l)
{
    landing_init(l, any_dtype(w));
    for (uint64_t n = 1 + world_random(w, 6); n > 0; n--) {
        uint32_t key = (uint32_t)world_random(w, w->n_keys);
        const key_entry *e = &w->entries[key];
        block b = {.n_dims = e->n_dims};
        bool whole = world_random(w, 3) == 0;
        for (uint32_t i = 0; i < e->n_dims; i++) {
            uint64_t unit = i + 1 == e->n_dims ? dtype_get_unit(e->dtype).elements : 1;
            uint64_t all = e->shape[i] / unit;
            b.offset[i] = whole ? 0 : unit * world_random(w, all + 1);
            b.extent[i] = e->shape[i] - b.offset[i];
            if (!whole && b.extent[i] > unit && world_random(w, 40) > 0)
                b.extent[i] = unit * (1 + world_random(w, b.extent[i] / unit));
        }
        l->as_is = world_random(w, 4) == 0;
        landing_add(l, w, key, &b, world_random(w, 3) == 0);
    }
}

static void run_landing(world *w, landing *l, bool complete, bool *has_replicas_out)
{
    fanin_error error = FANIN_ERROR_INIT;
    plan *p;
    fanin_status status = world_plan(w, l, &p, &error);
    if (complete && status != FANIN_OK)
        fail_msg("%s: %s", fanin_status_name(status), error.message);
    if (!complete) {
        assert_int_equal(status, FANIN_ERR_INCOMPLETE);
        assert_null(p);
        assert_string_not_equal(error.key, "");
        assert_non_null(strstr(error.message, error.key));
    } else {
        *has_replicas_out = p->has_replicas;
        world_check_plan(w, l, p);
        world_execute(w, l, p);
        world_execute_slices(w, l, p);
        for (int i = 0; i < 3; i++) {
            span_rule rule = {.max_length = 16 + world_random(w, i == 0 ? 64 : 4096),
                              .max_gap = i == 2 ? 0 : world_random(w, 64),
                              .direct_from = 1 + world_random(w, i == 1 ? 16 : 300)};
            world_execute_spans(w, l, p, &rule);
        }
        const span_rule walker = {.max_length = 1 << 20, .walks_views = true};
        world_execute_spans(w, l, p, &walker);
        plan_free(&p);
        assert_null(p);
    }
    landing_free(l);
}

static void run_world(cut_style style, uint64_t seed, uint64_t *complete_out)
{
    world w;
    landing l;
    bool use[WORLD_RANKS], absent[WORLD_RANKS] = {false}, has_replicas = false;
    world_init(&w, 1, seed);
    w.n_ranks = 1 + (uint32_t)world_random(&w, 8);
    add_keys(&w, style);
    hold(&w, style);
    if (world_random(&w, 4) == 0)
        break_something(&w);
    if (world_random(&w, 4) == 0)
        absent[world_random(&w, w.n_ranks)] = true;
    world_seal(&w, absent);
    for (uint32_t i = 0; i < WORLD_RANKS; i++)
        use[i] = true;
    bool complete = model_tiles(&w, use);
    assert_int_equal(plan_sufficient(w.keys, w.sources, w.n_sources, use, NULL),
                     complete);
    landing_whole(&l, &w, any_dtype(&w));
    run_landing(&w, &l, complete, &has_replicas);
    add_targets(&w, &l);
    run_landing(&w, &l, complete, &has_replicas);
    if (complete)
        check_sufficient(&w, has_replicas);
    *complete_out += complete;
    world_free(&w);
}

static void run_style(cut_style style)
{
    uint64_t complete = 0;
    for (uint64_t i = 0; i < ROUNDS; i++)
        run_world(style, i * CUT_STYLES + (uint64_t)style + 1, &complete);
    assert_true(complete > ROUNDS / 10);
    assert_true(complete < ROUNDS);
}

TEST(chunks_equal_the_model)
{
    run_style(CUT_CHUNK);
}

TEST(grids_equal_the_model)
{
    run_style(CUT_GRID);
}

TEST(interleaved_rows_equal_the_model)
{
    run_style(CUT_INTERLEAVED);
}

TEST(random_boxes_equal_the_model)
{
    run_style(CUT_RANDOM);
}
