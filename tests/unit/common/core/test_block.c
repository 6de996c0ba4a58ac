/* SPDX-License-Identifier: Apache-2.0 */
/* Box arithmetic against models that look at every element. */
#include "block.h"
#include "random.h"
#include "testing.h"

#define BLOCKS_MAX 40

static block make(uint32_t n_dims, const uint64_t *offset, const uint64_t *extent)
{
    block b = {.n_dims = n_dims};
    for (uint32_t i = 0; i < n_dims; i++) {
        b.offset[i] = offset[i];
        b.extent[i] = extent[i];
    }
    return b;
}

static bool holds(const block *b, const uint64_t *point)
{
    for (uint32_t i = 0; i < b->n_dims; i++)
        if (point[i] < b->offset[i] || point[i] >= b->offset[i] + b->extent[i])
            return false;
    return true;
}

static uint64_t cells_of(uint32_t n_dims, const uint64_t *shape)
{
    uint64_t cells = 1;
    for (uint32_t i = 0; i < n_dims; i++)
        cells *= shape[i];
    return cells;
}

static void point_of(uint32_t n_dims, const uint64_t *shape, uint64_t cell,
                     uint64_t *point)
{
    for (uint32_t i = n_dims; i-- > 0;) {
        point[i] = cell % shape[i];
        cell /= shape[i];
    }
}

static block random_block(random_source *r, uint32_t n_dims, const uint64_t *shape)
{
    block b = {.n_dims = n_dims};
    for (uint32_t i = 0; i < n_dims; i++) {
        b.offset[i] = random_below(r, shape[i]);
        b.extent[i] = 1 + random_below(r, shape[i] - b.offset[i]);
    }
    return b;
}

/* ------------------------------------------------------------- simple questions */

TEST(volumes)
{
    uint64_t volume;
    block b = make(3, (uint64_t[]){0, 0, 0}, (uint64_t[]){3, 4, 5});
    assert_true(block_volume(&b, &volume));
    assert_int_equal(volume, 60);
    b.extent[0] = b.extent[1] = UINT64_C(1) << 32;
    assert_false(block_volume(&b, &volume));
    b.extent[2] = 0;
    assert_true(block_volume(&b, &volume));
    assert_int_equal(volume, 0);
    assert_true(block_is_empty(&b));
    block scalar = {.n_dims = 0};
    assert_true(block_volume(&scalar, &volume));
    assert_int_equal(volume, 1);
    assert_false(block_is_empty(&scalar));
}

TEST(equality_ignores_unused_dimensions)
{
    block a = make(2, (uint64_t[]){1, 2}, (uint64_t[]){3, 4}), b = a;
    b.offset[5] = 9;
    b.extent[2] = 7;
    assert_true(block_equal(&a, &b));
    b.n_dims = 3;
    assert_false(block_equal(&a, &b));
    b = a;
    b.extent[1] = 5;
    assert_false(block_equal(&a, &b));
}

TEST(inside_does_not_overflow)
{
    uint64_t shape[] = {10, UINT64_MAX};
    block b = make(2, (uint64_t[]){9, 1}, (uint64_t[]){1, UINT64_MAX - 1});
    assert_true(block_inside(&b, shape));
    b.extent[1] = UINT64_MAX;
    assert_false(block_inside(&b, shape));
    b = make(2, (uint64_t[]){10, 0}, (uint64_t[]){0, 1});
    assert_true(block_inside(&b, shape));
    b.offset[0] = 11;
    assert_false(block_inside(&b, shape));
}

TEST(intersections_hold_what_both_hold)
{
    random_source r = {1};
    for (int round = 0; round < 5000; round++) {
        uint64_t shape[FANIN_MAX_DIMS], point[FANIN_MAX_DIMS];
        uint32_t n_dims = (uint32_t)random_below(&r, 4);
        for (uint32_t i = 0; i < n_dims; i++)
            shape[i] = 1 + random_below(&r, 6);
        block a = random_block(&r, n_dims, shape), b = random_block(&r, n_dims, shape);
        block both;
        bool any = block_intersect(&a, &b, &both), found = false;
        assert_int_equal(block_intersect(&a, &b, NULL), any);
        for (uint64_t cell = 0; cell < cells_of(n_dims, shape); cell++) {
            point_of(n_dims, shape, cell, point);
            bool in_both = holds(&a, point) && holds(&b, point);
            found |= in_both;
            if (any)
                assert_int_equal(holds(&both, point), in_both);
        }
        assert_int_equal(any, found);
        if (any) {
            block_intersect(&a, &b, &a); /* the result may be an input */
            assert_true(block_equal(&a, &both));
        }
    }
}

