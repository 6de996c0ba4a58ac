/* SPDX-License-Identifier: Apache-2.0 */
/* Strided copies against a model that moves one unit after the other. */
#include "block.h"
#include "convert.h"
#include "random.h"
#include "testing.h"

#define ARENA 20000

typedef struct layout {
    int64_t stride[FANIN_MAX_DIMS];
    size_t first; /* where in the arena the first element lies */
} layout;

/* Memory for a block whose dimensions lie in a random order, with random gaps, some
   dimensions backwards: no two units share a byte. */
static bool random_layout(random_source *r, uint32_t n_dims, const uint64_t *extent,
                          uint64_t unit, layout *out)
{
    uint32_t order[FANIN_MAX_DIMS];
    uint64_t step = unit + (random_below(r, 3) == 0 ? random_below(r, 5) : 0);
    bool plain = random_below(r, 3) == 0;
    for (uint32_t i = 0; i < n_dims; i++)
        order[i] = i;
    for (uint32_t i = n_dims; i > 1 && !plain; i--) {
        uint32_t j = (uint32_t)random_below(r, i), swap = order[i - 1];
        order[i - 1] = order[j];
        order[j] = swap;
    }
    out->first = 0;
    for (uint32_t i = n_dims; i-- > 0;) {
        uint32_t dim = order[i];
        bool backwards = random_below(r, 4) == 0;
        out->stride[dim] = backwards ? -(int64_t)step : (int64_t)step;
        if (backwards)
            out->first += (extent[dim] - 1) * step;
        step *= extent[dim];
        if (random_below(r, 3) == 0)
            step += random_below(r, 9);
    }
    return step + unit <= ARENA;
}

static void copy_by_units(uint32_t n_dims, const uint64_t *extent, const layout *from,
                          const layout *to, uint64_t unit, const uint8_t *source,
                          uint8_t *destination)
{
    uint64_t cells = 1;
    for (uint32_t i = 0; i < n_dims; i++)
        cells *= extent[i];
    for (uint64_t cell = 0; cell < cells; cell++) {
        uint64_t rest = cell;
        int64_t a = (int64_t)from->first, b = (int64_t)to->first;
        for (uint32_t i = n_dims; i-- > 0;) {
            a += from->stride[i] * (int64_t)(rest % extent[i]);
            b += to->stride[i] * (int64_t)(rest % extent[i]);
            rest /= extent[i];
        }
        memcpy(destination + b, source + a, unit);
    }
}

static void copy_by_runs(const strided *s, uint8_t *to, const uint8_t *from)
{
    for (uint64_t i = 0; i < strided_runs(s); i++) {
        int64_t a, b;
        strided_run(s, i, &a, &b);
        memcpy(to + b, from + a, s->run);
    }
}

TEST(copies_match_the_model)
{
    random_source r = {3};
    static uint8_t source[ARENA], expected[ARENA], got[ARENA];
    for (size_t i = 0; i < ARENA; i++)
        source[i] = (uint8_t)random_next(&r);
    int done = 0, fused = 0;
    while (done < 5000) {
        static const uint64_t units[] = {1, 2, 3, 4, 8, 16};
        uint64_t unit = units[random_below(&r, 6)], extent[FANIN_MAX_DIMS];
        uint32_t n_dims = (uint32_t)random_below(&r, 5);
        layout from, to;
        for (uint32_t i = 0; i < n_dims; i++)
            extent[i] = 1 + random_below(&r, 5);
        if (!random_layout(&r, n_dims, extent, unit, &from) ||
            !random_layout(&r, n_dims, extent, unit, &to))
            continue;
        strided s;
        strided_init(&s, n_dims, extent, from.stride, to.stride, unit);
        fused += s.n_dims < n_dims;
        memset(expected, 0xee, sizeof expected);
        copy_by_units(n_dims, extent, &from, &to, unit, source, expected);
        memset(got, 0xee, sizeof got);
        strided_copy(&s, got + to.first, source + from.first);
        assert_memory_equal(got, expected, sizeof got);
        memset(got, 0xee, sizeof got);
        copy_by_runs(&s, got + to.first, source + from.first);
        assert_memory_equal(got, expected, sizeof got);
        done++;
    }
    assert_true(fused > 500);
}

