/* SPDX-License-Identifier: Apache-2.0 */
#include "fetch/missing.h"
#include "fetch/failure.h"
#include "fetch/output.h"
#include "fetch/terminal.h"

#include <stdio.h>
#include <stdlib.h>

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
    if (rank >= 0 && (uint32_t)rank < m->asked) {
        g->there[rank] = true;
    }
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
    for (uint32_t rank = 0; nobody == 1 && rank < m->asked; rank++) {
        if (!there[rank]) {
            unknown->rank = (int32_t)rank;
        }
    }
}

void missing_gather(const session *s, missing *out)
{
    *out = (missing){.asked = s->target.count};
    gathering g = {.session = s, .out = out};
    out->ranks = output_require(calloc(out->asked, sizeof out->ranks[0]));
    g.there = output_require(calloc(out->asked, sizeof g.there[0]));
    if (fanin_client_ranks(s->client, missing_on_rank, &g, NULL) == FANIN_OK) {
        missing_name_last(out, g.there);
    }
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
    if (r->rank >= 0) {
        snprintf(text.s, sizeof text.s, "rank %d", (int)r->rank);
    } else {
        snprintf(text.s, sizeof text.s, "rank at %s", r->address);
    }
    return text;
}

void missing_print(const missing *m)
{
    for (uint32_t i = 0; i < m->count; i++) {
        terminal_print("%s unreachable: %s", missing_name(&m->ranks[i]).s,
                       m->ranks[i].message);
    }
}

void missing_warn(const session *s)
{
    missing m;
    missing_gather(s, &m);
    for (uint32_t i = 0; i < m.count; i++) {
        failure_warn("%s does not answer: %s", missing_name(&m.ranks[i]).s,
                     m.ranks[i].message);
    }
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
    if (m->count == 0) {
        return 0;
    }
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
    failure_use_json(false); /* the data tell it all */
    return failure_report(what, &error);
}
