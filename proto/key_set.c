/* SPDX-License-Identifier: Apache-2.0 */
#include "key_set.h"

#include "array.h"
#include "cursor.h"
#include "pack.h"

#include <stdlib.h>
#include <string.h>

static uint64_t key_set_end_of(const key_range *r)
{
    return (uint64_t)r->first + r->count;
}

void key_set_free(key_set *s)
{
    free(s->ranges);
    *s = (key_set){0};
}

bool key_set_add(key_set *s, uint32_t first, uint32_t count)
{
    key_range *last = s->n > 0 ? &s->ranges[s->n - 1] : NULL;
    if (count == 0)
        return true;
    if (last && key_set_end_of(last) == first) {
        last->count += count;
        return true;
    }
    if (!array_reserve(&s->ranges, &s->capacity, s->n + 1, sizeof *s->ranges))
        return false;
    s->ranges[s->n++] = (key_range){first, count};
    return true;
}

/* Given up half way. */
static bool key_set_no_memory(key_set *out)
{
    key_set_free(out);
    return false;
}

bool key_set_of_marks(const bool *marks, uint32_t n_keys, key_set *out)
{
    *out = (key_set){0};
    for (uint32_t key = 0; key < n_keys; key++)
        if (marks[key] && !key_set_add(out, key, 1))
            return key_set_no_memory(out);
    return true;
}

uint64_t key_set_count(const key_set *s)
{
    uint64_t count = 0;
    for (size_t i = 0; i < s->n; i++)
        count += s->ranges[i].count;
    return count;
}

bool key_set_has(const key_set *s, uint32_t key)
{
    size_t low = 0, high = s->n;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        if (key_set_end_of(&s->ranges[middle]) > key)
            high = middle;
        else
            low = middle + 1;
    }
    return low < s->n && s->ranges[low].first <= key;
}

bool key_set_equal(const key_set *a, const key_set *b)
{
    return a->n == b->n &&
           (a->n == 0 || memcmp(a->ranges, b->ranges, a->n * sizeof *a->ranges) == 0);
}

bool key_set_holds(const key_set *s, const key_set *part)
{
    size_t i = 0;
    for (size_t j = 0; j < part->n; j++) {
        while (i < s->n && key_set_end_of(&s->ranges[i]) <= part->ranges[j].first)
            i++;
        if (i == s->n || s->ranges[i].first > part->ranges[j].first ||
            key_set_end_of(&s->ranges[i]) < key_set_end_of(&part->ranges[j]))
            return false;
    }
    return true;
}

bool key_set_join(const key_set *a, const key_set *b, key_set *out)
{
    size_t i = 0, j = 0;
    uint64_t at = 0; /* all below is there */
    *out = (key_set){0};
    while (i < a->n || j < b->n) {
        bool of_a = j == b->n || (i < a->n && a->ranges[i].first <= b->ranges[j].first);
        const key_range *next = of_a ? &a->ranges[i++] : &b->ranges[j++];
        uint64_t first = next->first > at ? next->first : at;
        if (key_set_end_of(next) <= first)
            continue;
        at = key_set_end_of(next);
        if (!key_set_add(out, (uint32_t)first, (uint32_t)(at - first)))
            return key_set_no_memory(out);
    }
    return true;
}

bool key_set_less(const key_set *a, const key_set *b, key_set *out)
{
    size_t j = 0;
    *out = (key_set){0};
    for (size_t i = 0; i < a->n; i++) {
        uint64_t at = a->ranges[i].first, end = key_set_end_of(&a->ranges[i]);
        while (j < b->n && key_set_end_of(&b->ranges[j]) <= at)
            j++;
        for (size_t k = j; at < end; k++) {
            bool met = k < b->n && b->ranges[k].first < end;
            uint64_t until = !met                      ? end
                             : b->ranges[k].first > at ? b->ranges[k].first
                                                       : at;
            if (!key_set_add(out, (uint32_t)at, (uint32_t)(until - at)))
                return key_set_no_memory(out);
            at = met ? key_set_end_of(&b->ranges[k]) : end;
        }
    }
    return true;
}

static void fill_gaps(key_set *s, uint64_t widest)
{
    size_t last = 0;
    for (size_t i = 1; i < s->n; i++) {
        key_range *before = &s->ranges[last];
        if (s->ranges[i].first - key_set_end_of(before) <= widest)
            before->count = (uint32_t)(key_set_end_of(&s->ranges[i]) - before->first);
        else
            s->ranges[++last] = s->ranges[i];
    }
    s->n = s->n > 0 ? last + 1 : 0;
}

void key_set_coarsen(key_set *s, size_t most)
{
    for (uint64_t widest = 1; s->n > most; widest *= 2)
        fill_gaps(s, widest);
}

void key_set_encode(buffer *out, const key_set *s)
{
    uint64_t at = 0;
    for (size_t i = 0; i < s->n; i++) {
        pack_uint(out, s->ranges[i].first - at);
        pack_uint(out, s->ranges[i].count);
        at = key_set_end_of(&s->ranges[i]);
    }
}

fanin_status key_set_decode(bytes_view in, uint32_t n_keys, key_set *out,
                            const char **why)
{
    cursor c = {.at = in.data, .end = in.data + in.size, .canonical = true};
    uint32_t at = 0, gap, count;
    *out = (key_set){0};
    while (cursor_left(&c) > 0) {
        if (!cursor_u32(&c, n_keys - at, &gap) ||
            !cursor_u32(&c, n_keys - at - gap, &count))
            break;
        if (count == 0 || (gap == 0 && out->n > 0) || out->n == LIMIT_KEY_RANGES) {
            cursor_fail(&c, count == 0           ? "a range of no keys"
                            : out->n && gap == 0 ? "ranges that touch"
                                                 : "too many ranges of keys");
            break;
        }
        if (!key_set_add(out, at + gap, count))
            return FANIN_ERR_MEMORY;
        at += gap + count;
    }
    *why = c.why;
    return c.why ? FANIN_ERR_PROTOCOL : FANIN_OK;
}
