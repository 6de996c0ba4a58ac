/* SPDX-License-Identifier: Apache-2.0 */
#include "shards/patch_maker.h"
#include "array.h"
#include "patch.h"

#include <endian.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#ifdef __SSE2__
#include <emmintrin.h>
#endif

#define WORD 2
#define BLOCKS 256 /* that are looked at before those that differ are taken apart */

/* Changes of one segment, ascending, in the maker's log: places, then words. */
typedef struct run {
    uint64_t segment, at;
    uint32_t first, count; /* first: the first one's place */
} run;

struct patch_finds {
    bool
        has_half; /* the first byte of the word at `half` came, the other one not yet */
    uint8_t half_byte;
    uint64_t half, segment;
    uint32_t count;
    uint16_t places[PATCH_WORDS], words[PATCH_WORDS]; /* as they are packed */
};

struct patch_maker {
    const uint8_t *before;
    uint64_t segments;
    uint64_t room, n_runs_most; /* of the log in changes, and of the runs */
    uint8_t *log;
    run *runs;
    atomic_uint_fast64_t used, n_runs;
    atomic_bool over;
};

/* ----------------------------------------------------------------- compare */

/* A block is what is compared in one go: BLOCK words. What differs in it has BITS bits a word, the
   first word's being the lowest; those of words that are equal are 0. */
#ifdef __SSE2__
#define BLOCK 32
#define BITS 1
#define AHEAD 4096 /* bytes that are fetched ahead: the CPU does not beyond a page */

static __m128i equal_words(const uint8_t *before, const uint8_t *after)
{
    return _mm_cmpeq_epi16(_mm_loadu_si128((const __m128i *)(const void *)before),
                           _mm_loadu_si128((const __m128i *)(const void *)after));
}

static uint64_t find_in_block(const uint8_t *before, const uint8_t *after)
{
    __builtin_prefetch(before + AHEAD);
    __m128i low = _mm_packs_epi16(equal_words(before, after),
                                  equal_words(before + 16, after + 16)),
            high = _mm_packs_epi16(equal_words(before + 32, after + 32),
                                   equal_words(before + 48, after + 48));
    return ~((uint32_t)_mm_movemask_epi8(low) | (uint32_t)_mm_movemask_epi8(high)
                                                    << (BLOCK / 2));
}
#else
#define BLOCK 4
#define BITS 16

static uint64_t find_in_block(const uint8_t *before, const uint8_t *after)
{
    uint64_t one, other;
    memcpy(&one, before, sizeof one);
    memcpy(&other, after, sizeof other);
    return le64toh(one ^ other);
}
#endif
#define BLOCK_BYTES ((uint64_t)(BLOCK * WORD))
#define ONE_WORD ((UINT64_C(1) << BITS) - 1)

static void note_word(patch_finds *f, uint32_t place, const uint8_t *word)
{
    f->places[f->count] = htole16((uint16_t)place);
    memcpy(&f->words[f->count++], word, WORD);
}

/* Of the block that begins with the word at @p place. */
static void note_block(patch_finds *f, uint32_t place, const uint8_t *after,
                       uint64_t differs)
{
    while (differs != 0) {
        uint32_t i = (uint32_t)__builtin_ctzll(differs) / BITS;
        note_word(f, place + i, after + (size_t)WORD * i);
        differs &= ~(ONE_WORD << BITS * i);
    }
}

/* Which blocks differ is written down without a branch: where some of them do none can be
   foreseen. */
static void find_in_blocks(patch_finds *f, const uint8_t *before, const uint8_t *after,
                           uint32_t place, uint32_t n)
{
    uint64_t differs[BLOCKS];
    uint32_t which[BLOCKS], found = 0;
    for (uint32_t i = 0; i < n; i++) {
        uint64_t at = BLOCK_BYTES * i;
        differs[found] = find_in_block(before + at, after + at);
        which[found] = i;
        found += differs[found] != 0;
    }
    for (uint32_t i = 0; i < found; i++)
        note_block(f, place + BLOCK * which[i], after + BLOCK_BYTES * which[i],
                   differs[i]);
}

/* Of one segment: so many bytes, the first word being the one at @p place. */
static void find_in_bytes(patch_finds *f, const uint8_t *before, const uint8_t *after,
                          uint32_t place, uint64_t bytes)
{
    while (bytes >= BLOCK_BYTES) {
        uint64_t all = bytes / BLOCK_BYTES;
        uint32_t blocks = all < BLOCKS ? (uint32_t)all : BLOCKS;
        find_in_blocks(f, before, after, place, blocks);
        before += BLOCK_BYTES * blocks;
        after += BLOCK_BYTES * blocks;
        place += BLOCK * blocks;
        bytes -= BLOCK_BYTES * blocks;
    }
    for (; bytes >= WORD; bytes -= WORD, before += WORD, after += WORD, place++) {
        if (memcmp(before, after, WORD) != 0)
            note_word(f, place, after);
    }
    const uint8_t half[WORD] = {bytes > 0 ? *after : 0};
    if (bytes > 0 && *before != *after)
        note_word(f, place, half);
}

/* ------------------------------------------------------------------- finds */

