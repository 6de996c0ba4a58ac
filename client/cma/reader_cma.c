/* SPDX-License-Identifier: Apache-2.0 */
/* Whether the kernel reads a rank's process for this one: tried once a connection and catalog. */
#include "cma/cma.h"

#include "array.h"
#include "device/devices.h"
#include "error_set.h"
#include "net/trust.h"
#include "thread.h"
#include <errno.h>
#include <stdlib.h>
#include <string.h>

/* What the path keeps of a rank's regions. */
typedef struct process_hold {
    path_hold hold; /* first */
    cma_process process;
} process_hold;

static void drop_process(fanin_client *client, size_t peer, path_hold *hold)
{
    (void)client;
    (void)peer;
    free(hold);
}

/* The process that the state, which is cma's, was decided with. */
static const cma_process *cma_process_of(const path_state *s)
{
    return &((const process_hold *)s->hold)->process;
}

/* --------------------------------------------------------------- objections */

/* Ranks of which no other one-sided path knows anything better. */
static bool is_mine(const path_round *r, size_t peer)
{
    return r->client->forced == &cma_reader || path_is_local(r->client, peer);
}

/* The kernel says whose socket it is: of who began to listen, and in this process's own numbers, 0
   if it has none there. NULL: nothing holds against asking the rank. */
static const char *process_objection(const fanin_client *client, size_t peer,
                                     pid_t *pid)
{
    const connection *c = client->peers[peer].control;
    if (!path_is_offered(client, peer, &cma_reader))
        return path_not_offered(client, peer,
                                "the rank does not offer cma on this connection");
    if (!connection_process(c, pid))
        return "cma needs the rank's Unix socket";
    return *pid > 0 ? NULL
                    : "the rank's process has no number here: cma needs it in the same "
                      "pid namespace, or in one below";
}

static const char *kinds_objection(const region_table *regions)
{
    for (uint32_t i = 0; i < regions->count; i++) {
        if (regions->entries[i].memory == FANIN_MEMORY_CUDA)
            return "the rank holds GPU memory, which cma does not read";
    }
    return NULL;
}

/* ------------------------------------------------------------------- trying */

static fanin_status find_process(path_round *r, size_t peer, void *cookie,
                                 fanin_error *why)
{
    cma_process *processes = cookie;
    const char *objection = process_objection(r->client, peer, &processes[peer].pid);
    return objection ? error_set(why, FANIN_ERR_UNSUPPORTED, NULL, "%s", objection)
                     : FANIN_OK;
}

static fanin_status take_witness(path_round *r, size_t peer, const msg_open_path *reply,
                                 void *cookie, fanin_error *why)
{
    cma_process *process = (cma_process *)cookie + peer;
    process->witness = reply->witness;
    memcpy(process->incarnation, r->client->peers[peer].control->peer.incarnation,
           sizeof process->incarnation);
    return reply->witness == 0
               ? error_set(why, FANIN_ERR_UNSUPPORTED, NULL,
                           "the rank's version of fanin offers cma by UCX only")
               : FANIN_OK;
}

/* A byte of what it publishes, which is thrown away: no lease is needed. */
static int probe_region(const cma_process *p, const region_table *regions)
{
    uint8_t byte;
    unsigned at;
    if (regions->count == 0)
        return 0;
    struct iovec to = {.iov_base = &byte, .iov_len = 1};
    struct iovec from = {.iov_base = (void *)(uintptr_t)regions->entries[0].base,
                         .iov_len = 1};
    return cma_read(p->pid, &to, 1, &from, 1, &at);
}

static fanin_status try_cma(path_round *r, size_t peer, void *cookie, fanin_error *why)
{
    const cma_process *process = (const cma_process *)cookie + peer;
    path_state *s = path_state_of(r->client, r->publication, peer);
    const char *objection = kinds_objection(s->regions);
    if (objection)
        return error_set(why, FANIN_ERR_UNSUPPORTED, NULL, "%s", objection);
    int failed = cma_prove(process);
    if (failed == 0)
        failed = probe_region(process, s->regions);
    r->lacks = r->lacks || failed == ENOSYS;
    if (failed != 0)
        return error_set(why, FANIN_ERR_UNSUPPORTED, NULL,
                         "a probe read by cma failed: %s", cma_why(failed));
    process_hold *h = calloc(1, sizeof *h);
    if (!h)
        return error_set_memory(why);
    *h = (process_hold){.hold = {.drop = drop_process}, .process = *process};
    s->hold = &h->hold;
    path_choose(r, peer, &cma_reader, "a probe read by cma succeeded");
    return FANIN_OK;
}

