/* SPDX-License-Identifier: Apache-2.0 */
#include "fetch/rank_states.h"
#include "fetch/output.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define LIST_MOST 100 /* characters of one list of ranks */

const char *rank_state_name(int32_t state)
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

static bool rank_states_alike(const fanin_rank_state *a, const fanin_rank_state *b)
{
    return a->state == b->state && a->step == b->step;
}

/* "1,3-5"; a long list ends behind a number, and says how many there are. */
static output_text list_of(const uint32_t *numbers, size_t count)
{
    output_text text;
    char *list = NULL;
    size_t size = 0;
    FILE *stream = output_require(open_memstream(&list, &size));
    output_ranges(stream, ",", numbers, count);
    fclose(stream);
    output_require(list);
    if (size > LIST_MOST) {
        size = LIST_MOST;
        while (list[size] != ',') {
            size--;
        }
        snprintf(text.s, sizeof text.s, "%.*s,... (%zu)", (int)size, list, count);
    } else {
        snprintf(text.s, sizeof text.s, "%s", list);
    }
    free(list);
    return text;
}

/* Those like ranks[first], from there on; false: @p out has no room for them. */
static bool append_group(const fanin_rank_state *ranks, size_t count, size_t first,
                         char *out, size_t size)
{
    uint32_t *numbers = output_require(calloc(count, sizeof *numbers));
    char group[LIST_MOST + 120] = "";
    uint64_t age = 0;
    size_t found = 0;
    for (size_t i = first; i < count; i++) {
        if (rank_states_alike(&ranks[i], &ranks[first])) {
            numbers[found++] = ranks[i].rank;
            age = ranks[i].state_age_ms > age ? ranks[i].state_age_ms : age;
        }
    }
    output_append(group, sizeof group, "%s%s %s %s", out[0] != '\0' ? "; " : "",
                  found > 1 ? "ranks" : "rank", list_of(numbers, found).s,
                  rank_state_name(ranks[first].state));
    free(numbers);
    if (ranks[first].step > 0) {
        output_append(group, sizeof group, " at step %" PRIu64, ranks[first].step);
    }
    if (age > 0) {
        output_append(group, sizeof group, " for %s", output_age(age).s);
    }
    bool fits = strlen(out) + strlen(group) + sizeof "; ..." <= size;
    output_append(out, size, "%s", fits ? group : "; ...");
    return fits;
}

static int rank_states_by_rank(const void *a, const void *b)
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
    qsort(sorted, count, sizeof *sorted, rank_states_by_rank);
    out[0] = '\0';
    bool fits = true;
    for (size_t i = 0; i < count && fits; i++) {
        size_t first = 0;
        while (!rank_states_alike(&sorted[first], &sorted[i])) {
            first++;
        }
        fits = first < i || append_group(sorted, count, i, out, size);
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
                                            output_string(rank_state_name(r->state)),
                                            "step", output_u64(r->step), "state_age_ns",
                                            output_age_ns(r->state_age_ms), NULL));
    }
    return list;
}
