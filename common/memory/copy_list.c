/* SPDX-License-Identifier: Apache-2.0 */
#include "copy_list.h"
#include "array.h"
#include "copy_kernel.h"

#include <stdlib.h>
#include <string.h>

/* -------------------------------------------------------------------- digest list */

digest_list digest_list_in(void *memory, size_t size, uint32_t pieces, uint32_t rows)
{
    size_t entries_at = pieces * sizeof(uint64_t) + rows * sizeof(digest_row);
    digest_list list = {.digests = memory, .most_pieces = pieces, .most_rows = rows};
    entries_at = (entries_at + 15) / 16 * 16;
    list.rows = (digest_row *)(list.digests + pieces);
    list.entries = (copy_entry *)(void *)((uint8_t *)memory + entries_at);
    list.most_entries = (uint32_t)((size - entries_at) / sizeof(copy_entry));
    return list;
}

void digest_list_cut(digest_list *list)
{
    list->filled = 0;
}

/** Of an entry that several pieces share: whole pieces, and few enough for 32 bits. */
#define LONGEST_RUN (UINT32_C(1) << 30)

/* One piece, or several of the entry. */
static bool begin_row(digest_list *list, uint32_t entry, uint32_t skip, uint32_t pieces)
{
    if (pieces > list->most_pieces - list->n_pieces || list->n_rows == list->most_rows)
        return false;
    list->rows[list->n_rows++] = (digest_row){
        .first = entry, .skip = skip, .at = list->n_pieces, .pieces = pieces};
    list->n_pieces += pieces;
    return true;
}

static bool digest_list_append(digest_list *list, const copy_entry *e)
{
    if (list->n_entries == list->most_entries)
        return false;
    list->entries[list->n_entries++] = *e;
    return true;
}

/* Into the last piece, which has room for it and is a row. */
static bool digest_list_add_entry(digest_list *list, copy_entry e)
{
    digest_row *piece = &list->rows[list->n_rows - 1];
    copy_entry *last = piece->count > 0 ? &list->entries[list->n_entries - 1] : NULL;
    uint32_t bytes = (uint32_t)convert_bytes(e.convert, (uint64_t)e.run * e.runs);
    e.to = list->filled;
    list->filled = (list->filled + bytes) % DIGEST_KERNEL_PIECE;
    if (last && last->runs == 1 && e.runs == 1 && last->convert == e.convert &&
        last->from + last->run == e.from) {
        last->run += e.run;
        return true;
    }
    piece->count++;
    return digest_list_append(list, &e);
}

/* Whole pieces of one run, which share an entry. Returns the bytes they take of it, 0: no room. */
static uint64_t add_whole(digest_list *list, uint64_t from, uint64_t run,
                          uint32_t convert)
{
    uint32_t each = DIGEST_KERNEL_RUN(convert);
    copy_entry e = {.from = from,
                    .run =
                        (uint32_t)(run < LONGEST_RUN ? run / each * each : LONGEST_RUN),
                    .runs = 1,
                    .convert = convert};
    if (!digest_list_append(list, &e))
        return 0;
    for (uint32_t skip = 0, n; skip < e.run; skip += n * each) {
        uint32_t left = (e.run - skip) / each;
        n = left < DIGEST_KERNEL_ROW ? left : DIGEST_KERNEL_ROW;
        if (!begin_row(list, list->n_entries - 1, skip, n))
            return 0;
        list->rows[list->n_rows - 1].count = 1;
    }
    return e.run;
}

/* Whole runs, as many as the piece has room for. Returns how many, 0: no room for entries. */
static uint64_t digest_list_add_runs(digest_list *list, uint64_t from, uint64_t run,
                                     uint64_t runs, int64_t step, uint64_t room,
                                     uint32_t convert)
{
    uint64_t whole = room / run < runs ? room / run : runs;
    const copy_entry e = {.from = from,
                          .from_step = whole > 1 ? step : 0,
                          .run = (uint32_t)run,
                          .runs = (uint32_t)whole,
                          .convert = convert};
    return digest_list_add_entry(list, e) ? whole : 0;
}

/* The next bytes of one run; how many, 0: no room. */
static uint64_t digest_list_add_part(digest_list *list, uint64_t from, uint64_t left,
                                     uint64_t room, uint32_t convert)
{
    const copy_entry e = {.from = from,
                          .run = (uint32_t)(left < room ? left : room),
                          .runs = 1,
                          .convert = convert};
    return digest_list_add_entry(list, e) ? e.run : 0;
}