TEST(units_of_packed_dtypes)
{
    block b = make(2, (uint64_t[]){3, 8}, (uint64_t[]){5, 12}), units;
    assert_true(block_in_units(&b, 4, &units));
    assert_int_equal(units.offset[0], 3);
    assert_int_equal(units.extent[0], 5);
    assert_int_equal(units.offset[1], 2);
    assert_int_equal(units.extent[1], 3);
    b.offset[1] = 9;
    assert_false(block_in_units(&b, 4, &units));
    b.offset[1] = 8;
    b.extent[1] = 10;
    assert_false(block_in_units(&b, 4, &units));
    assert_true(block_in_units(&b, 1, &units));
    assert_true(block_equal(&b, &units));
    block scalar = {.n_dims = 0};
    assert_true(block_in_units(&scalar, 1, &units));
    assert_false(block_in_units(&scalar, 2, &units));
}

/* ------------------------------------------------------------- torch.chunk */

/* What torch.split(ceil(n / world)) does, row by row. */
TEST(chunks_are_those_of_torch)
{
    for (uint64_t rows = 0; rows < 40; rows++)
        for (uint32_t world = 1; world < 20; world++) {
            uint64_t chunk = (rows + world - 1) / world, next = 0;
            for (uint32_t index = 0; index < world; index++) {
                uint64_t shape[] = {7, rows};
                block b = block_chunk(2, shape, 1, world, index);
                uint64_t left = rows - next;
                uint64_t extent = left < chunk ? left : chunk;
                assert_int_equal(b.offset[1], next);
                assert_int_equal(b.extent[1], extent);
                assert_int_equal(b.offset[0], 0);
                assert_int_equal(b.extent[0], 7);
                assert_true(block_inside(&b, shape));
                next += extent;
            }
            assert_int_equal(next, rows);
        }
    uint64_t ten[] = {10};
    static const uint64_t expected[] = {3, 3, 3, 1};
    for (uint32_t i = 0; i < 4; i++)
        assert_int_equal(block_chunk(1, ten, 0, 4, i).extent[0], expected[i]);
}

TEST(chunks_of_huge_dimensions)
{
    uint64_t shape[] = {UINT64_MAX};
    for (uint32_t i = 0; i < 65536; i += 4095) {
        block b = block_chunk(1, shape, 0, 65536, i);
        assert_true(block_inside(&b, shape));
    }
    block last = block_chunk(1, shape, 0, 65536, 65535);
    assert_true(last.offset[0] + last.extent[0] == UINT64_MAX);
}

/* ------------------------------------------------------------- tiling */

typedef struct case_of_blocks {
    uint32_t n_dims;
    uint64_t shape[FANIN_MAX_DIMS];
    block blocks[BLOCKS_MAX];
    size_t count;
} case_of_blocks;

/* Cuts a random block in two, so that what was a tiling stays one. */
static void cut(random_source *r, case_of_blocks *c)
{
    block *b = &c->blocks[random_below(r, c->count)];
    uint32_t dim = (uint32_t)random_below(r, c->n_dims);
    if (b->extent[dim] < 2)
        return;
    uint64_t first = 1 + random_below(r, b->extent[dim] - 1);
    block rest = *b;
    b->extent[dim] = first;
    rest.offset[dim] += first;
    rest.extent[dim] -= first;
    c->blocks[c->count++] = rest;
}

static void damage(random_source *r, case_of_blocks *c)
{
    size_t victim = random_below(r, c->count);
    switch (random_below(r, 4)) {
    case 0:
        c->blocks[victim] = c->blocks[--c->count];
        break;
    case 1:
        c->blocks[victim] = random_block(r, c->n_dims, c->shape);
        break;
    case 2:
        c->blocks[c->count++] = random_block(r, c->n_dims, c->shape);
        break;
    default: /* a replica does no harm */
        c->blocks[c->count] = c->blocks[victim];
        c->count++;
        break;
    }
}

static void shuffle(random_source *r, case_of_blocks *c)
{
    for (size_t i = c->count; i > 1; i--) {
        size_t j = random_below(r, i);
        block b = c->blocks[i - 1];
        c->blocks[i - 1] = c->blocks[j];
        c->blocks[j] = b;
    }
}

/* Whether any two different blocks hold one element, whether any element is nobody's. */
static void model(const case_of_blocks *c, bool *conflict, bool *hole)
{
    *conflict = *hole = false;
    for (uint64_t cell = 0; cell < cells_of(c->n_dims, c->shape); cell++) {
        uint64_t point[FANIN_MAX_DIMS];
        const block *owner = NULL;
        point_of(c->n_dims, c->shape, cell, point);
        for (size_t i = 0; i < c->count; i++) {
            if (!holds(&c->blocks[i], point))
                continue;
            if (owner && !block_equal(owner, &c->blocks[i]))
                *conflict = true;
            owner = &c->blocks[i];
        }
        *hole |= !owner;
    }
}

