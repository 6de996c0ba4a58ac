/* SPDX-License-Identifier: Apache-2.0 */
#include "pull/pull.h"

#include "array.h"
#include "convert.h"
#include "device/devices.h"
#include "error_set.h"
#include "plan/plan_internal.h"
#include "pull/held_digest.h"
#include "stream/stream_link.h"
#include <stdlib.h>
#include <string.h>

#define WHOLE UINT64_MAX

/* What one digest is of: a piece, or one run of a piece that was read along gaps. */
typedef struct unit {
    uint64_t piece, run; /* run: WHOLE, or which one */
} unit;

/* What is asked of one rank. */
typedef struct inquiry {
    struct verifier *verifier;
    size_t source;
    size_t peer;
    connection *control; /* of the peer */
    stream_link *link;   /* NULL: nothing is asked */
    read_list list;
    unit *units; /* one an entry */
    uint64_t n_units, unit_capacity, request_capacity;
    uint64_t most;   /* bytes of a request */
    digest *digests; /* of what is here, one a unit, the first n_held; NULL: not yet */
    uint64_t n_held;
    digest *told; /* the rank's, one a unit; NULL: they are compared as they come */
    stream_work work;
} inquiry;

struct verifier {
    pull *p;
    const path_plan *plan; /* of the part */
    size_t n_inquiries;
    inquiry *inquiries; /* one a source */
    held *held;
    stream_share share; /* the calling thread's, of all ranks */
    client_work work;   /* of listing what is asked for */
};

/* ----------------------------------------------------------- what to ask for */

static const strided *view_of(const verifier *v, const piece *p)
{
    return p->view ? &v->plan->plan->views[p->view - 1] : NULL;
}

static uint32_t conversion_of(const verifier *v, const piece *p)
{
    const strided *view = view_of(v, p);
    return view ? view->convert : CONVERT_NONE;
}

static bool ask_for_unit(inquiry *q, const piece *p, unit u, uint64_t from,
                         uint64_t length)
{
    read_list *list = &q->list;
    verifier *v = q->verifier;
    read_request *last =
        list->n_requests > 0 ? &list->requests[list->n_requests - 1] : NULL;
    /* A request is converted as a whole. */
    bool fits = last && last->bytes + length <= q->most &&
                last->n_entries < LIMIT_READ_ENTRIES &&
                conversion_of(v, &q->work.pieces->pieces[last->first_piece]) ==
                    conversion_of(v, p);
    uint64_t capacity = q->unit_capacity;
    if (work_stopped(&v->work.stop) ||
        !array_reserve(&q->units, &q->unit_capacity, q->n_units + 1,
                       sizeof *q->units) ||
        !array_reserve(&list->entries, &capacity, q->n_units + 1,
                       sizeof *list->entries))
        return false;
    if (!fits) {
        if (!array_reserve(&list->requests, &q->request_capacity, list->n_requests + 1,
                           sizeof *list->requests))
            return false;
        last = &list->requests[list->n_requests++];
        *last = (read_request){.first_piece = u.piece, .first_entry = q->n_units};
    }
    last->n_entries++;
    last->bytes += length;
    list->entries[q->n_units] =
        (read_entry){.box = p->box, .offset = p->offset + from, .length = length};
    q->units[q->n_units++] = u;
    return true;
}

/* Whether the view's runs are all of the piece, one after the other. */
static bool is_dense(const strided *view, uint64_t length, work_stop *stop)
{
    uint64_t runs = strided_runs(view);
    if (runs * view->run != length)
        return false;
    for (uint64_t i = 0; i < runs; i++) {
        int64_t from;
        strided_run(view, i, &from, NULL);
        if (from != (int64_t)(i * view->run) || work_stopped(stop))
            return false;
    }
    return true;
}

/* False: out of memory, or stopped. */
static bool ask_for_piece(inquiry *q, uint64_t index)
{
    const piece *p = &q->work.pieces->pieces[index];
    const strided *view = view_of(q->verifier, p);
    if (!view || is_dense(view, p->length, &q->verifier->work.stop))
        return ask_for_unit(q, p, (unit){index, WHOLE}, 0, p->length);
    for (uint64_t i = 0; i < strided_runs(view); i++) {
        int64_t from;
        strided_run(view, i, &from, NULL);
        if (!ask_for_unit(q, p, (unit){index, i}, (uint64_t)from, view->run))
            return false;
    }
    return true;
}