/* One run that is longer than the piece has room for. */
static bool add_run(digest_list *list, uint64_t from, uint64_t run, uint32_t convert)
{
    uint64_t each = DIGEST_KERNEL_RUN(convert), done = 0, n;
    for (; done < run; done += n) {
        uint64_t left = run - done;
        uint64_t filled = list->filled * (each / DIGEST_KERNEL_PIECE);
        if (filled == 0 && left >= each) {
            n = add_whole(list, from + done, left, convert);
        } else {
            if (filled == 0 && !begin_row(list, list->n_entries, 0, 1))
                return false;
            n = digest_list_add_part(list, from + done, left, each - filled, convert);
        }
        if (n == 0)
            return false;
    }
    return true;
}

bool digest_list_add(digest_list *list, uint64_t from, uint64_t run, uint64_t runs,
                     int64_t step, uint32_t convert)
{
    uint64_t each = DIGEST_KERNEL_RUN(convert), n;
    if (runs > 1 && step == (int64_t)run) {
        run *= runs;
        runs = 1;
    }
    for (; runs > 0 && run > 0; runs -= n, from += n * (uint64_t)step) {
        uint64_t room = each - list->filled * (each / DIGEST_KERNEL_PIECE);
        n = 1;
        if (runs == 1 || run > room) {
            if (!add_run(list, from, run, convert))
                return false;
            continue;
        }
        if (list->filled == 0 && !begin_row(list, list->n_entries, 0, 1))
            return false;
        n = digest_list_add_runs(list, from, run, runs, step, room, convert);
        if (n == 0)
            return false;
    }
    return true;
}

/* ---------------------------------------------------------------------- copy list */

/** A multiple of all elements' sizes and of what a vector instruction moves. */
#define LONGEST_RUN (UINT32_C(1) << 30)

void copy_list_free(copy_list *list)
{
    free(list->entries);
    memset(list, 0, sizeof *list);
}

static void copy_list_append(copy_list *list, const copy_entry *entry)
{
    list->failed =
        list->failed || work_stopped(list->stop) ||
        !array_reserve(&list->entries, &list->capacity, list->n + 1, sizeof *entry);
    if (!list->failed)
        list->entries[list->n++] = *entry;
}

/* A run of any length, in pieces that an entry can hold. */
static void append_run(copy_list *list, uint32_t base, uint64_t from, uint64_t to,
                       uint64_t length, uint32_t convert)
{
    while (length > 0) {
        copy_entry entry = {
            .from = from,
            .to = to,
            .run = (uint32_t)(length < LONGEST_RUN ? length : LONGEST_RUN),
            .runs = 1,
            .base = base,
            .convert = convert,
        };
        copy_list_append(list, &entry);
        from += entry.run;
        to += convert_bytes(convert, entry.run);
        length -= entry.run;
    }
}

void copy_list_add(copy_list *list, uint32_t base, uint64_t from, uint64_t to,
                   uint64_t length)
{
    append_run(list, base, from, to, length, CONVERT_NONE);
}

/* The line of runs at @p from, @p to: the view's innermost dimension. */
static void add_line(copy_list *list, uint32_t base, uint64_t from, uint64_t to,
                     const strided *view)
{
    uint64_t extent = view->n_dims ? view->extent[view->n_dims - 1] : 1;
    int64_t from_step = view->n_dims ? view->from[view->n_dims - 1] : 0;
    int64_t to_step = view->n_dims ? view->to[view->n_dims - 1] : 0;
    if (view->run > LONGEST_RUN) {
        for (uint64_t i = 0; i < extent; i++)
            append_run(list, base, from + i * (uint64_t)from_step,
                       to + i * (uint64_t)to_step, view->run, view->convert);
        return;
    }
    for (uint64_t done = 0; done < extent;) {
        uint64_t left = extent - done;
        copy_entry entry = {
            .from = from + done * (uint64_t)from_step,
            .to = to + done * (uint64_t)to_step,
            .from_step = from_step,
            .to_step = to_step,
            .run = (uint32_t)view->run,
            .runs = (uint32_t)(left < LONGEST_RUN ? left : LONGEST_RUN),
            .base = base,
            .convert = view->convert,
        };
        copy_list_append(list, &entry);
        done += entry.runs;
    }
}

void copy_list_add_view(copy_list *list, uint32_t base, uint64_t from, uint64_t to,
                        const strided *view)
{
    if (view->run == 0)
        return;
    /* What is around the line; strided_run() counts its elements. */
    strided outer = *view;
    outer.n_dims = view->n_dims ? view->n_dims - 1 : 0;
    uint64_t lines = strided_runs(&outer);
    for (uint64_t i = 0; i < lines && !list->failed; i++) {
        int64_t from_at, to_at;
        strided_run(&outer, i, &from_at, &to_at);
        add_line(list, base, from + (uint64_t)from_at, to + (uint64_t)to_at, view);
    }
}

