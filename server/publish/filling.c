/* SPDX-License-Identifier: Apache-2.0 */
#include "publish/filling.h"
#include "array.h"
#include "error_set.h"
#include "publish/commit.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

/* What has come is a bit a box, to look it up, and a log of ranges in the order in which they came.
   A version is a length of the log: what a reader does not know is the rest of it. */

static bool is_proven_box(const proofs *f, uint64_t box)
{
    return f->bits && (f->bits[box / 8] >> box % 8 & 1);
}

bool filling_has(const publication *p, uint64_t first, uint64_t count)
{
    for (uint64_t i = 0; p->proofs.fills && i < count; i++)
        if (!is_proven_box(&p->proofs, first + i))
            return false;
    return true;
}

bool filling_since(const publication *p, uint64_t n_boxes, uint64_t version,
                   landed_range *whole, msg_landed_ok *out)
{
    const proofs *f = &p->proofs;
    *whole = (landed_range){0, (uint32_t)n_boxes};
    const landed_range *log = f->fills ? f->log : whole;
    uint64_t n = f->fills ? f->n_log : n_boxes > 0;
    if (version > n)
        return false;
    uint64_t more = n - version;
    out->n_ranges = more < LIMIT_LANDED_RANGES ? (uint32_t)more : LIMIT_LANDED_RANGES;
    out->ranges = more > 0 ? log + version : NULL;
    out->version = version + out->n_ranges;
    return true;
}

/* ------------------------------------------------------------------- prove */

static fanin_status check(const publication *p, uint64_t step, uint64_t end,
                          fanin_error *error)
{
    error_place place = {.phase = "publish"};
    bool readable = p->state == STATE_STABLE || p->state == STATE_DRAINING;
    if (!readable || !p->proofs.fills || p->step != step)
        return error_set(error, FANIN_ERR_STALE, &place,
                         "%s does not fill with step %" PRIu64 " (any more)", p->name,
                         step);
    if (end > p->catalog->n_boxes)
        return error_set(error, FANIN_ERR_ARGUMENT, &place,
                         "%s has %" PRIu64 " boxes, and no box %" PRIu64, p->name,
                         p->catalog->n_boxes, end - 1);
    return FANIN_OK;
}

/* Those that are proven already are in the log, which has each box once. A range that readers may
   know does not grow. */
static bool add_proof(proofs *f, size_t known, uint32_t box)
{
    landed_range *last = f->n_log > known ? &f->log[f->n_log - 1] : NULL;
    if (is_proven_box(f, box))
        return true;
    if (last && last->first + last->count == box)
        last->count++;
    else if (array_reserve(&f->log, &f->capacity, f->n_log + 1, sizeof *f->log))
        f->log[f->n_log++] = (landed_range){box, 1};
    else
        return false;
    f->bits[box / 8] |= (uint8_t)(1u << box % 8);
    return true;
}

static fanin_status prove(fanin_server *s, publication *p, uint64_t step,
                          const landed_range *ranges, size_t n, fanin_error *error)
{
    proofs *f = &p->proofs;
    size_t known = f->n_log;
    fanin_status status = FANIN_OK;
    for (size_t i = 0; i < n && status == FANIN_OK; i++)
        status = check(p, step, (uint64_t)ranges[i].first + ranges[i].count, error);
    if (status != FANIN_OK)
        return status;
    if (!f->bits)
        f->bits = calloc((size_t)(p->catalog->n_boxes + 7) / 8, 1);
    bool good = f->bits;
    for (size_t i = 0; i < n; i++) {
        for (uint32_t j = 0; good && j < ranges[i].count; j++)
            good = add_proof(f, known, ranges[i].first + j);
    }
    publication_tell(s);
    return good ? FANIN_OK : error_set_memory(error);
}

fanin_status server_prove(fanin_server *s, const char *name, uint64_t step,
                          const landed_range *ranges, size_t n, fanin_error *error)
{
    fanin_status status = publication_call_check(s, name, error);
    if (status != FANIN_OK)
        return status;
    pthread_mutex_lock(&s->lock);
    publication *p = publication_find(s, name);
    status = p && p->present ? prove(s, p, step, ranges, n, error)
                             : publication_absent("publish", name, error);
    pthread_mutex_unlock(&s->lock);
    return status;
}

fanin_status server_fill(fanin_server *s, const char *name, uint64_t step,
                         fanin_error *error)
{
    fanin_status status = publication_call_check(s, name, error);
    const commit_terms terms = {.step = step, .mode = MODE_REFERENCE, .fills = true};
    return status == FANIN_OK ? commit_plainly(s, name, &terms, error) : status;
}
