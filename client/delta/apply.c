/* SPDX-License-Identifier: Apache-2.0 */
/* Changed words of a rank's copy, and where a plan's pieces have landed them. */
#include "delta/delta_internal.h"

#include <string.h>

patch_landing delta_landing(const plan *plan, const box_table *boxes, const piece *p,
                            const uint8_t *base)
{
    const strided *view = p->view ? &plan->views[p->view - 1] : NULL;
    patch_landing l = {.from = delta_origin(boxes, p),
                       .to = (uint64_t)(uintptr_t)base + p->to};
    l.end = l.from + p->length;
    uint64_t bits = l.from | l.end | l.to;
    if (view) {
        l.n_dims = view->n_dims;
        l.run = view->run;
        bits |= l.run;
    }
    for (uint32_t i = 0; i < l.n_dims; i++) {
        l.extent[i] = view->extent[i];
        l.from_step[i] = (uint64_t)view->from[i];
        l.to_step[i] = view->to[i];
        bits |= l.from_step[i] | (uint64_t)l.to_step[i];
    }
    l.even = bits % 2 == 0;
    return l;
}

/* Where the piece's byte @p at landed; NULL: it lies between two runs, and nobody wants it. The
   view's strides in the piece descend, as those of packed rows do. */
static uint8_t *landed_at(const patch_landing *l, uint64_t at)
{
    uint8_t *to = (uint8_t *)(uintptr_t)l->to;
    if (l->n_dims == 0)
        return to + at;
    for (uint32_t i = 0; i < l->n_dims; i++) {
        uint64_t index = at / l->from_step[i];
        if (index >= l->extent[i])
            return NULL;
        at -= index * l->from_step[i];
        to += (int64_t)index * l->to_step[i];
    }
    return at < l->run ? to + at : NULL;
}

static void land_bytes(const patch_landing *l, uint64_t at, const uint8_t *word)
{
    for (unsigned i = 0; i < 2; i++) {
        uint64_t byte = at + i;
        uint8_t *to =
            byte >= l->from && byte < l->end ? landed_at(l, byte - l->from) : NULL;
        if (to)
            *to = word[i];
    }
}

static void land_word(const patch_landing *l, uint64_t at, const uint8_t *word)
{
    uint8_t *to = landed_at(l, at - l->from);
    if (to)
        memcpy(to, word, 2);
}

/* The first change whose word does not end before byte @p at of the segment. */
static uint64_t first_from(const uint8_t *changes, uint64_t count, uint64_t at)
{
    uint64_t low = 0, high = count;
    while (low < high) {
        uint64_t middle = low + (high - low) / 2;
        if (patch_place(changes, middle) < at / 2)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

/* Changed words lie in lines of memory that no cache holds, too far apart for the processor to
   guess: asked for so many words ahead, applying takes about half the time. */
#define WORDS_AHEAD 16

static uint64_t byte_of(uint64_t start, const uint8_t *changes, uint64_t i)
{
    return start + UINT64_C(2) * patch_place(changes, i);
}

/* @p changes of the segment that begins at @p start. */
static void apply_segment(const patch_landing *l, uint64_t start,
                          const uint8_t *changes, uint64_t count)
{
    const uint8_t *words = changes + 2 * count;
    uint64_t i = first_from(changes, count, l->from > start ? l->from - start : 0);
    for (; i < count; i++) {
        uint64_t at = byte_of(start, changes, i);
        if (at >= l->end)
            return;
        uint64_t next =
            i + WORDS_AHEAD < count ? byte_of(start, changes, i + WORDS_AHEAD) : l->end;
        if (l->n_dims == 0 && next < l->end)
            __builtin_prefetch(landed_at(l, next - l->from), 1);
        if (l->even)
            land_word(l, at, words + 2 * i);
        else
            land_bytes(l, at, words + 2 * i);
    }
}

void delta_apply(const delta *d, size_t source, uint64_t from, uint64_t to,
                 uint8_t *base)
{
    const delta_source *s = &d->sources[source];
    const plan *plan = d->whole->plan;
    for (uint64_t i = from; i < to; i++) {
        const piece *p = &plan->ranks[source].pieces[i];
        const patch_landing l =
            delta_landing(plan, d->whole->sources[source].boxes, p, base);
        if (delta_device_of(d, base + p->to) >= 0)
            continue;
        for (uint32_t k = s->chain; k-- > 0;) {
            const uint64_t *first = s->first + k * (s->segments + 1);
            const uint64_t *at = s->at + k * s->segments;
            for (uint64_t j = l.from / PATCH_SEGMENT; j * PATCH_SEGMENT < l.end; j++) {
                if (at[j] != DELTA_NONE)
                    apply_segment(&l, j * PATCH_SEGMENT, d->staging + at[j],
                                  first[j + 1] - first[j]);
            }
        }
    }
}