/* --------------------------------------------------------- what is held here */

static held_part held_unit(void *cookie, uint64_t index)
{
    const inquiry *q = cookie;
    const verifier *v = q->verifier;
    const unit *u = &q->units[index];
    const piece *p = &q->work.pieces->pieces[u->piece];
    held_part part = {.at = v->p->base + p->to,
                      .view = view_of(v, p),
                      .runs = 1,
                      .length = p->length};
    if (part.view && u->run == WHOLE)
        part.runs = strided_runs(part.view);
    else if (part.view)
        part.first = u->run;
    return part;
}

/* Digests what is here up to unit @p end, and more where that costs little. */
static fanin_status hold(inquiry *q, uint64_t end, fanin_error *error)
{
    const verifier *v = q->verifier;
    fanin_status status = FANIN_OK;
    while (q->n_held < end && status == FANIN_OK) {
        uint64_t n;
        status = held_digest(v->held, held_unit, q, q->n_held, q->n_units, v->p->at,
                             &q->digests[q->n_held], &n, error);
        q->n_held += n;
    }
    return status;
}

static fanin_status unequal(const inquiry *q, const unit *u, fanin_error *error)
{
    const verifier *v = q->verifier;
    const connection *c = q->control;
    const piece *p = &q->work.pieces->pieces[u->piece];
    uint32_t key;
    block b;
    box_table_get(v->plan->sources[q->source].boxes, p->box, &key, &b, NULL);
    const char *name = v->p->publication->keys->entries[key].name;
    error_place place = connection_place(c, "verify");
    place.key = name;
    place.remedy = "a path, a link or memory on the way alters bytes, or the trainer "
                   "writes outside of an update: pull again, or by another path";
    return error_set(error, FANIN_ERR_TRANSPORT, &place,
                     "rank %u at %s holds other bytes of %.200s than those that have "
                     "landed, by path %s",
                     c->peer.rank, c->text, name,
                     path_taken(v->p->publication, q->peer)->path->name);
}

/* Units [first, first + count) with the rank's @p digests. */
static fanin_status compare_held(inquiry *q, uint64_t first, uint64_t count,
                                 const uint8_t *digests, fanin_error *error)
{
    fanin_status status = hold(q, first + count, error);
    for (uint64_t i = 0; i < count && status == FANIN_OK; i++) {
        if (memcmp(q->digests[first + i].bytes, digests + DIGEST_SIZE * i,
                   DIGEST_SIZE) != 0)
            status = unequal(q, &q->units[first + i], error);
    }
    return status;
}

/* The digests of one request. */
static bool keep_or_compare(void *cookie, uint64_t request, const uint8_t *digests)
{
    inquiry *q = cookie;
    verifier *v = q->verifier;
    stream_work *w = &q->work;
    const read_request *asked = &q->list.requests[request];
    fanin_error why = FANIN_ERROR_INIT;
    if (q->told) {
        memcpy(&q->told[asked->first_entry], digests,
               DIGEST_SIZE * (size_t)asked->n_entries);
        return true;
    }
    if (compare_held(q, asked->first_entry, asked->n_entries, digests, &why) ==
        FANIN_OK)
        return true;
    v->p->state = PULL_FAILED; /* no other attempt would mend it */
    stream_work_fail(w, &why);
    return false;
}

/* ------------------------------------------------------------------- running */

static fanin_status cannot(const connection *c, fanin_error *error)
{
    error_place place = connection_place(c, "verify");
    place.remedy = "use the same fanin release on both ends, or do not verify";
    return error_set(error, FANIN_ERR_UNSUPPORTED, &place,
                     "rank %u at %s does not digest what it serves", c->peer.rank,
                     c->text);
}

