/* SPDX-License-Identifier: Apache-2.0 */
#include "pull/plan_detail.h"

#include "error_set.h"
#include "net/crew.h"
#include <stdlib.h>

/* Pieces from which threads cut them: one takes some 80 ns. */
#define THREADS_FROM 16384

/* What one reader reads its sources by. */
typedef struct detailing {
    const path_planning *how;
    const path_reader *reader;
    void **details; /* one a source */
} detailing;

static fanin_status detail_source(void *cookie, size_t source, work_stop *stop,
                                  fanin_error *error)
{
    const detailing *d = cookie;
    path_planning how = *d->how;
    how.stop = stop;
    return d->reader->plan(&how, source, &d->details[source], error);
}

/* The sources that lack it, each a part of a crew. */
static fanin_status detail_sources(detailing *d, deadline at, fanin_error *error)
{
    const path_plan *p = d->how->plan;
    uint64_t pieces = 0;
    size_t lacking = 0;
    for (size_t i = 0; i < p->n_sources; i++) {
        bool lacks = p->reader_of[i] == d->reader && !d->details[i];
        lacking += lacks;
        pieces += lacks ? p->plan->ranks[i].n_pieces : 0;
    }
    if (lacking == 0)
        return FANIN_OK;
    crew *c = crew_open(d->how->client, at, p->n_sources,
                        lacking > 1 && pieces >= THREADS_FROM, detail_source, d);
    if (!c)
        return error_set_memory(error);
    for (size_t i = 0; i < p->n_sources; i++) {
        if (p->reader_of[i] == d->reader && !d->details[i])
            crew_begin(c, i);
    }
    fanin_status status = crew_finish(c, NULL, error);
    crew_close(&c);
    return status;
}

static fanin_status detail_of(plan_part *part, size_t reader, const path_planning *how,
                              deadline at, fanin_error *error)
{
    const path_reader *r = path_readers[reader];
    const path_plan *p = &part->plan;
    bool any = false;
    for (size_t i = 0; i < p->n_sources; i++)
        any = any || p->reader_of[i] == r;
    if (!any)
        return FANIN_OK;
    if (!part->details[reader])
        part->details[reader] = calloc(p->n_sources, sizeof *part->details[reader]);
    detailing d = {.how = how, .reader = r, .details = part->details[reader]};
    fanin_status status =
        d.details ? detail_sources(&d, at, error) : error_set_memory(error);
    if (status == FANIN_OK && r->plan_all)
        status = r->plan_all(how, d.details, &part->shared[reader], error);
    return status;
}

static fanin_status detail_all(plan_part *part, fanin_client *client, publication *p,
                               path_goal *goal, deadline at, fanin_error *error)
{
    client_work work;
    client_work_start(&work, client, at);
    path_planning how = {.client = client,
                         .publication = p,
                         .plan = &part->plan,
                         .goal = goal,
                         .stop = &work.stop};
    fanin_status status = FANIN_OK;
    for (size_t i = 0; i < PATH_READERS && status == FANIN_OK; i++)
        status = detail_of(part, i, &how, at, error);
    return client_work_end(&work, status, error);
}

void plan_detail_readers(const path_plan *plan, const publication *p)
{
    for (size_t i = 0; i < plan->n_sources; i++)
        plan->reader_of[i] = plan->plan->ranks[i].n_pieces > 0
                                 ? path_taken(p, plan->peer_of[i])->path
                                 : NULL;
}

fanin_status plan_detail_make(plan_part *part, fanin_client *client, publication *p,
                              path_goal *goal, deadline at, fanin_error *error)
{
    plan_detail_readers(&part->plan, p);
    return detail_all(part, client, p, goal, at, error);
}

fanin_status plan_detail_ahead(plan_part *part, fanin_client *client, publication *p,
                               path_goal *goal, const path_reader *reader,
                               const bool *mask, deadline at, fanin_error *error)
{
    const path_plan *plan = &part->plan;
    for (size_t i = 0; i < plan->n_sources; i++) {
        bool is_its = plan->plan->ranks[i].n_pieces > 0 && mask[plan->peer_of[i]];
        plan->reader_of[i] = is_its ? reader : NULL;
    }
    return detail_all(part, client, p, goal, at, error);
}
