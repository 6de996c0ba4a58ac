/* SPDX-License-Identifier: Apache-2.0 */
#include "fetch/missing.h"
#include "fetch/failure.h"
#include "fetch/output.h"
#include "fetch/terminal.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct gathering {
    const session *session;
    missing *out;
    uint32_t index;
    bool *there; /**< ranks that are known */
} gathering;

static void add(missing *m, const fanin_rank_info *info, int32_t rank)
{
    missing_rank *one = &m->ranks[m->count++];
    const char *why =
        info->message[0] != '\0' ? info->message : fanin_status_text(info->status);
    *one = (missing_rank){.rank = rank, .silent = info->silent, .status = info->status};
    snprintf(one->address, sizeof(one->address), "%s", info->address);
    snprintf(one->message, sizeof(one->message), "%s", why);
}

static bool on_rank(void *cookie, const fanin_rank_info *info)
{
    gathering *g = cookie;
    uint32_t index = g->index++;
    int32_t rank = info->rank;
    if (rank < 0 && g->session->target.in_rank_order) {
        rank = (int32_t)index;
    }
    if (rank >= 0 && (uint32_t)rank < g->out->asked) {
        g->there[rank] = true;
    }
    if (info->status != FANIN_OK) {
        add(g->out, info, rank);
    }
    return true;
}

/* If only one rank is not known, it is the one that is left. */
static void name_last(missing *m, const bool *there)
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
    out->ranks = output_require(calloc(out->asked, sizeof(out->ranks[0])));
    g.there = output_require(calloc(out->asked, sizeof(g.there[0])));
    if (fanin_client_ranks(s->client, on_rank, &g, NULL) == FANIN_OK) {
        name_last(out, g.there);
    }
    free(g.there);
}

void missing_free(missing *m)
{
    free(m->ranks);
    *m = (missing){0};
}

const char *missing_remedy(bool silent)
{
    return silent ? "is the trainer process stopped, or a firewall in between?"
                  : "start the rank, or correct the target";
}

void missing_name(const missing_rank *r, char *out, size_t size)
{
    if (r->rank >= 0) {
        snprintf(out, size, "rank %d", (int)r->rank);
    } else {
        snprintf(out, size, "rank at %s", r->address);
    }
}

void missing_print(const missing *m)
{
    for (uint32_t i = 0; i < m->count; i++) {
        char name[MISSING_NAME];
        missing_name(&m->ranks[i], name, sizeof(name));
        terminal_print("%s unreachable: %s", name, m->ranks[i].message);
    }
}

void missing_warn(const session *s)
{
    missing m;
    missing_gather(s, &m);
    for (uint32_t i = 0; i < m.count; i++) {
        char name[MISSING_NAME];
        missing_name(&m.ranks[i], name, sizeof(name));
        failure_warn("%s does not answer: %s", name, m.ranks[i].message);
    }
    missing_free(&m);
}

json_t *missing_json(const missing *m)
{
    json_t *list = json_array();
    for (uint32_t i = 0; i < m->count; i++) {
        const missing_rank *r = &m->ranks[i];
        json_t *one = json_object();
        json_object_set_new(one, "rank",
                            r->rank >= 0 ? json_integer(r->rank) : json_null());
        output_set_string(one, "address", r->address);
        output_set_string(one, "status", fanin_status_name(r->status));
        output_set_string(one, "message", r->message);
        json_array_append_new(list, one);
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
    failure_set(&error, first->status, missing_remedy(first->silent), "%s",
                first->message);
    error.rank = first->rank;
    snprintf(error.address, sizeof(error.address), "%.*s",
             (int)sizeof(error.address) - 1, first->address);
    snprintf(what, sizeof(what), "%u of %u ranks answered", m->asked - m->count,
             m->asked);
    failure_use_json(false); /* the data tell it all */
    return failure_report(what, &error);
}