/* Takes what cma is for out of open; true: there is something. */
static bool take_ranks_for_cma(const path_round *r, bool *open, bool *mine)
{
    bool any = false, asked = path_is_allowed(r->client, &cma_reader);
    for (size_t i = 0; i < r->client->n_peers; i++) {
        pid_t pid;
        mine[i] = open[i] && asked &&
                  (is_mine(r, i) || !process_objection(r->client, i, &pid));
        open[i] = open[i] && !mine[i];
        any = any || mine[i];
    }
    return any;
}

/* See path_reader. */
static fanin_status cma_probe(path_round *r, bool *open, fanin_error *error)
{
    const msg_open_path m = {.path = FANIN_PATH_CMA,
                             .address = {(const uint8_t *)"", 0}};
    bool *mine = calloc(r->client->n_peers, sizeof *mine);
    cma_process *processes = calloc(r->client->n_peers, sizeof *processes);
    fanin_status status = mine && processes ? FANIN_OK : error_set_memory(error);
    if (status == FANIN_OK && take_ranks_for_cma(r, open, mine)) {
        status = path_try(r, mine, find_process, processes, error);
        if (status == FANIN_OK)
            status = path_open(r, mine, &m, take_witness, processes, error);
        if (status == FANIN_OK)
            status = path_regions(r, mine, &cma_reader, error);
        if (status == FANIN_OK)
            status = path_try(r, mine, try_cma, processes, error);
    }
    free(mine);
    free(processes);
    return status;
}

/* ---------------------------------------------------------------- reading */

/* What a thread takes at a time: neither a cancelled pull nor the last thread waits long for it. */
#define BATCH_BYTES ((uint64_t)1 << 20)
#define BATCH_PIECES 1000 /* mostly one call */
/* From so many bytes on two threads read where there are two CPUs: ranks have nothing to do. */
#define TWO_FROM ((uint64_t)16 << 20)
#define FEEDERS 8 /* where devices are filled: chunks that are read into at once */

/* A call reads from many places: a run is worth an iovec from some KiB on, and so is a gap. */
static const span_rule span_rules = {.max_length = CMA_SPAN_MAX,
                                     .max_gap = 2048,
                                     .direct_from = 65536,
                                     .short_run = 4096};

/* ----------------------------------------------------------------- planning */

static void forget_detail(void *detail)
{
    cma_detail *d = detail;
    if (!d)
        return;
    plan_spans_free(&d->spans);
    free(d->first);
    free(d);
}

static bool begin_batch(cma_detail *d, uint64_t span)
{
    if (!array_reserve(&d->first, &d->capacity, d->n_batches + 1, sizeof *d->first))
        return false;
    d->first[d->n_batches] = span;
    return true;
}

static bool cut_span_batches(cma_detail *d)
{
    const plan_spans *s = d->spans;
    uint64_t bytes = 0, pieces = 0;
    if (!begin_batch(d, 0))
        return false;
    for (uint64_t i = 0; i < s->n_spans; i++) {
        bool full = bytes + s->spans[i].length > BATCH_BYTES ||
                    pieces + s->spans[i].count > BATCH_PIECES;
        if (full && bytes > 0) {
            d->n_batches++;
            bytes = pieces = 0;
            if (!begin_batch(d, i))
                return false;
        }
        bytes += s->spans[i].length;
        pieces += s->spans[i].count;
    }
    d->n_batches += bytes > 0;
    return begin_batch(d, s->n_spans);
}

static fanin_status make_detail(const path_planning *how, size_t source, void **detail,
                                fanin_error *error)
{
    void *spans = NULL;
    cma_detail *d = calloc(1, sizeof *d);
    fanin_status status =
        d ? path_make_spans(how, source, &spans, error) : error_set_memory(error);
    if (d)
        d->spans = spans;
    if (status == FANIN_OK && !cut_span_batches(d))
        status = error_set_memory(error);
    for (uint64_t i = 0; status == FANIN_OK && i < d->spans->n_pieces; i++)
        d->bytes += d->spans->pieces[i].length;
    if (status == FANIN_OK)
        *detail = d;
    else
        forget_detail(d);
    return status;
}