void copy_entries_run(const copy_entry *entries, uint64_t n, const uint64_t *bases,
                      uint64_t from_add, uint64_t to_add)
{
    for (uint64_t i = 0; i < n; i++) {
        const copy_entry *e = &entries[i];
        uint64_t from = e->from + from_add + (bases ? bases[e->base] : 0);
        uint64_t to = e->to + to_add;
        const strided line = {
            .n_dims = 1,
            .extent = {e->runs},
            .from = {e->from_step},
            .to = {e->to_step},
            .run = e->run,
            .convert = e->convert,
        };
        if (e->runs > 0 && e->run > 0)
            /* NOLINTNEXTLINE(performance-no-int-to-ptr) */
            strided_copy(&line, (void *)(uintptr_t)to, (const void *)(uintptr_t)from);
    }
}

/* --------------------------------------------------------------------- units */

/** What memory is read in; runs are cut at multiples of it. */
#define LINE 128
/** Shares that each warp gets when entries are cut at run time: so that they end at about the
    same time. */
#define SHARES_OF_A_WARP 4

/* One long run. */
static uint64_t copy_units_cut_run(const copy_entry *run, copy_entry *out)
{
    uint64_t n = 0;
    for (uint64_t done = 0; done < run->run; n++) {
        uint32_t beyond = (uint32_t)((run->from + done) % LINE);
        if (run->convert != CONVERT_NONE)
            beyond &= ~UINT32_C(3); /* whole elements */
        uint64_t length = COPY_UNIT_BYTES - beyond;
        if (length > run->run - done)
            length = run->run - done;
        if (out) {
            out[n] = *run;
            out[n].from += done;
            out[n].to += convert_bytes(run->convert, done);
            out[n].run = (uint32_t)length;
        }
        done += length;
    }
    return n;
}

static uint64_t cut_long_runs(const copy_entry *entry, copy_entry *out)
{
    uint64_t n = 0;
    copy_entry run = *entry;
    run.runs = 1;
    run.from_step = run.to_step = 0;
    for (uint32_t i = 0; i < entry->runs; i++) {
        n += copy_units_cut_run(&run, out ? out + n : NULL);
        run.from += (uint64_t)entry->from_step;
        run.to += (uint64_t)entry->to_step;
    }
    return n;
}

static uint64_t cut_short_runs(const copy_entry *entry, copy_entry *out)
{
    uint32_t at_once = COPY_UNIT_BYTES / entry->run;
    if (at_once > COPY_UNIT_RUNS)
        at_once = COPY_UNIT_RUNS;
    uint64_t n = ((uint64_t)entry->runs + at_once - 1) / at_once;
    /* Of one size, or a run less: no warp gets a rest. */
    for (uint64_t i = 0; out && i < n; i++) {
        uint64_t first = entry->runs * i / n, end = entry->runs * (i + 1) / n;
        out[i] = *entry;
        out[i].from += first * (uint64_t)entry->from_step;
        out[i].to += first * (uint64_t)entry->to_step;
        out[i].runs = (uint32_t)(end - first);
    }
    return n;
}

uint64_t copy_units_cut(const copy_entry *entry, copy_entry *out)
{
    if (entry->run == 0 || entry->runs == 0)
        return 0;
    /* As most are: nothing is to be cut. */
    if (entry->runs == 1 && entry->run <= COPY_UNIT_BYTES) {
        if (out)
            *out = *entry;
        return 1;
    }
    return entry->run > COPY_UNIT_BYTES ? cut_long_runs(entry, out)
                                        : cut_short_runs(entry, out);
}

uint32_t copy_units_parts(const copy_entry *entries, uint64_t n, uint64_t warps)
{
    uint64_t longest = 1, wanted = warps * SHARES_OF_A_WARP / n;
    for (uint64_t i = 0; i < n; i++) {
        uint64_t bytes = (uint64_t)entries[i].run * entries[i].runs;
        uint64_t shares = bytes / COPY_UNIT_BYTES;
        if (shares < entries[i].runs / COPY_UNIT_RUNS)
            shares = entries[i].runs / COPY_UNIT_RUNS;
        longest = shares > longest ? shares : longest;
    }
    if (wanted > longest)
        wanted = longest;
    return wanted > 0 ? (uint32_t)wanted : 1;
}
