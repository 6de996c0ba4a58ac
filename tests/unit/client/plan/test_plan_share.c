/* SPDX-License-Identifier: Apache-2.0 */
/* Which of several holders serves what: clients differ, and large tensors are divided. What is
   planned from parts of tables. */
#include "plan_world.h"
#include "testing.h"

#define CLIENTS 64
#define MIB ((uint64_t)1 << 20)

/* -------------------------------------------------------- tensors and holders */

/* Ranks that all hold all of every tensor, without memory: tensors of any size. */
typedef struct replicas {
    key_table *keys;
    plan_source sources[WORLD_RANKS];
    size_t n_sources;
    plan_target targets[8]; /* every tensor whole, one behind the other */
    size_t n_targets;
} replicas;

static void make_boxes(replicas *r, uint32_t rank)
{
    box_record records[8];
    buffer blob = {0};
    box_table *boxes;
    for (uint32_t key = 0; key < r->keys->count; key++)
        records[key] =
            (box_record){.key = key,
                         .block = r->targets[key].block,
                         .place = {.offset = r->targets[key].to, .packed = true}};
    box_table_encode(&blob, r->keys->entries, r->keys->count, records, r->keys->count,
                     rank, (uint32_t)r->n_sources);
    assert_works(box_table_decode(blob.data, blob.size, r->keys, NULL, &boxes, ERROR));
    buffer_free(&blob);
    r->sources[rank] = (plan_source){.rank = rank, .boxes = boxes};
}

/* Tensors of so many rows of 1 MiB each, on so many ranks. */
static void replicas_init(replicas *r, const uint64_t *rows, uint32_t n_keys,
                          size_t n_ranks)
{
    static const char *const names[] = {"a", "b", "c", "d", "e", "f", "g", "h"};
    key_entry entries[8] = {0};
    buffer blob = {0};
    uint64_t to = 0;
    *r = (replicas){.n_sources = n_ranks, .n_targets = n_keys};
    for (uint32_t key = 0; key < n_keys; key++) {
        entries[key] = (key_entry){.name = names[key],
                                   .dtype = FANIN_DTYPE_U8,
                                   .n_dims = 2,
                                   .shape = {rows[key], MIB}};
        r->targets[key] = (plan_target){
            .key = key, .block = {.n_dims = 2, .extent = {rows[key], MIB}}, .to = to};
        to += rows[key] * MIB;
    }
    key_table_encode(&blob, entries, n_keys, NULL, 0);
    assert_works(key_table_decode(blob.data, blob.size, NULL, &r->keys, ERROR));
    buffer_free(&blob);
    for (uint32_t rank = 0; rank < n_ranks; rank++)
        make_boxes(r, rank);
}

static void replicas_free(replicas *r)
{
    for (size_t i = 0; i < r->n_sources; i++) {
        box_table *boxes = (box_table *)(uintptr_t)r->sources[i].boxes;
        box_table_free(&boxes);
    }
    key_table_free(&r->keys);
}

static plan *plan_as(const replicas *r, uint64_t seed)
{
    plan_rules rules = {.seed = seed};
    plan *p;
    assert_works(plan_build(r->keys, r->sources, r->n_sources, r->targets, r->n_targets,
                            NULL, &rules, &p, ERROR));
    return p;
}

/* Every byte comes once: pieces land where they are taken from, as all is packed. */
static void check_whole(const replicas *r, const plan *p)
{
    uint64_t total = 0, n = 0, at = 0;
    const piece *all[4096];
    for (size_t s = 0; s < p->n_ranks; s++)
        for (uint64_t i = 0; i < p->ranks[s].n_pieces; i++) {
            const piece *one = &p->ranks[s].pieces[i];
            assert_int_equal(one->to, r->targets[one->box].to + one->offset);
            assert_in_range(one->length, 1, PIECE_MAX);
            assert_true(n < 4096);
            all[n++] = one;
            total += one->length;
        }
    assert_int_equal(total, p->bytes);
    while (at < total) {
        uint64_t before = at;
        for (uint64_t i = 0; i < n; i++)
            at += all[i]->to == at ? all[i]->length : 0;
        assert_true(at > before);
    }
}

/* ---------------------------------------------------------------------- tests */