/* ----------------------------------------------------------------- starting */

static fanin_status add_cma_source(cma_reading *of, size_t i, const cma_detail *detail,
                                   fanin_error *error)
{
    const path_reading *r = of->r;
    uint32_t first = 0;
    fanin_status status = path_arena(r, i, &first, error);
    if (status != FANIN_OK)
        return status;
    cma_source *s = &of->sources[i];
    s->index = i;
    s->peer = r->plan->peer_of[i];
    const path_state *state = path_taken(r->publication, s->peer);
    s->process = *cma_process_of(state);
    s->regions = state->regions->entries + first;
    s->detail = detail;
    return FANIN_OK;
}

/* Threads to read with, the calling one included; where devices are filled, without the client's.
   */
static unsigned find_copier_threads(cma_reading *of)
{
    fanin_client *client = of->r->client;
    reading_size size = {.configured = client->config.threads, .window = UINT64_MAX};
    for (size_t i = 0; i < of->n; i++) {
        const cma_detail *d = of->sources[i].detail;
        size.sources += d ? d->n_batches : 0;
        size.bytes += d ? d->bytes : 0;
    }
    size.cpus = usable_cpus();
    bool two = size.configured == 0 && size.cpus > 1 && size.bytes >= TWO_FROM;
    unsigned n = reading_threads_for(&size);
    n = n == 1 && two ? 2 : n;
    if (of->r->sink || n == 1)
        return n < FEEDERS || !of->r->sink ? n : FEEDERS;
    if (!client->readers)
        client->readers = reading_threads_create(&client->loop);
    if (!client->readers)
        return 1;
    size.cpus = reading_threads_cpus(client->readers);
    n = reading_threads_for(&size);
    n = n == 1 && two && size.cpus > 1 ? 2 : n;
    of->first_thread = reading_threads_taken(client->readers);
    unsigned others = reading_threads_have(client->readers, of->first_thread + n - 1);
    others = others > of->first_thread ? others - of->first_thread : 0;
    return others + 1 < n ? others + 1 : n;
}

static fanin_status make_copiers(cma_reading *of, fanin_error *error)
{
    fanin_client *client = of->r->client;
    if (!client->cma)
        client->cma = calloc(1, sizeof *client->cma);
    if (!client->cma)
        return error_set_memory(error);
    unsigned wanted = find_copier_threads(of);
    if (of->r->sink) {
        of->pool = worker_pool_create(0, wanted - 1, -1);
        wanted = FEEDERS;
    }
    if (of->r->sink && !of->pool)
        return error_set_memory(error);
    of->copiers = client->cma->copiers;
    for (; of->n_copiers < wanted; of->n_copiers++) {
        cma_copier **c = &of->copiers[of->n_copiers];
        if (!*c)
            *c = calloc(1, sizeof **c);
        if (!*c)
            break;
        (*c)->of = of;
        (*c)->job.run = cma_feed_job;
        (*c)->busy = false;
        (*c)->scatter_ns = 0;
        (*c)->at = of->n_copiers * of->n / wanted;
    }
    return of->n_copiers > 0 ? FANIN_OK : error_set_memory(error);
}

/* In a thread of its own. */
static bool take_cma_turn(void *cookie, deadline *wake)
{
    cma_copier *c = cookie;
    reading_threads *threads = c->of->r->client->readers;
    (void)wake;
    while (!reading_threads_halted(threads) && cma_copy(c))
        ;
    reading_threads_tell(threads);
    return false;
}