static void check_hole(const case_of_blocks *c, const block *fault, long a, long b)
{
    assert_int_equal(a, -1);
    assert_int_equal(b, -1);
    assert_false(block_is_empty(fault));
    assert_true(block_inside(fault, c->shape));
    for (size_t i = 0; i < c->count; i++)
        assert_false(block_intersect(fault, &c->blocks[i], NULL));
}

static void check_conflict(const case_of_blocks *c, const block *fault, long a, long b)
{
    block overlap;
    assert_in_range(a, 0, c->count - 1);
    assert_in_range(b, 0, c->count - 1);
    assert_false(block_equal(&c->blocks[a], &c->blocks[b]));
    assert_true(block_intersect(&c->blocks[a], &c->blocks[b], &overlap));
    assert_true(block_equal(&overlap, fault));
}

static int compare_with_model(const case_of_blocks *c)
{
    block fault;
    long a, b;
    bool conflict, hole;
    block_tiling got =
        block_tiles(c->n_dims, c->shape, c->blocks, c->count, NULL, &fault, &a, &b);
    assert_int_equal(
        block_tiles(c->n_dims, c->shape, c->blocks, c->count, NULL, NULL, NULL, NULL),
        got);
    model(c, &conflict, &hole);
    switch (got) {
    case TILING_EXACT:
        assert_false(conflict || hole);
        break;
    case TILING_HOLE:
        assert_true(hole);
        check_hole(c, &fault, a, b);
        break;
    case TILING_CONFLICT:
        assert_true(conflict);
        check_conflict(c, &fault, a, b);
        break;
    default:
        fail();
    }
    return (int)got;
}

TEST(tilings_match_the_model)
{
    random_source r = {2};
    int seen[3] = {0};
    for (int round = 0; round < 20000; round++) {
        case_of_blocks c = {.n_dims = 1 + (uint32_t)random_below(&r, 3), .count = 1};
        for (uint32_t i = 0; i < c.n_dims; i++)
            c.shape[i] = 1 + random_below(&r, 7);
        c.blocks[0] = make(c.n_dims, (uint64_t[]){0, 0, 0}, c.shape);
        for (uint64_t cuts = random_below(&r, 12); cuts > 0; cuts--)
            cut(&r, &c);
        for (uint64_t n = random_below(&r, 3); n > 0 && c.count > 0; n--)
            damage(&r, &c);
        shuffle(&r, &c);
        seen[compare_with_model(&c)]++;
    }
    /* The generator must reach all verdicts, or the test above shows little. */
    for (int i = 0; i < 3; i++)
        assert_true(seen[i] > 2000);
}

/* A pinwheel has no straight cut through it. */
TEST(tilings_without_straight_cuts)
{
    case_of_blocks c = {.n_dims = 2, .shape = {3, 3}, .count = 5};
    c.blocks[0] = make(2, (uint64_t[]){0, 0}, (uint64_t[]){1, 2});
    c.blocks[1] = make(2, (uint64_t[]){0, 2}, (uint64_t[]){2, 1});
    c.blocks[2] = make(2, (uint64_t[]){2, 1}, (uint64_t[]){1, 2});
    c.blocks[3] = make(2, (uint64_t[]){1, 0}, (uint64_t[]){2, 1});
    c.blocks[4] = make(2, (uint64_t[]){1, 1}, (uint64_t[]){1, 1});
    assert_int_equal(compare_with_model(&c), TILING_EXACT);
    c.count = 4;
    assert_int_equal(compare_with_model(&c), TILING_HOLE);
    /* As much is counted twice as is missing: volumes alone would not tell. */
    c.count = 5;
    c.blocks[4] = make(2, (uint64_t[]){0, 0}, (uint64_t[]){1, 1});
    assert_int_not_equal(compare_with_model(&c), TILING_EXACT);
}