TEST(clients_take_a_lone_tensor_from_different_ranks)
{
    replicas r;
    uint32_t served[4] = {0};
    replicas_init(&r, (uint64_t[]){16}, 1, 4);
    for (uint64_t seed = 0; seed < CLIENTS; seed++) {
        plan *p = plan_as(&r, seed);
        for (size_t s = 0; s < 4; s++) {
            assert_true(p->ranks[s].bytes == 0 || p->ranks[s].bytes == 16 * MIB);
            served[s] += p->ranks[s].bytes > 0;
        }
        check_whole(&r, p);
        plan_free(&p);
    }
    for (size_t s = 0; s < 4; s++)
        assert_in_range(served[s], CLIENTS / 8, CLIENTS / 2);
    replicas_free(&r);
}

TEST(a_client_makes_one_plan)
{
    replicas r;
    replicas_init(&r, (uint64_t[]){3, 100, 2, 7}, 4, 3);
    for (uint64_t seed = 0; seed < 8; seed++) {
        plan *a = plan_as(&r, seed), *b = plan_as(&r, seed);
        for (size_t s = 0; s < 3; s++) {
            assert_int_equal(a->ranks[s].n_pieces, b->ranks[s].n_pieces);
            assert_memory_equal(a->ranks[s].pieces, b->ranks[s].pieces,
                                a->ranks[s].n_pieces * sizeof(piece));
        }
        plan_free(&a);
        plan_free(&b);
    }
    replicas_free(&r);
}

/* Whoever comes first, all holders serve as much as the others. */
TEST(loads_are_level_for_every_client)
{
    world w;
    landing l;
    world_init(&w, 6, 1);
    for (int i = 0; i < 120; i++)
        world_key(&w, FANIN_DTYPE_U8, 2, ((const uint64_t[]){12, 10}));
    for (uint32_t rank = 0; rank < 6; rank++)
        world_hold_chunks(&w, rank, 0, 2, rank % 2);
    world_seal(&w, NULL);
    landing_whole(&l, &w, 0);
    for (w.seed = 0; w.seed < 16; w.seed++) {
        fanin_error error = FANIN_ERROR_INIT;
        plan *p;
        assert_ok(world_plan(&w, &l, &p, &error), error);
        world_check_plan(&w, &l, p);
        world_execute(&w, &l, p);
        for (int rank = 0; rank < 6; rank++)
            assert_in_range(p->ranks[rank].bytes, 2400 - 60, 2400 + 60);
        plan_free(&p);
    }
    landing_free(&l);
    world_free(&w);
}

TEST(a_large_tensor_is_shared_by_rows)
{
    replicas r;
    replicas_init(&r, (uint64_t[]){1, 120, 1}, 3, 3);
    for (uint64_t seed = 0; seed < 8; seed++) {
        plan *p = plan_as(&r, seed);
        for (size_t s = 0; s < 3; s++) {
            const plan_rank *rank = &p->ranks[s];
            assert_in_range(rank->bytes, (40 - 4) * MIB, (40 + 5) * MIB);
            /* neighbouring rows, and neighbouring tensors */
            for (uint64_t i = 1; i < rank->n_pieces; i++)
                assert_int_equal(rank->pieces[i].to,
                                 rank->pieces[i - 1].to + rank->pieces[i - 1].length);
        }
        check_whole(&r, p);
        plan_free(&p);
    }
    replicas_free(&r);
}

TEST(up_to_the_limit_a_box_has_one_server)
{
    replicas r;
    replicas_init(&r, (uint64_t[]){PLAN_SPLIT / MIB}, 1, 3);
    plan *p = plan_as(&r, 1);
    for (size_t s = 0; s < 3; s++)
        assert_true(p->ranks[s].bytes == 0 || p->ranks[s].bytes == PLAN_SPLIT);
    plan_free(&p);
    replicas_free(&r);
}

/* Of a large tensor only what is wanted counts. */
TEST(little_of_a_large_tensor_has_one_server)
{
    replicas r;
    replicas_init(&r, (uint64_t[]){100}, 1, 2);
    r.targets[0].block = (block){.n_dims = 2, .offset = {30, 0}, .extent = {10, MIB}};
    plan *p = plan_as(&r, 1);
    assert_int_equal(p->ranks[0].bytes + p->ranks[1].bytes, 10 * MIB);
    assert_true(p->ranks[0].bytes == 0 || p->ranks[1].bytes == 0);
    plan_free(&p);
    replicas_free(&r);
}

/* ---------------------------------------------------------------------- parts */

#define PART_KEYS 12

