/* SPDX-License-Identifier: Apache-2.0 */
/* Copy entries: made from views, cut into units, and carried out by the CPU, always against
   strided_copy() or a byte-wise model. */
#include "copy_kernel.h"
#include "copy_list.h"
#include "random.h"
#include "testing.h"

#define SPACE 65536 /* bytes of the source and of the destination */

static uint8_t source[SPACE], wanted[2 * SPACE], got[2 * SPACE];
static random_source seed = {1};

static uint64_t below(uint64_t n)
{
    return random_below(&seed, n);
}

static uint64_t address(const void *p)
{
    return (uint64_t)(uintptr_t)p;
}

static void reset(void)
{
    memset(wanted, 0xEE, sizeof wanted);
    memset(got, 0xEE, sizeof got);
}

/* ----------------------------------------------------------------- views */

/* A block cut out of one packed tensor and put into another: dimensions in any order. */
static void random_view(strided *view, uint64_t *from_out, uint64_t *to_out)
{
    uint32_t n_dims = (uint32_t)below(5);
    uint64_t unit = UINT64_C(1) << below(4), extent[FANIN_MAX_DIMS];
    int64_t from[FANIN_MAX_DIMS], to[FANIN_MAX_DIMS];
    uint64_t from_size = unit, to_size = unit;
    *from_out = *to_out = 0;
    for (uint32_t i = n_dims; i-- > 0;) {
        uint64_t in_from, in_to;
        extent[i] = 1 + below(6);
        in_from = extent[i] + (below(2) ? below(4) : 0);
        in_to = extent[i] + (below(2) ? below(4) : 0);
        from[i] = (int64_t)from_size;
        to[i] = (int64_t)to_size;
        *from_out += below(in_from - extent[i] + 1) * from_size;
        *to_out += below(in_to - extent[i] + 1) * to_size;
        from_size *= in_from;
        to_size *= in_to;
    }
    if (n_dims > 1 && below(3) == 0) { /* backwards on one side */
        uint32_t i = (uint32_t)below(n_dims);
        *from_out += (extent[i] - 1) * (uint64_t)from[i];
        from[i] = -from[i];
    }
    strided_init(view, n_dims, extent, from, to, unit);
    assert_true(from_size <= SPACE && to_size <= SPACE);
    if (view->run % 4 == 0 && unit % 4 == 0 && below(3) == 0) {
        view->convert = 1 + (uint32_t)below(2);
        for (uint32_t i = 0; i < view->n_dims; i++)
            view->to[i] /= 2;
        *to_out /= 2;
    }
}

TEST(test_views)
{
    for (int round = 0; round < 1000; round++) {
        copy_list list = {0};
        strided view;
        uint64_t from, to;
        reset();
        random_view(&view, &from, &to);
        strided_copy(&view, wanted + to, source + from);
        copy_list_add_view(&list, 3, from, to, &view);
        assert_false(list.failed);
        const uint64_t bases[] = {0, 0, 0, address(source) - 77};
        copy_entries_run(list.entries, list.n, bases, 77, address(got));
        assert_memory_equal(got, wanted, sizeof got);
        /* the innermost two dimensions are one entry */
        uint64_t lines = strided_runs(&view);
        if (view.n_dims > 0)
            lines /= view.extent[view.n_dims - 1];
        assert_int_equal(list.n, lines);
        copy_list_free(&list);
        assert_null(list.entries);
    }
}

/* Runs that one entry cannot hold, with their conversion: only the entries, not the bytes. */
TEST(test_long_runs)
{
    const uint64_t length = (UINT64_C(5) << 30) + 12;
    for (uint32_t convert = CONVERT_NONE; convert <= CONVERT_F32_F16; convert++) {
        copy_list list = {0};
        const strided view = {
            .n_dims = 1,
            .extent = {2},
            .from = {(int64_t)1 << 40},
            .to = {(int64_t)1 << 41},
            .run = length,
            .convert = convert,
        };
        copy_list_add_view(&list, 1, 1000, 2000, &view);
        uint64_t next = 0, i = 0;
        for (uint64_t line = 0; line < 2; line++, next = 0)
            for (; i < list.n && next < length; i++) {
                const copy_entry *e = &list.entries[i];
                assert_int_equal(e->from, 1000 + (line << 40) + next);
                assert_int_equal(e->to,
                                 2000 + (line << 41) + convert_bytes(convert, next));
                assert_int_equal(e->runs, 1);
                assert_int_equal(e->convert, convert);
                assert_int_equal(e->base, 1);
                assert_int_equal(e->run % 4, 0);
                next += e->run;
                assert_true(next <= length);
            }
        assert_int_equal(i, list.n);
        assert_int_equal(list.n, 2 * 6);
        copy_list_free(&list);
    }
    copy_list list = {0};
    copy_list_add(&list, 0, 5, 6, length);
    assert_int_equal(list.n, 6);
    assert_int_equal(list.entries[5].from + list.entries[5].run, 5 + length);
    copy_list_free(&list);
}

TEST(test_many_runs)
{
    copy_list list = {0};
    const strided view = {
        .n_dims = 1,
        .extent = {UINT64_C(3) << 31},
        .from = {-8},
        .to = {2},
        .run = 2,
    };
    copy_list_add_view(&list, 0, UINT64_C(1) << 50, 0, &view);
    uint64_t done = 0;
    for (uint64_t i = 0; i < list.n; i++) {
        assert_int_equal(list.entries[i].from, (UINT64_C(1) << 50) - 8 * done);
        assert_int_equal(list.entries[i].to, 2 * done);
        done += list.entries[i].runs;
    }
    assert_int_equal(done, view.extent[0]);
    copy_list_free(&list);
}

