/* SPDX-License-Identifier: Apache-2.0 */
#include "plan/read_list.h"

#include "array.h"
#include "dtype.h"
#include <stdlib.h>

/* Large enough that a request's cost vanishes, small enough that several are under way. */
#define REQUEST_BYTES ((uint64_t)1 << 20)

static bool is_whole_box(const piece *p, const box_table *boxes, const key_table *keys)
{
    uint32_t key;
    block b;
    uint64_t bytes;
    if (p->offset != 0)
        return false;
    box_table_get(boxes, p->box, &key, &b, NULL);
    return dtype_bytes(keys->entries[key].dtype, b.n_dims, b.extent, &bytes) &&
           bytes == p->length;
}

/* Appends a piece to the open request, as an entry or as one more box of the last one. */
static void add_piece(read_list *list, read_request *r, uint64_t *n_entries,
                      const piece *p, const piece_ranges *ranges, bool whole)
{
    read_entry *last = r->n_entries > 0 ? &list->entries[*n_entries - 1] : NULL;
    if (whole && last && last->count > 0 && last->box + last->count == p->box) {
        last->count++;
    } else {
        list->entries[*n_entries] = whole ? (read_entry){.box = p->box, .count = 1}
                                          : (read_entry){.box = p->box,
                                                         .offset = p->offset,
                                                         .length = ranges->length};
        ++*n_entries;
        r->n_entries += (uint32_t)ranges->count;
    }
    r->n_pieces++;
    r->bytes += ranges->count * ranges->length;
    r->spread = r->spread || ranges->count > 1;
}

static bool is_full(const read_request *r, const piece_ranges *next)
{
    return r->n_pieces > 0 && (r->bytes + next->count * next->length > REQUEST_BYTES ||
                               r->n_entries + next->count > LIMIT_READ_ENTRIES);
}

void read_list_spread(const read_list *list, const read_request *r, const plan *plan,
                      const plan_rank *pieces, read_entry *out)
{
    const read_entry *e = &list->entries[r->first_entry];
    uint64_t end = r->first_piece + r->n_pieces;
    for (uint64_t i = r->first_piece; i < end; e++) {
        const piece *p = &pieces->pieces[i];
        uint64_t n = e->count ? 1 : piece_ranges_of(plan, p).count;
        for (uint64_t j = 0; j < n; j++, out++) {
            *out = *e;
            if (j > 0)
                out->offset = piece_range_at(plan, p, j);
        }
        i += e->count ? e->count : 1;
    }
}

static fanin_status give_up(read_list *list, const work_stop *stop, fanin_error *error)
{
    free(list->entries);
    free(list->requests);
    return work_broken_off(stop, "plan", "requests were made", error);
}

fanin_status read_list_build(const plan *plan, size_t index, const box_table *boxes,
                             const key_table *keys, work_stop *stop, read_list *out,
                             fanin_error *error)
{
    const plan_rank *pieces = &plan->ranks[index];
    read_list list = {0};
    uint64_t n_entries = 0;
    list.entries = malloc((pieces->n_pieces + 1) * sizeof *list.entries);
    list.requests = malloc((pieces->n_pieces + 1) * sizeof *list.requests);
    if (!list.entries || !list.requests)
        return give_up(&list, stop, error);
    read_request *open = &list.requests[0];
    *open = (read_request){0};
    for (uint64_t i = 0; i < pieces->n_pieces; i++) {
        const piece *p = &pieces->pieces[i];
        piece_ranges ranges = piece_ranges_of(plan, p);
        if (work_stopped(stop))
            return give_up(&list, stop, error);
        if (is_full(open, &ranges)) {
            list.n_requests++;
            open = &list.requests[list.n_requests];
            *open = (read_request){.first_piece = i, .first_entry = n_entries};
        }
        bool whole = ranges.count == 1 && is_whole_box(p, boxes, keys);
        add_piece(&list, open, &n_entries, p, &ranges, whole);
    }
    list.n_requests += open->n_pieces > 0;
    /* Reserved for the worst case; most lists are a few entries. */
    array_shrink(&list.entries, n_entries, sizeof *list.entries);
    array_shrink(&list.requests, list.n_requests, sizeof *list.requests);
    *out = list;
    return FANIN_OK;
}