TEST(scalars_and_empty_tensors)
{
    block scalar = {.n_dims = 0}, twice[2] = {{.n_dims = 0}, {.n_dims = 0}};
    uint64_t shape[] = {0, 5};
    assert_int_equal(block_tiles(0, NULL, &scalar, 1, NULL, NULL, NULL, NULL),
                     TILING_EXACT);
    assert_int_equal(block_tiles(0, NULL, twice, 2, NULL, NULL, NULL, NULL),
                     TILING_EXACT);
    assert_int_equal(block_tiles(0, NULL, NULL, 0, NULL, NULL, NULL, NULL),
                     TILING_HOLE);
    assert_int_equal(block_tiles(2, shape, NULL, 0, NULL, NULL, NULL, NULL),
                     TILING_EXACT);
    shape[0] = 4;
    block fault;
    assert_int_equal(block_tiles(2, shape, NULL, 0, NULL, &fault, NULL, NULL),
                     TILING_HOLE);
    assert_int_equal(fault.extent[0], 4);
    assert_int_equal(fault.extent[1], 5);
}

TEST(blocks_outside_are_conflicts)
{
    uint64_t shape[] = {4};
    block blocks[] = {{.n_dims = 1, .offset = {0}, .extent = {4}},
                      {.n_dims = 1, .offset = {3}, .extent = {UINT64_MAX - 1}}};
    long a, b;
    assert_int_equal(block_tiles(1, shape, blocks, 2, NULL, NULL, &a, &b),
                     TILING_CONFLICT);
    assert_int_equal(a, 1);
    assert_int_equal(b, 1);
    blocks[1].extent[0] = 0;
    assert_int_equal(block_tiles(1, shape, blocks, 2, NULL, NULL, &a, &b),
                     TILING_CONFLICT);
}

TEST(many_blocks_are_quick)
{
    /* 512 x 128 blocks: comparing pairs would take minutes. */
    enum { A = 512, B = 128 };
    static block blocks[A * B];
    uint64_t shape[] = {A * 3, B * 5};
    for (uint64_t i = 0; i < A * B; i++)
        blocks[i] = make(2, (uint64_t[]){i / B * 3, i % B * 5}, (uint64_t[]){3, 5});
    assert_int_equal(block_tiles(2, shape, blocks, A * B, NULL, NULL, NULL, NULL),
                     TILING_EXACT);
    blocks[777].extent[1] = 4;
    block fault;
    assert_int_equal(block_tiles(2, shape, blocks, A * B, NULL, &fault, NULL, NULL),
                     TILING_HOLE);
    assert_int_equal(fault.offset[1], 777 % B * 5 + 4);
}

static bool say_yes(void *cookie)
{
    ++*(unsigned *)cookie;
    return true;
}

/* Cut into units in all eight dimensions. */
TEST(work_is_bounded_and_stops)
{
    enum { SIDE = 4, N = 65536 };
    static block blocks[N];
    uint64_t shape[8];
    unsigned asked = 0;
    work_stop stop = {.fn = say_yes, .cookie = &asked};
    for (int d = 0; d < 8; d++)
        shape[d] = SIDE;
    for (uint64_t i = 0; i < N; i++) {
        blocks[i] = (block){.n_dims = 8};
        for (uint32_t d = 0; d < 8; d++) {
            blocks[i].offset[d] = i * 40503 % N >> 2 * d & 3;
            blocks[i].extent[d] = 1;
        }
    }
    assert_int_equal(block_tiles(8, shape, blocks, N, NULL, NULL, NULL, NULL),
                     TILING_LIMIT);
    assert_int_equal(block_tiles(8, shape, blocks, N, &stop, NULL, NULL, NULL),
                     TILING_STOPPED);
    assert_int_equal(asked, 1);
}

TEST(ranges_do_not_wrap)
{
    static uint8_t bytes[64];
    const uint64_t extent[] = {4, 2};
    const uint64_t at = (uintptr_t)(bytes + 32);
    static const struct {
        int64_t stride[2];
        bool good;
        int64_t low, high;
    } cases[] = {
        {{4, 2}, true, 0, 16},
        {{-4, 2}, true, -12, 4},
        {{-4, -2}, true, -14, 2},
        {{0, 2}, true, 0, 4},
        {{INT64_MIN, 2}, false, 0, 0},
        {{INT64_MAX, 2}, false, 0, 0},
        {{INT64_MAX / 3, 2}, false, 0, 0},
        {{INT64_MIN / 3, 2}, false, 0, 0},
        {{INT64_C(1) << 62, INT64_MIN}, false, 0, 0},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        uint64_t low, high;
        bool good = block_range(2, extent, cases[i].stride, 2, bytes + 32, &low, &high);
        assert_int_equal(good, cases[i].good);
        if (good) {
            assert_int_equal(low - at, (uint64_t)cases[i].low);
            assert_int_equal(high - at, (uint64_t)cases[i].high);
        }
    }
    uint64_t low, high;
    assert_true(block_range(0, NULL, NULL, 8, bytes, &low, &high));
    assert_int_equal(high - low, 8);
}