patch_maker *patch_maker_open(const uint8_t *before, uint64_t length,
                              uint64_t stretches, uint64_t most)
{
    uint64_t directory = patch_directory_bytes(length);
    patch_maker *m = calloc(1, sizeof *m);
    if (!m || most < directory) {
        free(m);
        return NULL;
    }
    m->before = before;
    m->segments = patch_segments(length);
    m->room = (most - directory) / PATCH_CHANGE;
    m->n_runs_most = m->segments + stretches;
    /* Pages that are never written take no memory. */
    m->log = array_large(m->room + 1, PATCH_CHANGE);
    m->runs = malloc((m->n_runs_most + 1) * sizeof *m->runs);
    if (m->log && m->runs)
        return m;
    patch_maker_close(m);
    return NULL;
}

void patch_maker_close(patch_maker *m)
{
    if (!m)
        return;
    free(m->log);
    free(m->runs);
    free(m);
}

patch_finds *patch_finds_open(patch_maker *m)
{
    patch_finds *f = malloc(sizeof *f);
    if (!f) {
        atomic_store(&m->over, true);
        return NULL;
    }
    f->has_half = false;
    f->count = 0;
    f->segment = 0;
    return f;
}

static void move_to_log(patch_maker *m, patch_finds *f)
{
    uint32_t count = f->count;
    f->count = 0;
    if (count == 0)
        return;
    uint64_t at = atomic_fetch_add(&m->used, count);
    uint64_t index = atomic_fetch_add(&m->n_runs, 1);
    if (at > m->room || count > m->room - at || index >= m->n_runs_most) {
        atomic_store(&m->over, true);
        return;
    }
    uint8_t *to = m->log + PATCH_CHANGE * at;
    memcpy(to, f->places, (size_t)WORD * count);
    memcpy(to + (size_t)WORD * count, f->words, (size_t)WORD * count);
    m->runs[index] = (run){f->segment, PATCH_CHANGE * at, le16toh(f->places[0]), count};
}

void patch_finds_close(patch_finds *f)
{
    free(f);
}

/* Too large, or short of memory. */
static bool is_too_large(const patch_maker *m)
{
    return atomic_load_explicit(&m->over, memory_order_relaxed);
}

/* From an even place on; an odd byte at the end is half a word. */
static void find_words(patch_maker *m, patch_finds *f, uint64_t at,
                       const uint8_t *after, uint64_t length)
{
    while (length > 0 && !is_too_large(m)) {
        uint64_t segment = at / PATCH_SEGMENT, inside = at % PATCH_SEGMENT;
        uint64_t size =
            PATCH_SEGMENT - inside < length ? PATCH_SEGMENT - inside : length;
        if (segment != f->segment)
            move_to_log(m, f);
        f->segment = segment;
        find_in_bytes(f, m->before + at, after, (uint32_t)inside / WORD, size);
        at += size;
        after += size;
        length -= size;
    }
}

/* The word whose first byte came before, with what comes now or nothing. */
static void end_half(patch_maker *m, patch_finds *f, const uint8_t *other)
{
    const uint8_t word[WORD] = {f->half_byte, other ? *other : 0};
    f->has_half = false;
    find_words(m, f, f->half, word, other ? WORD : 1);
}

void patch_maker_compare(patch_maker *m, patch_finds *f, uint64_t at,
                         const uint8_t *after, uint64_t length)
{
    bool goes_on = f->has_half && at == f->half + 1;
    if (length == 0)
        return;
    if (f->has_half)
        end_half(m, f, goes_on ? after : NULL);
    at += goes_on;
    after += goes_on;
    length -= goes_on;
    find_words(m, f, at, after, length - length % WORD);
    if (length % WORD == 0)
        return;
    f->has_half = true;
    f->half = at + length - 1;
    f->half_byte = after[length - 1];
}

void patch_maker_keep(patch_maker *m, patch_finds *f)
{
    if (f->has_half)
        end_half(m, f, NULL);
    move_to_log(m, f);
}

/* -------------------------------------------------------------------- pack */

static int order_runs(const void *a, const void *b)
{
    const run *one = a, *other = b;
    if (one->segment != other->segment)
        return one->segment < other->segment ? -1 : 1;
    return one->first < other->first ? -1 : one->first > other->first;
}

/* A segment's places, then its words, from @p n runs. Where they end. */
static uint8_t *pack_segment(const patch_maker *m, const run *runs, uint64_t n,
                             uint32_t count, uint8_t *out)
{
    uint8_t *words = out + (size_t)WORD * count;
    for (uint64_t i = 0; i < n; i++) {
        size_t size = (size_t)WORD * runs[i].count;
        memcpy(out, m->log + runs[i].at, size);
        memcpy(words, m->log + runs[i].at + size, size);
        out += size;
        words += size;
    }
    return words;
}

static void pack(const patch_maker *m, uint8_t *directory, uint8_t *changes)
{
    uint64_t n = m->n_runs, i = 0;
    qsort(m->runs, n, sizeof *m->runs, order_runs);
    for (uint64_t segment = 0; segment < m->segments; segment++, directory += 4) {
        uint64_t first = i;
        uint32_t count = 0;
        for (; i < n && m->runs[i].segment == segment; i++)
            count += m->runs[i].count;
        changes = pack_segment(m, m->runs + first, i - first, count, changes);
        count = htole32(count);
        memcpy(directory, &count, sizeof count);
    }
}

uint8_t *patch_maker_pack(const patch_maker *m, uint64_t *changes)
{
    uint64_t directory = 4 * m->segments;
    *changes = PATCH_CHANGE * m->used;
    uint8_t *packed =
        is_too_large(m) ? NULL : malloc((size_t)(directory + *changes + 1));
    if (packed)
        pack(m, packed, packed + directory);
    return packed;
}
