/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The source of the digest kernel, compiled for the CPU, told what to read by digest_list. It has
 * to give what libxxhash gives for the packed, converted bytes, touch nothing but the runs, and use
 * aligned addresses only.
 */
#include "warp.h"
#include <xxhash.h>

extern "C" {
#include "copy_list.h"
}

__extension__ typedef unsigned __int128 uint128;

static uint64_t __umul64hi(uint64_t a, uint64_t b)
{
    return static_cast<uint64_t>(static_cast<uint128>(a) * b >> 64);
}

/* A shuffle brings lanes together as well. */
static void __syncwarp()
{
    (void)__shfl_sync(~0u, 0, current);
}

#undef __shared__
#define __shared__ static
#include "digest_kernel.cu"

#define MOST_PIECES 256
#define PIECE DIGEST_KERNEL_PIECE

static digest_parameters launched;

static void digest_pieces()
{
    fanin_digest_pieces(launched);
}

static void run_list(const digest_list *list, unsigned blocks)
{
    launched.rows = list->rows;
    launched.entries = list->entries;
    launched.out = list->digests;
    launched.count = list->n_rows;
    launched.share = 1u << below(5);
    run_blocks(digest_pieces, blocks, DIGEST_KERNEL_WARPS);
}

static digest_list room()
{
    static char *memory;
    const size_t size = 8u << 20;
    if (!memory)
        memory = static_cast<char *>(aligned_alloc(16, size));
    memset(memory, 0x55, size);
    return digest_list_in(memory, size, MOST_PIECES, MOST_PIECES);
}

/* Pieces from @p first on are those of @p size packed bytes. Returns how many. */
static uint32_t check_pieces(const digest_list *list, uint32_t first,
                             const char *packed, uint64_t size, const char *what)
{
    uint32_t n = 0;
    for (uint64_t at = 0; at < size; at += PIECE, n++) {
        char piece[PIECE] = {};
        memcpy(piece, packed + at, size - at < PIECE ? size - at : PIECE);
        if (first + n >= list->n_pieces ||
            list->digests[first + n] != XXH3_64bits(piece, PIECE))
            fail_msg("%s: piece %u of %llu bytes differs", what, n,
                     static_cast<unsigned long long>(size));
    }
    return n;
}

/* Every length around the ends of pieces, at every alignment, against the end of the memory. */
TEST(test_lengths)
{
    char *source = guarded_chance();
    for (uint64_t size = 1; size < 2 * PIECE + 40; size++) {
        if (size % PIECE > 24 && size % PIECE < PIECE - 24 && size % 419 != 0)
            continue;
        digest_list list = room();
        const char *from = source + SPACE - size - (size % 3 ? 0 : below(17));
        assert_true(digest_list_add(&list, reinterpret_cast<uint64_t>(from), size, 1, 0,
                                    CONVERT_NONE));
        run_list(&list, 1);
        assert_int_equal(check_pieces(&list, 0, from, size, "a length"), list.n_pieces);
    }
}

/* Whole pieces that lie as they are, more than there are warps. */
TEST(test_plain)
{
    char *source = guarded_chance();
    for (unsigned blocks = 1; blocks < 4; blocks++) {
        digest_list list = room();
        assert_true(digest_list_add(&list, reinterpret_cast<uint64_t>(source), SPACE, 1,
                                    0, CONVERT_NONE));
        assert_int_equal(list.n_entries, 1);
        run_list(&list, blocks);
        check_pieces(&list, 0, source, SPACE, "plain");
    }
}

static uint32_t some_conversion()
{
    return static_cast<uint32_t>(below(2) * (1 + below(2)));
}

/* One range of runs by chance; what it is packed is added to @p packed. */
static uint64_t add_range(digest_list *list, uint32_t convert, const char *source,
                          char *packed)
{
    static const uint32_t grains[] = {1, 2, 4, 8, 16};
    const uint32_t grain = grains[below(5)];
    const uint64_t longest = below(2) ? 40 : below(2) ? 700 : 9000;
    uint64_t run = (1 + below(longest)) * grain % (SPACE / 4) + grain;
    if (convert != CONVERT_NONE)
        run = (run + 3) / 4 * 4;
    const uint64_t pitch = run + below(4) * grain;
    uint64_t most = (SPACE - run) / pitch + 1;
    const uint64_t runs = 1 + below(most < 600 ? most : 600);
    const uint64_t span = (runs - 1) * pitch + run;
    /* against the end, or anywhere; forwards or backwards */
    const char *low = source + (below(2) ? SPACE - span : below(SPACE - span + 1));
    const bool down = below(4) == 0;
    const char *first = down ? low + span - run : low;
    const int64_t step =
        down ? -static_cast<int64_t>(pitch) : static_cast<int64_t>(pitch);
    assert_true(digest_list_add(list, reinterpret_cast<uint64_t>(first), run, runs,
                                step, convert));
    const uint64_t out = convert == CONVERT_NONE ? run : run / 2;
    for (uint64_t i = 0; i < runs; i++)
        convert_run(convert, packed + i * out, first + static_cast<int64_t>(i) * step,
                    run);
    return runs * out;
}