static fanin_status start(const path_reading *r, void *const *details, void *shared,
                          void **reading, fanin_error *error)
{
    (void)shared;
    fanin_client *client = r->client;
    cma_reading *of = calloc(1, sizeof *of + r->plan->n_sources * sizeof *of->sources);
    *reading = of;
    if (!of)
        return error_set_memory(error);
    of->r = r;
    of->n = r->plan->n_sources;
    of->waiter = (sink_waiter){.ready = cma_on_chunk};
    pthread_mutex_init(&of->lock, NULL);
    fanin_status status = FANIN_OK;
    for (size_t i = 0; i < of->n && status == FANIN_OK; i++) {
        if (r->plan->reader_of[i] == &cma_reader)
            status = add_cma_source(of, i, details[i], error);
    }
    if (status == FANIN_OK && r->sink &&
        !device_sink_attach(r->sink, &client->loop, &client->devices->memory)) {
        (void)device_sink_failed(r->sink, error);
        status = FANIN_ERR_TRANSPORT;
    }
    if (status == FANIN_OK)
        status = make_copiers(of, error);
    for (unsigned i = 1; i < of->n_copiers && status == FANIN_OK && !of->pool; i++)
        reading_threads_go(client->readers, of->first_thread + i - 1, take_cma_turn,
                           of->copiers[i]);
    return status;
}

/* ------------------------------------------------------------------ reading */

static bool step(void *reading)
{
    cma_reading *of = reading;
    return of->pool ? cma_feed(of) : cma_copy(of->copiers[0]);
}

/* Whose last byte is in place must still be who it was before the first. */
static void prove_source(cma_reading *of, cma_source *s)
{
    int error = cma_prove(&s->process);
    s->proven = error == 0;
    if (error != 0)
        cma_fail_read(s, of, error, NULL);
}

static fanin_status check(void *reading, size_t source, bool *done, fanin_error *error)
{
    cma_reading *of = reading;
    cma_source *s = &of->sources[source];
    *done = atomic_load(&s->done) == s->detail->bytes;
    if (*done && !s->proven && !atomic_load(&s->failed))
        prove_source(of, s);
    if (!atomic_load(&s->failed))
        return FANIN_OK;
    error_copy(error, &s->error);
    return s->status;
}

static uint64_t bytes(const void *reading, size_t source, bool *waits)
{
    const cma_source *s = &((const cma_reading *)reading)->sources[source];
    uint64_t done = atomic_load(&s->done);
    *waits = atomic_load(&s->next) > 0 && done < s->detail->bytes;
    return done;
}

static uint64_t scatter_ns(const void *reading)
{
    const cma_reading *of = reading;
    uint64_t ns = 0;
    for (unsigned i = 0; i < of->n_copiers; i++)
        ns += of->copiers[i]->scatter_ns;
    return ns;
}

static void account(const void *reading, size_t source, served *out)
{
    const cma_source *s = &((const cma_reading *)reading)->sources[source];
    out->bytes = atomic_load(&s->done);
    out->reads = atomic_load(&s->calls);
}

static bool finish(void *reading)
{
    cma_reading *of = reading;
    fanin_client *client = of->r->client;
    if (of->n_copiers > 1 && !of->pool)
        reading_threads_rest(client->readers);
    worker_pool_destroy(&of->pool);
    device_sink_unwait(&of->waiter);
    for (unsigned i = 0; i < of->n_copiers; i++)
        cma_copier_stop(of->copiers[i]);
    bool copied = !of->r->sink || device_sink_recall(of->r->sink, of);
    if (!copied)
        return false; /* a device may still tell of what it copied */
    pthread_mutex_destroy(&of->lock);
    free(of);
    return true;
}

/* Frees what the client keeps between pulls; no read is under way. */
static void cma_disconnect(fanin_client *client)
{
    size_t n = client->cma ? sizeof client->cma->copiers / sizeof(cma_copier *) : 0;
    for (size_t i = 0; i < n; i++) {
        if (client->cma->copiers[i])
            free(client->cma->copiers[i]->slot);
        free(client->cma->copiers[i]);
    }
    free(client->cma);
    client->cma = NULL;
}

const path_reader cma_reader = {
    .name = "cma",
    .number = FANIN_PATH_CMA,
    .disconnect = cma_disconnect,
    .told_at = offsetof(msg_end, bytes_cma),
    .uses_sink = true,
    .probe = cma_probe,
    .plan = make_detail,
    .span_rule = &span_rules,
    .forget = forget_detail,
    .start = start,
    .step = step,
    .check = check,
    .bytes = bytes,
    .scatter_ns = scatter_ns,
    .account = account,
    .finish = finish,
};
