/* SPDX-License-Identifier: Apache-2.0 */
#include "shards/patch_maker.h"
#include "patch.h"

#include <endian.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#define WORD 2
#define GROUP 4 /* words that are compared in one go */
#define GROUP_BYTES ((uint64_t)(GROUP * WORD))
#define GROUPS 256 /* that are looked at before those that differ are taken apart */

/* A changed word: its place in the segment in the low half, the word's bytes in the high one. */
typedef uint32_t change;

/* Changes of one segment, ascending, in the maker's log. */
typedef struct run {
    uint64_t segment, at;
    uint32_t place, count; /* place: the first one's */
} run;

struct patch_finds {
    bool
        has_half; /* the first byte of the word at `half` came, the other one not yet */
    uint8_t half_byte;
    uint64_t half, segment;
    uint32_t count;
    change changes[PATCH_WORDS]; /* what is behind `count` is written, too */
};

struct patch_maker {
    const uint8_t *before;
    uint64_t segments;
    uint64_t room, n_runs_most; /* of the log, and of the runs */
    change *log;
    run *runs;
    atomic_uint_fast64_t used, n_runs;
    atomic_bool over;
};

/* ----------------------------------------------------------------- compare */

static change change_of(uint32_t place, uint16_t word)
{
    return place | (uint32_t)word << 16;
}

static uint16_t read_word(const uint8_t *at)
{
    uint16_t word;
    memcpy(&word, at, sizeof word);
    return word;
}

/* Without a branch that depends on the bytes: where some of them change none can be foreseen. */
static uint32_t find_in_words(const uint8_t *before, const uint8_t *after,
                              uint32_t place, uint32_t words, change *out)
{
    uint32_t n = 0;
    for (uint32_t i = 0; i < words; i++) {
        uint16_t word = read_word(after + WORD * i);
        out[n] = change_of(place + i, word);
        n += word != read_word(before + WORD * i);
    }
    return n;
}

static uint32_t list_groups(const uint8_t *before, const uint8_t *after, uint32_t n,
                            uint16_t *out)
{
    uint32_t differ = 0;
    for (uint32_t i = 0; i < n; i++) {
        uint64_t one, other;
        memcpy(&one, before + GROUP_BYTES * i, sizeof one);
        memcpy(&other, after + GROUP_BYTES * i, sizeof other);
        out[differ] = (uint16_t)i;
        differ += one != other;
    }
    return differ;
}

/* Of one segment: so many bytes, the first word being the one at @p place. */
static uint32_t find_in_bytes(const uint8_t *before, const uint8_t *after,
                              uint32_t place, uint64_t bytes, change *out)
{
    uint16_t differ[GROUPS];
    uint32_t n = 0;
    while (bytes >= GROUP_BYTES) {
        uint64_t all = bytes / GROUP_BYTES;
        uint32_t groups = all < GROUPS ? (uint32_t)all : GROUPS;
        uint32_t found = list_groups(before, after, groups, differ);
        for (uint32_t i = 0; i < found; i++)
            n += find_in_words(before + GROUP_BYTES * differ[i],
                               after + GROUP_BYTES * differ[i],
                               place + GROUP * differ[i], GROUP, out + n);
        before += GROUP_BYTES * groups;
        after += GROUP_BYTES * groups;
        place += GROUP * groups;
        bytes -= GROUP_BYTES * groups;
    }
    uint32_t words = (uint32_t)bytes / WORD;
    n += find_in_words(before, after, place, words, out + n);
    if (bytes % WORD == 0 || before[bytes - 1] == after[bytes - 1])
        return n;
    const uint8_t half[WORD] = {after[bytes - 1]};
    out[n++] = change_of(place + words, read_word(half));
    return n;
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
    m->log = malloc((m->room + 1) * sizeof *m->log);
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
    memcpy(m->log + at, f->changes, count * sizeof *f->changes);
    m->runs[index] = (run){f->segment, at, f->changes[0] & 0xffff, count};
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
        f->count += find_in_bytes(m->before + at, after, (uint32_t)inside / WORD, size,
                                  f->changes + f->count);
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
    return one->place < other->place ? -1 : one->place > other->place;
}

/* A segment's places, then its words, from @p n runs. Where they end. */
static uint8_t *pack_segment(const patch_maker *m, const run *runs, uint64_t n,
                             uint32_t count, uint8_t *out)
{
    uint8_t *words = out + (uint64_t)WORD * count;
    for (uint64_t i = 0; i < n; i++) {
        const change *found = m->log + runs[i].at;
        for (uint32_t j = 0; j < runs[i].count; j++, out += WORD, words += WORD) {
            uint16_t place = htole16((uint16_t)found[j]),
                     word = (uint16_t)(found[j] >> 16);
            memcpy(out, &place, WORD);
            memcpy(words, &word, WORD);
        }
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
