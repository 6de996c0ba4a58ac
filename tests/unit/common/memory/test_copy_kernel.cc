/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The source of the copy kernel, compiled for the CPU. It has to do what copy_entries_run() does,
 * touch nothing but the runs, and use aligned addresses only.
 */
#include "warp.h"

extern "C" {
/* copy_list.h is C11 */
void copy_entries_run(const struct copy_entry *entries, uint64_t n,
                      const uint64_t *bases, uint64_t from_add, uint64_t to_add);
}

static uint32_t __funnelshift_r(uint32_t low, uint32_t high, uint32_t shift)
{
    return static_cast<uint32_t>((static_cast<uint64_t>(high) << 32 | low) >>
                                 (shift & 31));
}

static uint32_t __float_as_uint(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

static float __uint_as_float(uint32_t bits)
{
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

#include "copy_kernel.cu"

static copy_parameters launched;

static void copy_units()
{
    fanin_copy_units(launched);
}

static void launch(const copy_parameters *parameters, unsigned blocks)
{
    launched = *parameters;
    run_blocks(copy_units, blocks, COPY_KERNEL_WARPS);
}

/* ------------------------------------------------------------------------------- the cases */

/* Runs and pitches of all alignments; everything at one end of its space. */
static copy_entry make_entry(uint64_t *from_size, uint64_t *to_size)
{
    static const uint32_t grains[] = {1, 2, 4, 8, 16};
    copy_entry e = {};
    e.convert = static_cast<uint32_t>(below(2) * (1 + below(2)));
    const uint32_t grain = grains[below(5)], longest = below(2)   ? 96
                                                       : below(2) ? 3000
                                                                  : 30000;
    e.run = static_cast<uint32_t>(1 + below(longest)) * grain % (SPACE / 2) + grain;
    if (e.convert != CONVERT_NONE)
        e.run = (e.run + 3) / 4 * 4;
    const uint32_t out = e.convert == CONVERT_NONE ? e.run : e.run / 2;
    const uint64_t from_pitch = e.run + below(5) * grain,
                   to_pitch = out + below(5) * grain;
    uint64_t most = SPACE / (from_pitch > to_pitch ? from_pitch : to_pitch) - 1;
    most = most < 1 ? 1 : most < 700 ? most : 700;
    e.runs = static_cast<uint32_t>(1 + below(below(2) ? most : 1));
    e.from_step = static_cast<int64_t>(from_pitch);
    e.to_step = static_cast<int64_t>(to_pitch);
    *from_size = (e.runs - 1) * from_pitch + e.run;
    *to_size = (e.runs - 1) * to_pitch + out;
    if (below(4) == 0) {
        e.from = *from_size - e.run;
        e.from_step = -e.from_step;
    }
    return e;
}

TEST(test_entries)
{
    char *source = guarded_chance(), *got = guarded(), *wanted = guarded();
    for (int round = 0; round < 3000; round++) {
        uint64_t from_size, to_size;
        copy_entry e = make_entry(&from_size, &to_size);
        /* against one of the guards, or anywhere */
        const uint64_t from_room = SPACE - from_size, to_room = SPACE - to_size;
        const uint64_t from = below(3) == 0 ? 0
                              : below(2)    ? from_room
                                            : below(from_room + 1);
        const uint64_t to = below(3) == 0 ? 0 : below(2) ? to_room : below(to_room + 1);
        memset(got, 0x77, SPACE);
        memset(wanted, 0x77, SPACE);
        const uint64_t bases[] = {0, reinterpret_cast<uint64_t>(source) - 5};
        e.base = 1;
        copy_parameters p = {};
        p.entries = &e;
        p.bases = bases;
        p.count = 1;
        p.from_add = from + 5;
        p.to_add = reinterpret_cast<uint64_t>(got) + to;
        p.parts = below(2) ? 1 : 1 + static_cast<uint32_t>(below(40));
        p.ways = 1 + static_cast<uint32_t>(below(3));
        launch(&p, 1 + static_cast<unsigned>(below(2)));
        copy_entries_run(&e, 1, bases, p.from_add,
                         reinterpret_cast<uint64_t>(wanted) + to);
        if (memcmp(got, wanted, SPACE) != 0)
            fail_msg(
                "round %d: run %u, runs %u, steps %lld %lld, convert %u, parts %u, "
                "from %% 16 %u, to %% 16 %u",
                round, e.run, e.runs, static_cast<long long>(e.from_step),
                static_cast<long long>(e.to_step), e.convert, p.parts,
                static_cast<unsigned>(from % 16), static_cast<unsigned>(to % 16));
    }
}

/* Many entries, more than there are warps; some are empty; no bases. */
TEST(test_many)
{
    char *source = guarded_chance(), *got = guarded();
    copy_entry entries[300] = {};
    uint64_t at = 0;
    for (uint32_t i = 0; i < 300; i++) {
        entries[i].from = reinterpret_cast<uint64_t>(source) + at;
        entries[i].to = at;
        entries[i].run = i % 7 == 3 ? 0 : static_cast<uint32_t>(1 + below(400));
        entries[i].runs = 1;
        at += entries[i].run;
    }
    for (uint32_t parts = 1; parts < 4; parts++) {
        memset(got, 0x77, SPACE);
        copy_parameters p = {};
        p.entries = entries;
        p.count = 300;
        p.to_add = reinterpret_cast<uint64_t>(got);
        p.parts = parts;
        p.ways = 1 + 10 * (parts - 1);
        launch(&p, 3);
        assert_memory_equal(got, source, at);
        assert_int_equal(got[at], 0x77);
    }
}

/* Each kind of float, in every way in which elements are moved. */
TEST(test_floats)
{
    const uint32_t n = 1 << 14;
    char *source = guarded(), *got = guarded(), *wanted = guarded();
    for (uint32_t odd = 0; odd < 3; odd++)
        for (uint32_t first = 0; first < 64; first++) {
            for (uint32_t i = 0; i < n; i++) {
                const uint32_t bits = (first * n + i) << 12 | (i * 2654435761u >> 20);
                memcpy(source + 4 * odd / 2 + 4 * i, &bits, sizeof bits);
            }
            copy_entry e = {};
            e.from = reinterpret_cast<uint64_t>(source) + 4 * odd / 2;
            e.run = 4 * n;
            e.runs = 1;
            e.convert = 1 + first % 2;
            copy_parameters p = {};
            p.entries = &e;
            p.count = 1;
            p.parts = 1;
            p.ways = 1;
            p.to_add = reinterpret_cast<uint64_t>(got);
            launch(&p, 1);
            copy_entries_run(&e, 1, nullptr, 0, reinterpret_cast<uint64_t>(wanted));
            assert_memory_equal(got, wanted, 2 * n);
        }
}