/* Ranks 0 .. 3 hold two copies of halves; of the last key nobody holds the upper one. */
static void begin_parts(world *w, bool explicit)
{
    world_init(w, 4, 1);
    for (int i = 0; i < PART_KEYS; i++)
        world_key(w, FANIN_DTYPE_U8, 2, ((const uint64_t[]){8, 10}));
    for (uint32_t key = 0; key < PART_KEYS; key++)
        for (uint32_t rank = 0; rank < 4; rank++) {
            block b = block_chunk(2, (const uint64_t[]){8, 10}, 0, 2, rank % 2);
            if (explicit && rank % 2 == 0 && key == 5)
                b.extent[0] = 3; /* no chunk */
            if (explicit && rank % 2 == 1 && key == 5) {
                b.offset[0] = 3;
                b.extent[0] = 5;
            }
            if (!explicit || key + 1 < PART_KEYS || rank % 2 == 0)
                world_hold(w, rank, key, &b, 0, 3, LAYOUT_PACKED);
        }
    world_seal(w, NULL);
}

/* The sources' tables, of these keys only. */
static void cut_sources(world *w, const key_set *wanted)
{
    for (size_t s = 0; s < w->n_sources; s++) {
        buffer blob = {0};
        box_table *part;
        fanin_error error = FANIN_ERROR_INIT;
        box_table_encode_part(&blob, w->sources[s].boxes, wanted);
        assert_ok(box_table_decode(blob.data, blob.size, w->keys, NULL, &part, &error),
                  error);
        w->sources[s].boxes = part;
        buffer_free(&blob);
    }
}

static void free_cut(world *w)
{
    for (size_t s = 0; s < w->n_sources; s++) {
        box_table *part = (box_table *)(uintptr_t)w->sources[s].boxes;
        box_table_free(&part);
    }
}

static fanin_status plan_part(const world *w, const landing *l, const key_set *wanted,
                              plan **out, fanin_error *error)
{
    plan_rules rules = {.seed = 3, .keys = wanted};
    return plan_build(w->keys, w->sources, w->n_sources, l->targets, l->n_targets, NULL,
                      &rules, out, error);
}

static void check_parts(bool explicit)
{
    world w;
    landing l;
    plan *whole, *part, *none;
    fanin_error error = FANIN_ERROR_INIT;
    key_range ranges[] = {{1, 2}, {5, 1}, {8, 3}};
    const key_set wanted = {.ranges = ranges, .n = 3};
    const bool use[4] = {true, false, true, true}, most[4] = {true, false, true, false};
    begin_parts(&w, explicit);
    landing_init(&l, 0);
    for (size_t i = 0; i < wanted.n; i++)
        for (uint32_t j = 0; j < ranges[i].count; j++)
            landing_add(&l, &w, ranges[i].first + j,
                        &(block){.n_dims = 2, .offset = {1, 2}, .extent = {6, 5}},
                        j == 1);
    /* whole tables, of which only some keys are looked at: the hole is none of them */
    if (explicit)
        assert_int_equal(plan_part(&w, &l, NULL, &none, &error), FANIN_ERR_INCOMPLETE);
    assert_ok(plan_part(&w, &l, &wanted, &whole, &error), error);
    world_execute(&w, &l, whole);
    cut_sources(&w, &wanted);
    assert_ok(plan_part(&w, &l, &wanted, &part, &error), error);
    for (size_t s = 0; s < 4; s++) {
        assert_int_equal(part->ranks[s].n_pieces, whole->ranks[s].n_pieces);
        assert_memory_equal(part->ranks[s].pieces, whole->ranks[s].pieces,
                            part->ranks[s].n_pieces * sizeof(piece));
    }
    landing_clear(&l);
    world_execute(&w, &l, part);
    const plan_rules rules = {.keys = &wanted};
    assert_true(plan_sufficient(w.keys, w.sources, 4, use, &rules));
    assert_false(plan_sufficient(w.keys, w.sources, 4, most, &rules));
    /* what they do not tell of can't be had */
    ranges[2].count = 2;
    assert_int_equal(plan_part(&w, &l, &wanted, &none, &error), FANIN_ERR_ARGUMENT);
    plan_free(&part);
    plan_free(&whole);
    free_cut(&w);
    landing_free(&l);
    world_free(&w);
}

TEST(parts_are_planned_as_the_whole_is)
{
    check_parts(false);
    check_parts(true);
}