/* Elements of 4 bytes from one layout to elements of 2 in another. */
TEST(conversions_match_the_model)
{
    random_source r = {4};
    static uint8_t source[ARENA], expected[ARENA], got[ARENA];
    for (size_t i = 0; i < ARENA; i++)
        source[i] = (uint8_t)random_next(&r);
    for (int done = 0; done < 3000;) {
        uint32_t convert = random_below(&r, 2) ? CONVERT_F32_BF16 : CONVERT_F32_F16;
        uint32_t n_dims = (uint32_t)random_below(&r, 5);
        uint64_t extent[FANIN_MAX_DIMS], cells = 1;
        int64_t measure[FANIN_MAX_DIMS];
        layout from, to;
        for (uint32_t i = 0; i < n_dims; i++)
            cells *= extent[i] = 1 + random_below(&r, 5);
        if (!random_layout(&r, n_dims, extent, 4, &from) ||
            !random_layout(&r, n_dims, extent, 2, &to))
            continue;
        /* As planners do it: fused by the source's measure, then halved. */
        for (uint32_t i = 0; i < n_dims; i++)
            measure[i] = 2 * to.stride[i];
        strided s;
        strided_init(&s, n_dims, extent, from.stride, measure, 4);
        s.convert = convert;
        for (uint32_t i = 0; i < s.n_dims; i++)
            s.to[i] /= 2;
        memset(expected, 0xee, sizeof expected);
        for (uint64_t cell = 0; cell < cells; cell++) {
            uint64_t rest = cell;
            int64_t a = (int64_t)from.first, b = (int64_t)to.first;
            for (uint32_t i = n_dims; i-- > 0; rest /= extent[i]) {
                a += from.stride[i] * (int64_t)(rest % extent[i]);
                b += to.stride[i] * (int64_t)(rest % extent[i]);
            }
            convert_run(convert, expected + b, source + a, 4);
        }
        memset(got, 0xee, sizeof got);
        strided_copy(&s, got + to.first, source + from.first);
        assert_memory_equal(got, expected, sizeof got);
        done++;
    }
}

TEST(packed_blocks_are_one_run)
{
    uint64_t extent[] = {6, 1, 7, 8};
    int64_t packed[FANIN_MAX_DIMS];
    block_packed_strides(4, extent, 2, packed);
    assert_int_equal(packed[0], 112);
    assert_int_equal(packed[1], 112);
    assert_int_equal(packed[2], 16);
    assert_int_equal(packed[3], 2);
    strided s;
    strided_init(&s, 4, extent, packed, packed, 2);
    assert_int_equal(s.n_dims, 0);
    assert_int_equal(s.run, 672);
    assert_int_equal(strided_runs(&s), 1);
}

TEST(rows_of_a_wider_tensor_are_one_dimension)
{
    /* 2 x 3 rows of 8 bytes, in a destination 32 bytes wide. */
    uint64_t extent[] = {2, 3, 4};
    int64_t from[] = {24, 8, 2}, to[] = {96, 32, 2};
    strided s;
    strided_init(&s, 3, extent, from, to, 2);
    assert_int_equal(s.n_dims, 1);
    assert_int_equal(s.extent[0], 6);
    assert_int_equal(s.run, 8);
    int64_t a, b;
    strided_run(&s, 4, &a, &b);
    assert_int_equal(a, 32);
    assert_int_equal(b, 128);
}

TEST(what_differs_on_one_side_is_not_fused)
{
    uint64_t extent[] = {2, 3, 4};
    int64_t from[] = {24, 8, 2}, to[] = {100, 32, 2};
    strided s;
    strided_init(&s, 3, extent, from, to, 2);
    assert_int_equal(s.n_dims, 2);
    int64_t backwards[] = {24, 8, -2};
    strided_init(&s, 3, extent, from, backwards, 2);
    assert_int_equal(s.run, 2);
}

TEST(scalars)
{
    strided s;
    strided_init(&s, 0, NULL, NULL, NULL, 4);
    uint32_t from = 0x12345678, to = 0;
    strided_copy(&s, &to, &from);
    assert_int_equal(to, from);
    assert_int_equal(strided_runs(&s), 1);
}
