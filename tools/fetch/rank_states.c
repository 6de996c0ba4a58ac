/* SPDX-License-Identifier: Apache-2.0 */
#include "fetch/rank_states.h"
#include "fetch/output.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

const char *state_name(int32_t state)
{
    switch (state) {
    case FANIN_PUBLICATION_UNPUBLISHED:
        return "unpublished";
    case FANIN_PUBLICATION_STABLE:
        return "stable";
    case FANIN_PUBLICATION_DRAINING:
        return "draining";
    case FANIN_PUBLICATION_WRITING:
        return "writing";
    case FANIN_PUBLICATION_PAUSED:
        return "paused";
    default:
        return "unknown";
    }
}

static void append(char *out, size_t size, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

static void append(char *out, size_t size, const char *format, ...)
{
    size_t used = strlen(out);
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(out + used, size - used, format, arguments);
    va_end(arguments);
}

static bool alike(const fanin_rank_state *a, const fanin_rank_state *b)
{
    return a->state == b->state && a->step == b->step;
}

/* Those like ranks[first] from there on, as runs of neighbours: "0-3,6". */
static size_t append_numbers(const fanin_rank_state *ranks, size_t count, size_t first,
                             char *out, size_t size)
{
    size_t found = 0;
    for (size_t i = first; i < count;) {
        size_t end = i + 1;
        if (!alike(&ranks[i], &ranks[first])) {
            i++;
            continue;
        }
        while (end < count && alike(&ranks[end], &ranks[first]) &&
               ranks[end].rank == ranks[end - 1].rank + 1) {
            end++;
        }
        append(out, size, "%s%u", found > 0 ? "," : "", ranks[i].rank);
        if (end - i > 1) {
            append(out, size, "-%u", ranks[end - 1].rank);
        }
        found += end - i;
        i = end;
    }
    return found;
}

static void append_group(const fanin_rank_state *ranks, size_t count, size_t first,
                         char *out, size_t size)
{
    char numbers[120] = "";
    uint64_t age = 0;
    size_t found = append_numbers(ranks, count, first, numbers, sizeof(numbers));
    for (size_t i = first; i < count; i++) {
        bool older = alike(&ranks[i], &ranks[first]) && ranks[i].state_age_ms > age;
        age = older ? ranks[i].state_age_ms : age;
    }
    append(out, size, "%s%s %s %s", out[0] != '\0' ? "; " : "",
           found > 1 ? "ranks" : "rank", numbers, state_name(ranks[first].state));
    if (ranks[first].step > 0) {
        append(out, size, " at step %llu", (unsigned long long)ranks[first].step);
    }
    if (age > 0) {
        append(out, size, " for %s", output_age(age).s);
    }
}

static int by_rank(const void *a, const void *b)
{
    const fanin_rank_state *x = a;
    const fanin_rank_state *y = b;
    return (x->rank > y->rank) - (x->rank < y->rank);
}

void rank_states_text(const fanin_rank_state *ranks, size_t count, char *out,
                      size_t size)
{
    fanin_rank_state *sorted = output_require(calloc(count + 1, sizeof(*sorted)));
    memcpy(sorted, ranks, count * sizeof(*sorted));
    qsort(sorted, count, sizeof(*sorted), by_rank);
    out[0] = '\0';
    for (size_t i = 0; i < count; i++) {
        size_t first = 0;
        while (!alike(&sorted[first], &sorted[i])) {
            first++;
        }
        if (first == i) {
            append_group(sorted, count, i, out, size);
        }
    }
    free(sorted);
}

json_t *rank_states_json(const fanin_rank_state *ranks, size_t count)
{
    json_t *list = json_array();
    for (size_t i = 0; i < count; i++) {
        json_t *one = json_object();
        output_set_u64(one, "rank", ranks[i].rank);
        output_set_string(one, "state", state_name(ranks[i].state));
        output_set_u64(one, "step", ranks[i].step);
        output_set_age(one, "state_age_ns", ranks[i].state_age_ms);
        json_array_append_new(list, one);
    }
    return list;
}
