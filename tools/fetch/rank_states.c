/* SPDX-License-Identifier: Apache-2.0 */
#include "fetch/rank_states.h"
#include "fetch/output.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

const char *state_name(int32_t state)
{
    static const char *const names[] = {
        [FANIN_PUBLICATION_UNPUBLISHED] = "unpublished",
        [FANIN_PUBLICATION_STABLE] = "stable",
        [FANIN_PUBLICATION_DRAINING] = "draining",
        [FANIN_PUBLICATION_WRITING] = "writing",
        [FANIN_PUBLICATION_PAUSED] = "paused",
    };
    bool known = state >= 0 && (size_t)state < sizeof names / sizeof names[0];
    return known ? names[state] : "unknown";
}

static bool alike(const fanin_rank_state *a, const fanin_rank_state *b)
{
    return a->state == b->state && a->step == b->step;
}

/* Those like ranks[first], from there on. */
static void append_group(const fanin_rank_state *ranks, size_t count, size_t first,
                         char *out, size_t size)
{
    uint32_t *numbers = output_require(calloc(count, sizeof *numbers));
    char text[120] = "";
    uint64_t age = 0;
    size_t found = 0;
    for (size_t i = first; i < count; i++) {
        if (alike(&ranks[i], &ranks[first])) {
            numbers[found++] = ranks[i].rank;
            age = ranks[i].state_age_ms > age ? ranks[i].state_age_ms : age;
        }
    }
    FILE *stream = output_require(fmemopen(text, sizeof text - 1, "w"));
    output_ranges(stream, ",", numbers, found);
    fclose(stream);
    free(numbers);
    output_append(out, size, "%s%s %s %s", out[0] != '\0' ? "; " : "",
                  found > 1 ? "ranks" : "rank", text, state_name(ranks[first].state));
    if (ranks[first].step > 0) {
        output_append(out, size, " at step %" PRIu64, ranks[first].step);
    }
    if (age > 0) {
        output_append(out, size, " for %s", output_age(age).s);
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
    fanin_rank_state *sorted = output_require(calloc(count + 1, sizeof *sorted));
    memcpy(sorted, ranks, count * sizeof *sorted);
    qsort(sorted, count, sizeof *sorted, by_rank);
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
        const fanin_rank_state *r = &ranks[i];
        json_array_append_new(list,
                              output_object("rank", output_u64(r->rank), "state",
                                            output_string(state_name(r->state)), "step",
                                            output_u64(r->step), "state_age_ns",
                                            output_age_ns(r->state_age_ms), NULL));
    }
    return list;
}