TEST(test_runs)
{
    static char packed[4 * SPACE];
    char *source = guarded_chance();
    for (int round = 0; round < 200; round++) {
        digest_list list = room();
        char what[32];
        snprintf(what, sizeof what, "round %d", round);
        uint64_t sizes[3];
        uint32_t n = 1 + static_cast<uint32_t>(below(3)), at = 0;
        char *to = packed;
        for (uint32_t i = 0; i < n; i++) { /* ranges, each in pieces of its own */
            digest_list_cut(&list);
            sizes[i] = add_range(&list, some_conversion(), source, to);
            to += sizes[i];
        }
        run_list(&list, 1 + static_cast<unsigned>(below(2)));
        to = packed;
        for (uint32_t i = 0; i < n; i++) {
            at += check_pieces(&list, at, to, sizes[i], what);
            to += sizes[i];
        }
        assert_int_equal(at, list.n_pieces);
    }
}

/* Several stretches that are one range: boxes of which each has its own memory. */
TEST(test_joined)
{
    static char packed[4 * SPACE];
    char *source = guarded_chance();
    for (int round = 0; round < 100; round++) {
        digest_list list = room();
        uint64_t size = 0;
        const uint32_t convert = some_conversion();
        for (uint64_t i = 1 + below(3); i > 0; i--)
            size += add_range(&list, convert, source, packed + size);
        run_list(&list, 1);
        assert_int_equal(check_pieces(&list, 0, packed, size, "joined"), list.n_pieces);
    }
}

/* What does not fit is said, and nothing is written behind the room. */
TEST(test_room)
{
    static char memory[1024] __attribute__((aligned(16)));
    digest_list list = digest_list_in(memory, 512, 2, 2);
    const uint64_t at = reinterpret_cast<uint64_t>(memory);
    assert_int_equal(list.most_entries, (512 - 64) / sizeof(copy_entry));
    assert_true(digest_list_add(&list, at, 2 * PIECE, 1, 0, CONVERT_NONE));
    assert_false(digest_list_add(&list, at, 1, 1, 0, CONVERT_NONE));
    list = digest_list_in(memory, 512, 2, 2);
    for (uint32_t i = 0; i < list.most_entries; i++)
        assert_true(digest_list_add(&list, at + 2 * i, 1, 1, 0, CONVERT_NONE));
    assert_false(digest_list_add(&list, at, 1, 1, 0, CONVERT_NONE));
    for (size_t i = 512; i < sizeof memory; i++)
        assert_int_equal(memory[i], 0);
}

static digest_file_parameters file_launched;

static void digest_file()
{
    fanin_digest_file(file_launched);
}

/* Pieces of a file that differ from each other, more than there are blocks. */
TEST(test_file_pieces)
{
    const uint64_t count = 2;
    uint64_t out[2 * count + 1];
    char *bytes = static_cast<char *>(aligned_alloc(16, count * DIGEST_FILE_PIECE));
    assert_non_null(bytes);
    for (uint64_t i = 0; i < count * DIGEST_FILE_PIECE; i++)
        bytes[i] = static_cast<char>(below(256));
    memset(out, 0x55, sizeof out);
    file_launched.bytes = bytes;
    file_launched.out = out;
    file_launched.count = count;
    run_blocks(digest_file, 1, 1);
    for (uint64_t i = 0; i < count; i++) {
        const XXH128_hash_t hash =
            XXH3_128bits(bytes + i * DIGEST_FILE_PIECE, DIGEST_FILE_PIECE);
        assert_true(out[2 * i] == hash.low64 && out[2 * i + 1] == hash.high64);
    }
    assert_true(out[2 * count] == 0x5555555555555555);
    free(bytes);
}