TEST(test_nothing)
{
    copy_list list = {0};
    const strided empty = {0};
    copy_list_add(&list, 0, 1, 2, 0);
    copy_list_add_view(&list, 0, 1, 2, &empty);
    assert_int_equal(list.n, 0);
    const copy_entry none[] = {{.run = 5, .runs = 0}, {.run = 0, .runs = 5}};
    copy_entries_run(none, 2, NULL, 0, 0); /* touches nothing: address 0 */
    copy_list_free(&list);
}

/* ----------------------------------------------------------------- units */

/* Any layout that fits, destinations of runs apart from each other. */
static copy_entry random_entry(void)
{
    copy_entry e = {.base = (uint32_t)below(3), .convert = (uint32_t)below(3)};
    uint64_t longest = below(2) ? 64 : 50000;
    e.run = 1 + (uint32_t)below(longest);
    if (e.convert != CONVERT_NONE)
        e.run = (e.run + 3) / 4 * 4;
    uint64_t pitch = e.run + below(8);
    e.runs = 1 + (uint32_t)below(SPACE / pitch - 1 < 5000 ? SPACE / pitch : 5000);
    e.from_step = below(4) ? (int64_t)pitch : 0;
    e.to_step = (int64_t)(e.run + below(3));
    uint64_t room = SPACE - (e.runs - 1) * pitch - e.run;
    e.from = below(room + 1);
    e.to = below(100);
    if (below(4) == 0) {
        e.to += (e.runs - 1) * (uint64_t)e.to_step;
        e.to_step = -e.to_step;
    }
    return e;
}

TEST(test_units)
{
    for (int round = 0; round < 600; round++) {
        reset();
        copy_entry e = random_entry();
        uint64_t n = copy_units_cut(&e, NULL);
        copy_entry *units = calloc(n, sizeof *units);
        assert_non_null(units);
        assert_int_equal(copy_units_cut(&e, units), n);
        const uint64_t bases[] = {address(source), address(source), address(source)};
        copy_entries_run(&e, 1, bases, 0, address(wanted));
        uint64_t bytes = 0;
        for (uint64_t i = 0; i < n; i++) {
            bytes += (uint64_t)units[i].run * units[i].runs;
            assert_true((uint64_t)units[i].run * units[i].runs <= COPY_UNIT_BYTES);
            assert_true(units[i].runs <= COPY_UNIT_RUNS);
            assert_int_equal(units[i].base, e.base);
            if (i > 0 && units[i].run > 0 && e.run > COPY_UNIT_BYTES &&
                (e.convert == CONVERT_NONE || e.from % 4 == 0) && e.runs == 1)
                assert_int_equal(units[i].from % 128, 0);
        }
        assert_int_equal(bytes, (uint64_t)e.run * e.runs);
        copy_entries_run(units, n, bases, 0, address(got));
        assert_memory_equal(got, wanted, sizeof got);
        free(units);
    }
}

/* Not many more of them than needed. */
TEST(test_unit_numbers)
{
    const struct {
        uint32_t run, runs;
        uint64_t units;
    } cases[] = {
        {0, 7, 0},
        {7, 0, 0},
        {1, 1, 1},
        {COPY_UNIT_BYTES, 1, 1},
        {COPY_UNIT_BYTES + 1, 1, 2},
        {COPY_UNIT_BYTES, 3, 3},
        {COPY_UNIT_BYTES / 2, 5, 3},
        {2, COPY_UNIT_RUNS, 1},
        {2, COPY_UNIT_RUNS + 1, 2},
        {UINT32_C(1) << 30, 1, (UINT64_C(1) << 30) / COPY_UNIT_BYTES},
        {45056, 1, 3},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        const copy_entry e = {.run = cases[i].run, .runs = cases[i].runs};
        assert_int_equal(copy_units_cut(&e, NULL), cases[i].units);
    }
}

/* Warps that take one each end together. */
TEST(test_units_are_alike)
{
    for (uint32_t runs = 1; runs < 200; runs++) {
        const copy_entry e = {
            .run = 768, .runs = runs, .from_step = 1536, .to_step = 768};
        copy_entry units[200];
        uint64_t n = copy_units_cut(&e, units), next = 0;
        for (uint64_t i = 0; i < n; i++) {
            assert_in_range(units[i].runs, runs / n, (runs + n - 1) / n);
            assert_int_equal(units[i].from, next * 1536);
            assert_int_equal(units[i].to, next * 768);
            next += units[i].runs;
        }
        assert_int_equal(next, runs);
    }
}

TEST(test_parts)
{
    const copy_entry small = {.run = 100, .runs = 1};
    const copy_entry large = {.run = 1 << 30, .runs = 1};
    const copy_entry many = {.run = 2, .runs = 1 << 20};
    assert_int_equal(copy_units_parts(&small, 1, 4000), 1);
    assert_int_equal(copy_units_parts(&many, 1, 4000), (1 << 20) / COPY_UNIT_RUNS);
    /* a few for each warp, and no more than the length is worth */
    uint32_t parts = copy_units_parts(&large, 1, 4000);
    assert_in_range(parts, 4000, 65536);
    const copy_entry both[] = {small, large, small, large};
    assert_in_range(copy_units_parts(both, 4, 4000), 1000, parts);
    /* more entries than warps: one each */
    copy_entry crowd[64];
    for (size_t i = 0; i < 64; i++)
        crowd[i] = large;
    assert_int_equal(copy_units_parts(crowd, 64, 1), 1);
}

int main(void)
{
    for (size_t i = 0; i < SPACE; i++)
        source[i] = (uint8_t)random_next(&seed);
    return tests_run(NULL);
}