static fanin_status start_inquiry(verifier *v, inquiry *q, fanin_error *error)
{
    pull *p = v->p;
    q->work = (stream_work){.plan = v->plan->plan,
                            .pieces = &v->plan->plan->ranks[q->source],
                            .list = &q->list,
                            .base = p->base,
                            .digested = keep_or_compare,
                            .digested_cookie = q,
                            .dtype = (uint32_t)p->destination->dtype,
                            .error = FANIN_ERROR_INIT};
    if (q->work.pieces->n_pieces == 0)
        return FANIN_OK;
    if (!(q->control->peer.features & FEATURE_DIGESTS)) {
        p->state = PULL_FAILED;
        return cannot(q->control, error);
    }
    for (uint64_t i = 0; i < q->work.pieces->n_pieces; i++) {
        if (!ask_for_piece(q, i))
            return work_broken_off(&v->work.stop, "verify",
                                   "what is to be verified was listed", error);
    }
    digest *digests = calloc(q->n_units, sizeof *digests);
    if (!digests)
        return error_set_memory(error);
    if (p->delta)
        q->told = digests;
    else
        q->digests = digests;
    memcpy(q->work.token, p->leases[q->peer].token, sizeof q->work.token);
    fanin_status status = stream_open(p->client, q->peer, 1, &q->link, error);
    if (status != FANIN_OK)
        return status;
    connection_set_owing(q->control, true);
    stream_link_start(q->link, &q->work, &v->share);
    return FANIN_OK;
}

static fanin_status look_at_inquiries(const verifier *v, bool *done, deadline *wake,
                                      fanin_error *error)
{
    *done = true;
    for (size_t i = 0; i < v->n_inquiries; i++) {
        inquiry *q = &v->inquiries[i];
        const connection *c = q->control;
        if (!q->link)
            continue;
        stream_link_look(q->link, &v->share, wake);
        if (q->work.failed)
            return error_copy(error, &q->work.error);
        if (c->state != CONNECTION_READY)
            return error_copy(error, &c->fault);
        *done = *done && q->work.done_requests == q->list.n_requests;
        stream_link_pump(q->link, &v->share);
    }
    return FANIN_OK;
}

static fanin_status await_digests(verifier *v, fanin_error *error)
{
    for (;;) {
        bool done;
        deadline wake = UINT64_MAX;
        fanin_status status = look_at_inquiries(v, &done, &wake, error);
        if (status == FANIN_OK && !done)
            status = client_step(v->p->client, v->p->at, wake, "verify", error);
        if (status != FANIN_OK || done)
            return status;
    }
}

static void end_inquiries(verifier *v)
{
    for (size_t i = 0; i < v->n_inquiries; i++) {
        inquiry *q = &v->inquiries[i];
        if (!q->link)
            continue;
        connection_set_owing(q->control, false);
        stream_end_work(v->p->client, q->peer);
        q->link = NULL;
    }
}

void verify_forget(verifier **out)
{
    verifier *v = *out;
    if (!v)
        return;
    for (size_t i = 0; i < v->n_inquiries; i++) {
        inquiry *q = &v->inquiries[i];
        free(q->list.entries);
        free(q->list.requests);
        free(q->units);
        free(q->digests);
        free(q->told);
    }
    if (!held_free(v->held, deadline_in_ms(DEVICE_DRAIN_MS))) {
        v->p->destination->leak = true;
        log_write(&v->p->client->log, FANIN_LOG_ERROR, "device-stuck",
                  "a device did not end its digests in time: memory that it reads is "
                  "never freed");
    }
    free(v->inquiries);
    free(v);
    *out = NULL;
}

static verifier *verifier_create(pull *p)
{
    size_t n_ranges;
    const memory_range *ranges = pull_ranges_of_part(p, &n_ranges);
    verifier *v = calloc(1, sizeof *v);
    if (!v)
        return NULL;
    *v = (verifier){.p = p,
                    .plan = &pull_part(p)->plan,
                    .share = {.loop = &p->client->loop,
                              .max_inflight = p->client->config.max_inflight}};
    client_work_start(&v->work, p->client, p->at);
    v->held = held_create(p->client->devices->g, ranges, n_ranges);
    v->inquiries = calloc(v->plan->n_sources + 1, sizeof *v->inquiries);
    v->n_inquiries = v->inquiries ? v->plan->n_sources : 0;
    if (!v->held || !v->inquiries)
        verify_forget(&v);
    return v;
}

