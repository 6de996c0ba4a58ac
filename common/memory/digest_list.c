/* SPDX-License-Identifier: Apache-2.0 */
#include "digest_list.h"

digest_list digest_list_in(void *memory, size_t size, uint32_t pieces)
{
    size_t entries_at = pieces * (sizeof(uint64_t) + sizeof(digest_piece));
    digest_list list = {.digests = memory, .most_pieces = pieces};
    list.pieces = (digest_piece *)(list.digests + pieces);
    list.entries = (copy_entry *)(list.pieces + pieces);
    list.most_entries = (uint32_t)((size - entries_at) / sizeof(copy_entry));
    return list;
}

void digest_list_clear(digest_list *list)
{
    list->n_pieces = list->n_entries = list->filled = 0;
}

void digest_list_cut(digest_list *list)
{
    list->filled = 0;
}

static bool begin_piece(digest_list *list)
{
    if (list->n_pieces == list->most_pieces)
        return false;
    list->pieces[list->n_pieces++] = (digest_piece){.first = list->n_entries};
    return true;
}

/* Into the last piece, which has room for it. */
static bool add_entry(digest_list *list, copy_entry e)
{
    digest_piece *piece = &list->pieces[list->n_pieces - 1];
    copy_entry *last = piece->count > 0 ? &list->entries[list->n_entries - 1] : NULL;
    uint32_t bytes = (uint32_t)convert_bytes(e.convert, (uint64_t)e.run * e.runs);
    e.to = list->filled;
    list->filled = (list->filled + bytes) % DIGEST_KERNEL_PIECE;
    if (last && last->runs == 1 && e.runs == 1 && last->convert == e.convert &&
        last->from + last->run == e.from) {
        last->run += e.run;
        return true;
    }
    if (list->n_entries == list->most_entries)
        return false;
    list->entries[list->n_entries++] = e;
    piece->count++;
    return true;
}

bool digest_list_add(digest_list *list, uint64_t from, uint64_t run, uint64_t runs,
                     int64_t step, uint32_t convert)
{
    uint64_t skip = 0; /* of the run at from, which is in pieces already */
    if (runs > 1 && step == (int64_t)run) {
        run *= runs;
        runs = 1;
    }
    while (runs > 0 && run > 0) {
        if (list->filled == 0 && !begin_piece(list))
            return false;
        /* of the source that the piece has room for */
        uint64_t room = DIGEST_KERNEL_PIECE - list->filled;
        if (convert != CONVERT_NONE)
            room *= 2;
        copy_entry e = {.from = from + skip, .runs = 1, .convert = convert};
        if (skip == 0 && run <= room) {
            uint64_t whole = room / run < runs ? room / run : runs;
            e.run = (uint32_t)run;
            e.runs = (uint32_t)whole;
            e.from_step = whole > 1 ? step : 0;
            from += whole * (uint64_t)step;
            runs -= whole;
        } else {
            e.run = (uint32_t)(run - skip < room ? run - skip : room);
            skip += e.run;
            if (skip == run) {
                skip = 0;
                from += (uint64_t)step;
                runs--;
            }
        }
        if (!add_entry(list, e))
            return false;
    }
    return true;
}
