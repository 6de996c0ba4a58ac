/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The sources of the kernels that make and apply patches, compiled for the CPU. What is made is
 * that of the host's patch_maker, byte for byte; what is applied is what lies in landings, and no
 * other byte. They touch nothing but what they are told, and use aligned addresses only.
 */
#include "warp.h"

#define __popc __builtin_popcount

/* A shuffle brings lanes together as well. */
static void __syncwarp()
{
    (void)__shfl_sync(~0u, 0, current);
}

#undef __shared__
#define __shared__ static
#include "patch_kernel.cu"

extern "C" {
#include "shards/patch_maker.h"
}

#define MOST (3u * PATCH_KERNEL_SEGMENT)
#define MARK 0x5au

static patch_parameters launched;

static void count()
{
    fanin_patch_count(launched);
}

static void scan()
{
    fanin_patch_scan(launched);
}

static void emit()
{
    fanin_patch_emit(launched);
}

/* Of @p length bytes, which end at a page that nobody may touch. */
static uint8_t *at_the_end(uint64_t length)
{
    const uint64_t size = (length + 2 * PAGE - 1) / PAGE * PAGE;
    char *all = static_cast<char *>(
        mmap(nullptr, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    assert_true(all != MAP_FAILED);
    assert_int_equal(mprotect(all, size - PAGE, PROT_READ | PROT_WRITE), 0);
    return reinterpret_cast<uint8_t *>(all) + (size - PAGE - length) / 16 * 16;
}

/* All that at_the_end() mapped, up to the page behind it. */
static void release(uint8_t *memory, uint64_t length)
{
    uint8_t *first = memory - reinterpret_cast<uintptr_t>(memory) % PAGE;
    munmap(first, length + PAGE);
}

/** Two copies, and where the kernels write. */
struct world {
    uint8_t *before, *after, *out;
    uint64_t length, directory, made;
};

static world world_of(uint64_t length)
{
    world w = {};
    w.length = length;
    w.directory = 4 * patch_kernel_segments(length);
    w.before = at_the_end(length);
    w.after = at_the_end(length);
    w.out = at_the_end(w.directory + 2 * MOST + 16);
    static const char *chance = guarded_chance();
    for (uint64_t i = 0; i < length; i++)
        w.before[i] = w.after[i] = static_cast<uint8_t>(chance[i * 7 % SPACE]);
    return w;
}

static void leave(const world &w)
{
    release(w.before, w.length);
    release(w.after, w.length);
    release(w.out, w.directory + 2 * MOST + 16);
}

static void make(world *w, uint64_t most, unsigned blocks)
{
    static uint64_t scratch[4096];
    assert_true(patch_kernel_scratch(w->length) <= sizeof scratch);
    memset(w->out, MARK, w->directory + 2 * MOST + 16);
    launched.before = w->before;
    launched.after = w->after;
    launched.bytes = w->length;
    launched.most = most;
    launched.counts = reinterpret_cast<uint16_t *>(scratch);
    launched.first = scratch + patch_kernel_segments(w->length) * PATCH_SHARES / 4;
    launched.directory = reinterpret_cast<uint32_t *>(w->out);
    launched.changes = w->out + w->directory;
    launched.made = &w->made;
    run_blocks(count, blocks, PATCH_KERNEL_WARPS);
    run_blocks(scan, 1, 1);
    run_blocks(emit, blocks, PATCH_KERNEL_WARPS);
}

/* As the host makes it. */
static void check(world *w, unsigned blocks)
{
    uint64_t changes = 0;
    patch_maker *m = patch_maker_open(w->before, w->length, 1, 4 * w->length + 4096);
    patch_finds *f = patch_finds_open(m);
    patch_maker_compare(m, f, 0, w->after, w->length);
    patch_maker_keep(m, f);
    uint8_t *expected = patch_maker_pack(m, &changes);
    assert_non_null(expected);
    make(w, changes / 4, blocks);
    assert_int_equal(w->made, changes / 4);
    assert_memory_equal(w->out, expected, w->directory + changes);
    assert_int_equal(w->out[w->directory + changes], MARK);
    free(expected);
    patch_finds_close(f);
    patch_maker_close(m);
}

TEST(test_shares)
{
    /* One of so many bytes changes. */
    static const uint64_t one_of[] = {1, 2, 20, 150, 4000, 200000, 1u << 30};
    for (unsigned i = 0; i < 7; i++) {
        world w = world_of(MOST - below(2 * PATCH_KERNEL_SEGMENT));
        for (uint64_t at = 0; at < w.length; at++)
            if (below(one_of[i % 7]) == 0)
                w.after[at] = static_cast<uint8_t>(below(256));
        check(&w, 1 + i % 3);
    }
}

TEST(test_all_and_none)
{
    world w = world_of(MOST);
    check(&w, 1);
    assert_int_equal(w.made, 0);
    for (uint64_t at = 0; at < w.length; at++)
        w.after[at] ^= 0xff;
    check(&w, 2);
    assert_int_equal(w.made, MOST / 2);
}

/* Ends of words, of vectors, of shares and of segments. */
TEST(test_lengths)
{
    static const uint64_t about[] = {1, 2 * PATCH_SHARE_WORDS, PATCH_KERNEL_SEGMENT,
                                     PATCH_KERNEL_SEGMENT + 2 * PATCH_SHARE_WORDS};
    for (uint64_t base : about)
        for (uint64_t more = 0; more < 20; more += 1 + more / 3) {
            world w = world_of(base + more);
            w.after[w.length - 1] ^= 1;
            w.after[0] ^= 0x80;
            check(&w, 1);
        }
}

TEST(test_too_large)
{
    world w = world_of(PATCH_KERNEL_SEGMENT + 1);
    for (uint64_t at = 0; at < w.length; at += 100)
        w.after[at] ^= 1;
    check(&w, 1);
    const uint64_t exact = w.made;
    make(&w, exact - 1, 1);
    assert_true(w.made == PATCH_TOO_LARGE);
    assert_int_equal(w.out[w.directory], MARK);
    make(&w, exact, 1);
    assert_int_equal(w.made, exact);
}

/* ---------------------------------------------------------------------- applying */

static patch_apply_parameters applied;

static void apply()
{
    fanin_patch_apply(applied);
}

/* Of up to three dimensions, odd or even; the copy's strides descend, the destination's are as
   large as need be, in either direction. Lands from @p to on. */
static patch_landing landing_by_chance(uint64_t copy, uint8_t *to, uint64_t room)
{
    patch_landing l = {};
    const uint64_t grain = below(2) ? 2 : 1;
    l.n_dims = static_cast<uint32_t>(below(4));
    l.run = (1 + below(60)) * grain;
    uint64_t length = l.run, span = l.run;
    for (uint32_t i = l.n_dims; i-- > 0;) {
        l.extent[i] = 1 + below(9);
        l.from_step[i] = length + below(5) * grain;
        const uint64_t step = span + below(3) * grain;
        const bool down = below(3) == 0;
        l.to_step[i] = down ? -static_cast<int64_t>(step) : static_cast<int64_t>(step);
        length = l.from_step[i] * (l.extent[i] - 1) + length;
        span = step * (l.extent[i] - 1) + span;
        l.to += down ? step * (l.extent[i] - 1) : 0;
    }
    if (l.n_dims == 0)
        l.run = length = (1 + below(30000)) * grain;
    l.from = below((copy - length) / grain) * grain;
    l.end = l.from + length;
    l.to += reinterpret_cast<uint64_t>(to);
    assert_true((l.n_dims ? span : length) < room);
    uint64_t bits = l.from | l.end | l.to | l.run;
    for (uint32_t i = 0; i < l.n_dims; i++)
        bits |= l.from_step[i] | static_cast<uint64_t>(l.to_step[i]);
    l.even = bits % 2 == 0;
    return l;
}

/* All its bytes of the copy. */
static void land_all(const patch_landing &l, const uint8_t *copy)
{
    uint64_t runs = 1;
    for (uint32_t i = 0; i < l.n_dims; i++)
        runs *= l.extent[i];
    for (uint64_t k = 0; k < runs; k++) {
        uint64_t rest = k, from = l.from;
        uint8_t *to = reinterpret_cast<uint8_t *>(l.to);
        for (uint32_t i = l.n_dims; i-- > 0;) {
            from += rest % l.extent[i] * l.from_step[i];
            to += static_cast<int64_t>(rest % l.extent[i]) * l.to_step[i];
            rest /= l.extent[i];
        }
        memcpy(to, copy + from, l.run);
    }
}

#define LANDINGS 5u
#define LANDING_ROOM 100000u

TEST(test_landings)
{
    uint8_t *to = at_the_end(LANDINGS * LANDING_ROOM),
            *expected = static_cast<uint8_t *>(malloc(LANDINGS * LANDING_ROOM));
    for (unsigned round = 0; round < 30; round++) {
        world w = world_of(2 * PATCH_KERNEL_SEGMENT + 3000 + below(7));
        patch_landing landings[LANDINGS];
        patch_run runs[3];
        const uint64_t one_of = below(2) ? 3 : 300;
        memset(to, MARK, LANDINGS * LANDING_ROOM);
        for (uint32_t i = 0; i < LANDINGS; i++) {
            landings[i] =
                landing_by_chance(w.length, to + i * LANDING_ROOM, LANDING_ROOM);
            land_all(landings[i], w.before);
        }
        for (uint64_t at = 0; at < w.length; at++)
            if (below(one_of) == 0)
                w.after[at] ^= 0x31;
        make(&w, UINT64_MAX, 1);
        uint64_t at = 0;
        const uint32_t *counts = launched.directory;
        for (uint32_t i = 0; i < 3; at += counts[i], i++) {
            runs[i].changes = launched.changes + 4 * at;
            runs[i].start = i * PATCH_KERNEL_SEGMENT;
            runs[i].count = counts[i];
            runs[i].first = 0;
            runs[i].n = LANDINGS;
        }
        applied.landings = landings;
        applied.runs = runs;
        applied.count = 3;
        run_blocks(apply, 1 + round % 3, PATCH_KERNEL_WARPS);
        memcpy(expected, to, LANDINGS * LANDING_ROOM);
        for (const patch_landing &l : landings)
            land_all(l, w.after);
        assert_memory_equal(expected, to, LANDINGS * LANDING_ROOM);
        leave(w);
    }
    free(expected);
}
