/* SPDX-License-Identifier: Apache-2.0 */
#include "fetch/missing.h"
#include "fetch/failure.h"
#include "fetch/output.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct gathering {
    const session *session;
    missing *out;
    uint32_t index;
    bool *there; /**< ranks that are known */
} gathering;

int32_t missing_number(const session *s, const fanin_rank_info *info, uint32_t index)
{
    return info->rank < 0 && s->target.in_rank_order ? (int32_t)index : info->rank;
}

const char *missing_why(const fanin_rank_info *info)
{
    return info->message[0] != '\0' ? info->message : fanin_status_text(info->status);
}

static bool missing_on_rank(void *cookie, const fanin_rank_info *info)
{
    gathering *g = cookie;
    missing *m = g->out;
    int32_t rank = missing_number(g->session, info, g->index++);
    if (rank >= 0 && (uint32_t)rank < m->asked)
        g->there[rank] = true;
    if (info->status != FANIN_OK) {
        missing_rank *one = &m->ranks[m->count++];
        *one = (missing_rank){
            .rank = rank, .silent = info->silent, .status = info->status};
        snprintf(one->address, sizeof one->address, "%s", info->address);
        snprintf(one->message, sizeof one->message, "%s", missing_why(info));
    }
    return true;
}

/* If only one rank is not known, it is the one that is left. */
static void missing_name_last(missing *m, const bool *there)
{
    missing_rank *unknown = NULL;
    uint32_t nobody = 0;
    for (uint32_t i = 0; i < m->count; i++) {
        nobody += m->ranks[i].rank < 0;
        unknown = m->ranks[i].rank < 0 ? &m->ranks[i] : unknown;
    }
    for (uint32_t rank = 0; nobody == 1 && rank < m->asked; rank++)
        if (!there[rank])
            unknown->rank = (int32_t)rank;
}

void missing_gather(const session *s, missing *out)
{
    *out = (missing){.asked = s->target.count};
    gathering g = {.session = s, .out = out};
    out->ranks = output_require(calloc(out->asked, sizeof out->ranks[0]));
    g.there = output_require(calloc(out->asked, sizeof g.there[0]));
    if (fanin_client_ranks(s->client, missing_on_rank, &g, NULL) == FANIN_OK)
        missing_name_last(out, g.there);
    free(g.there);
}

void missing_free(missing *m)
{
    free(m->ranks);
    *m = (missing){0};
}

missing_text missing_name(const missing_rank *r)
{
    missing_text text;
    if (r->rank >= 0)
        snprintf(text.s, sizeof text.s, "rank %d", (int)r->rank);
    else
        snprintf(text.s, sizeof text.s, "rank at %s", r->address);
    return text;
}

void missing_print(const missing *m)
{
    for (uint32_t i = 0; i < m->count; i++)
        terminal_print("%s unreachable: %s", missing_name(&m->ranks[i]).s,
                       m->ranks[i].message);
}

void missing_warn(const session *s)
{
    missing m;
    missing_gather(s, &m);
    for (uint32_t i = 0; i < m.count; i++)
        failure_warn("%s does not answer: %s", missing_name(&m.ranks[i]).s,
                     m.ranks[i].message);
    missing_free(&m);
}

json_t *missing_json(const missing *m)
{
    json_t *list = json_array();
    for (uint32_t i = 0; i < m->count; i++) {
        const missing_rank *r = &m->ranks[i];
        json_array_append_new(
            list, output_object("rank", output_rank(r->rank), "address",
                                output_string(r->address), "status",
                                output_string(fanin_status_name(r->status)), "message",
                                output_string(r->message), NULL));
    }
    return list;
}

int missing_report(const missing *m)
{
    if (m->count == 0)
        return 0;
    const missing_rank *first = &m->ranks[0];
    fanin_error error;
    char what[96];
    failure_set(&error, first->status,
                first->silent ? "is the trainer process stopped, out of descriptors "
                                "(its log says so), or a firewall in between?"
                              : "start the rank, or correct the target",
                "%s", first->message);
    error.rank = first->rank;
    snprintf(error.address, sizeof error.address, "%.*s", (int)sizeof error.address - 1,
             first->address);
    snprintf(what, sizeof what, "%u of %u ranks answered", m->asked - m->count,
             m->asked);
    output_use_json(false); /* the data tell it all */
    return failure_report(what, &error);
}

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
        while (list[size] != ',')
            size--;
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
    if (ranks[first].step > 0)
        output_append(group, sizeof group, " at step %" PRIu64, ranks[first].step);
    if (age > 0)
        output_append(group, sizeof group, " for %s", output_age(age).s);
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
        while (!rank_states_alike(&sorted[first], &sorted[i]))
            first++;
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