/* Bytes of one request to a rank. */
static uint64_t most_of(const announcement *said)
{
    uint64_t most = said->digest_bytes;
    most = most > LIMIT_READ_BYTES ? most : LIMIT_READ_BYTES;
    return most < LIMIT_DIGEST_BYTES ? most : LIMIT_DIGEST_BYTES;
}

/* What ranks say is compared, or kept. */
static fanin_status ask_digests(verifier *v, fanin_error *error)
{
    pull *p = v->p;
    fanin_status status = FANIN_OK;
    for (size_t i = 0; i < v->n_inquiries && status == FANIN_OK; i++) {
        size_t peer = v->plan->peer_of[i];
        v->inquiries[i] = (inquiry){.verifier = v,
                                    .source = i,
                                    .peer = peer,
                                    .control = p->client->peers[peer].control,
                                    .most = most_of(&p->announced[peer])};
        status = start_inquiry(v, &v->inquiries[i], error);
    }
    status = client_work_end(&v->work, status, error);
    if (status == FANIN_OK)
        status = await_digests(v, error);
    end_inquiries(v);
    return status;
}

fanin_status pull_verify(pull *p, fanin_error *error)
{
    verifier *v = verifier_create(p);
    fanin_status status = v ? ask_digests(v, error) : error_set_memory(error);
    bool keeps = status == FANIN_OK && p->delta;
    if (keeps)
        p->kept = v;
    else
        verify_forget(&v);
    p->result->info.verified = status == FANIN_OK && !keeps;
    if (status == FANIN_OK)
        pull_read_ended(p);
    return status;
}

/* ---------------------------------------------------------- what was kept */

/* More than threads: units are large or small. */
#define COMPARE_PARTS 64
/* What is worth threads to digest. */
#define COMPARE_THREADS_FROM ((uint64_t)8 << 20)

/* So much of each rank; all of it lies in host memory. */
static fanin_status compare_part(void *cookie, size_t part, work_stop *stop,
                                 fanin_error *error)
{
    const verifier *v = cookie;
    held *held = held_create(NULL, NULL, 0);
    fanin_status status = held ? FANIN_OK : error_set_memory(error);
    for (size_t i = 0; i < v->n_inquiries; i++) {
        inquiry *q = &v->inquiries[i];
        uint64_t n, end = q->n_units * (part + 1) / COMPARE_PARTS;
        for (uint64_t at = q->n_units * part / COMPARE_PARTS;
             at < end && status == FANIN_OK; at += n) {
            digest here;
            status = held_digest(held, held_unit, q, at, at + 1, UINT64_MAX, &here, &n,
                                 error);
            if (status == FANIN_OK && !digest_equal(&here, &q->told[at]))
                status = unequal(q, &q->units[at], error);
            if (status == FANIN_OK && work_stopped_after(stop, WORK_STEPS))
                status = work_broken_off(stop, "verify", "what it holds was digested",
                                         error);
        }
    }
    (void)held_free(held, 0);
    return status;
}

/* Kernels digest what is on devices, one behind the other, and this thread the rest. */
static fanin_status compare_with_devices(verifier *v, fanin_error *error)
{
    fanin_status status = FANIN_OK;
    for (size_t i = 0; i < v->n_inquiries && status == FANIN_OK; i++) {
        inquiry *q = &v->inquiries[i];
        if (q->n_units > 0 && !q->digests &&
            !(q->digests = calloc(q->n_units, sizeof *q->digests)))
            return error_set_memory(error);
        status = compare_held(q, 0, q->n_units, (const uint8_t *)q->told, error);
    }
    return status;
}

fanin_status verify_kept(verifier *v, bool *equal, fanin_error *why)
{
    bool worth = v->plan->plan->bytes >= COMPARE_THREADS_FROM;
    fanin_status status = v->p->delta->devices.n > 0
                              ? compare_with_devices(v, why)
                              : workers_run(v->p->client, v->p->at, COMPARE_PARTS,
                                            worth, compare_part, v, why);
    *equal = status == FANIN_OK;
    return status == FANIN_ERR_TRANSPORT ? FANIN_OK : status;
}
