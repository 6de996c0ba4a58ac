/* SPDX-License-Identifier: Apache-2.0 */
#include "stream/stage.h"
#include "core/rules.h"
#include "wake.h"
#include "error_set.h"
#include "publish/publication.h"
#include "stream/data_connection.h"

#include <errno.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define CHUNK_SIZE (CHUNK_BYTES + CHUNK_ENTRIES * sizeof(copy_entry))
/* A copy is cut into pieces of so many bytes, so that many processors of the device work. */
#define ENTRY_MOST ((size_t)64 << 10)
#define UNSETTLED_MS 1000
#define TELL_MS 60000 /* a device that has failed is told of so often, by each stage */

struct stage {
    fanin_server *server;
    gpu *gpu;
    int event;
    stage_wake_fn wake;
    void *cookie;
    gpu_stream *streams[GPU_MAX_DEVICES];
    chunk *free, *copying, *lost; /* lost: what a device may still write to */
    unsigned n_made, n_most;
    size_t memory;                     /* counted */
    peer_turns waiting[2];             /* for chunks; [true]: of the own user */
    bool own_was_last;                 /* ... to get one that both waited for */
    deadline tell_at[GPU_MAX_DEVICES]; /* that it has failed */
    _Atomic(chunk *) done; /* the latest first; written by the driver's threads */
};

/* ------------------------------------------- what is copied into a chunk */

/* Copies of device memory stand at the front of the chunk's entries, of host memory at their end.
    */
typedef struct filling {
    chunk *to;
    size_t n_device, n_host;
    int device;  /* -1: the host's memory only */
    bool failed; /* memory of the host cannot be read: of that box */
    uint64_t box;
} filling;

static bool is_full(const filling *f)
{
    return f->to->bytes == CHUNK_BYTES || f->n_device + f->n_host == CHUNK_ENTRIES;
}

/* @p runs runs of @p run bytes, packed at the end of the chunk. */
static void add_stage_entry(filling *f, bool device, const uint8_t *from, size_t run,
                            uint32_t runs, int64_t step)
{
    chunk *c = f->to;
    copy_entry *entries = c->entries;
    uint64_t to = (uintptr_t)c->data + c->bytes;
    copy_entry *last = NULL;
    if (device && f->n_device > 0)
        last = &entries[f->n_device - 1];
    else if (!device && f->n_host > 0)
        last = &entries[CHUNK_ENTRIES - f->n_host];
    c->bytes += run * runs;
    if (last && runs == 1 && last->runs == 1 && last->run + run <= ENTRY_MOST &&
        last->from + last->run == (uintptr_t)from && last->to + last->run == to) {
        last->run += (uint32_t)run;
        return;
    }
    size_t at = device ? f->n_device++ : CHUNK_ENTRIES - ++f->n_host;
    entries[at] = (copy_entry){.from = (uintptr_t)from,
                               .to = to,
                               .from_step = runs > 1 ? step : 0,
                               .to_step = runs > 1 ? (int64_t)run : 0,
                               .run = (uint32_t)run,
                               .runs = runs,
                               .convert = CONVERT_NONE};
}

static bool add_piece(void *cookie, const job *j, const source_box *b, uint64_t offset,
                      uint64_t length)
{
    filling *f = cookie;
    int device = shard_catalog_box_device(j->catalog, b, j->first_region);
    const uint8_t *first = shard_catalog_box_first(j->catalog, b, j->first_region);
    if (is_full(f) || (device >= 0 && f->device >= 0 && device != f->device))
        return false; /* the next chunk is that device's */
    if (device >= 0)
        f->device = device;
    while (length > 0 && !is_full(f)) {
        uint64_t room = smaller(CHUNK_BYTES - f->to->bytes, ENTRY_MOST);
        stretch s = stretch_of(j, b, offset, smaller(length, room));
        add_stage_entry(f, device >= 0, first + s.at, (size_t)s.size, (uint32_t)s.runs,
                        s.step);
        offset += s.size * s.runs;
        length -= s.size * s.runs;
    }
    return length == 0;
}

/* The box that a byte of the host's memory is of: the one that begins next before it. */
typedef struct search {
    uint64_t address, first, box;
} search;

static bool look_at_box(void *cookie, const job *j, const source_box *b,
                        uint64_t offset, uint64_t length)
{
    search *at = cookie;
    uint64_t first = (uintptr_t)shard_catalog_box_first(j->catalog, b, j->first_region);
    (void)offset, (void)length;
    if (first <= at->address && first >= at->first &&
        shard_catalog_box_device(j->catalog, b, j->first_region) < 0) {
        at->first = first;
        at->box = (uint64_t)(b - j->catalog->boxes);
    }
    return true;
}

/* By way of @p through takes as much of the reply, from where the job is, as the empty chunk has
   room for: memory of one device and of the host. The host's is copied, the device's (n_device
   entries) remains to be. Inside a bracket. */
static filling filling_gather(chunk *to, const job *j, const guarded *through)
{
    filling f = {.to = to, .device = -1};
    search bad = {.box = j->ranges[j->current].box};
    job_each(j, add_piece, &f);
    f.failed = !guarded_run(through, to->entries + CHUNK_ENTRIES - f.n_host, f.n_host,
                            0, &bad.address);
    if (f.failed)
        job_each(j, look_at_box, &bad);
    f.box = bad.box;
    return f;
}

/* ----------------------------------------------------------------- digests */

/* What comes into a list. */
typedef struct listing {
    digest_list list;
    uint32_t convert;
    int device;
    bool good;
} listing;

static bool list_piece(void *cookie, const job *j, const source_box *b, uint64_t offset,
                       uint64_t length)
{
    listing *l = cookie;
    int device = shard_catalog_box_device(j->catalog, b, j->first_region);
    uint64_t first = (uintptr_t)shard_catalog_box_first(j->catalog, b, j->first_region);
    if (l->device < 0)
        l->device = device;
    l->good = device >= 0 && device == l->device;
    while (l->good && length > 0) {
        stretch s = stretch_of(j, b, offset, length);
        l->good = digest_list_add(&l->list, first + (uint64_t)s.at, s.size, s.runs,
                                  s.step, l->convert);
        offset += s.size * s.runs;
        length -= s.size * s.runs;
    }
    return l->good;
}

/* What the device is told to digest instead: whole ranges of the reply, converted, as many as the
   chunk has room for and as lie on one device. No bytes come into the chunk, but the digests of
   their pieces. False: some of the next range has been gathered, it is not of one device alone, or
   cut into too many runs; the chunk is as it was. */
static bool filling_digest(chunk *to, const job *j, uint32_t convert, filling *out)
{
    listing l = {.list =
                     digest_list_in(to->data, CHUNK_BYTES, CHUNK_PIECES, CHUNK_ROWS),
                 .convert = convert,
                 .device = -1};
    job one = *j;
    l.good = j->ranges[j->current].length == j->ranges[j->current].whole;
    while (l.good && one.current < j->n_ranges) {
        one.n_ranges = one.current + 1;
        digest_list_cut(&l.list); /* each range begins a piece */
        job_each(&one, list_piece, &l);
        if (!l.good)
            break;
        to->digests = l.list;
        to->bytes += one.ranges[one.current++].length;
    }
    *out = (filling){.to = to, .device = l.device};
    return to->bytes > 0;
}

/* ----------------------------------------------------------------- chunks */

/* One more, for who asks first and all others later; NULL and why: none may be had. */
static chunk *chunk_make(stage *s, const peer_share *first, fanin_error *error)
{
    fanin_server *server = s->server;
    size_t before = s->memory;
    void *memory = NULL;
    if (!memory_account(server, NULL, &s->memory, before + CHUNK_SIZE) &&
        !(first->is_own && memory_fits(server, first, 0))) {
        memory_account(server, NULL, &s->memory, before);
        error_set(error, FANIN_ERR_LIMIT, NULL,
                  "the server's connections have all the memory they may");
        return NULL;
    }
    chunk *c = calloc(1, sizeof *c);
    fanin_status status = c ? gpu_host_alloc(s->gpu, CHUNK_SIZE, &memory, error)
                            : error_set_memory(error);
    if (status != FANIN_OK) {
        free(c);
        memory_account(server, NULL, &s->memory, before);
        return NULL;
    }
    c->data = memory;
    c->entries = (copy_entry *)(void *)(c->data + CHUNK_BYTES);
    c->of_stage = s;
    s->n_made++;
    return c;
}

static void await(stage *s, connection *c)
{
    if (c->staged.turn.waits)
        return;
    c->staged.wait_due = deadline_in_ms((uint64_t)2 * STALL_MS);
    turns_append(&s->waiting[c->from->is_own], &c->staged.turn, c, c->from);
}

static bool anybody(void *cookie, void *of)
{
    (void)cookie;
    (void)of;
    return true;
}

/* The own user and all others take turns: however many these are, it waits for one of them. */
static connection *next_waiting(stage *s)
{
    bool own = s->waiting[true].first && !(s->own_was_last && s->waiting[false].first);
    s->own_was_last = own;
    return turns_next(&s->waiting[own], anybody, NULL);
}

/* To who is next of those that wait, or to the pool. */
static void chunk_free(stage *s, chunk *c)
{
    connection *next = next_waiting(s);
    c->owner = NULL;
    if (!next) {
        c->next = s->free;
        s->free = c;
        return;
    }
    next->staged.granted = c;
    s->wake(s->cookie, next);
}

/* An empty chunk for the connection; NULL: none now; *error set: nor ever. */
static chunk *chunk_obtain(stage *s, connection *c, fanin_error *error)
{
    chunk *found = c->staged.granted;
    c->staged.granted = NULL;
    if (c->staged.turn.waits && deadline_passed(c->staged.wait_due)) {
        error_set(error, FANIN_ERR_LIMIT, NULL,
                  "other connections have had all chunks of pinned memory for %d s",
                  2 * STALL_MS / 1000);
        return NULL;
    }
    if (!found && !stage_is_short(s) && s->free) {
        found = s->free;
        s->free = found->next;
    }
    if (!found && !stage_is_short(s) && s->n_made < s->n_most) {
        found = chunk_make(s, c->from, error);
        if (!found && s->n_made > 0)
            *error = (fanin_error)FANIN_ERROR_INIT; /* the others will do */
    }
    if (!found && s->n_made > 0 && c->staged.count == 0)
        await(s, c);
    return found;
}

/* ------------------------------------------------------------------ copies */

static void unread(stage *s, chunk *c)
{
    fanin_server *server = s->server;
    if (!c->reading)
        return;
    pthread_mutex_lock(&server->lock);
    publication_read_leave(server, c->of, c->epoch);
    pthread_mutex_unlock(&server->lock);
    c->reading = false;
}

/* In a thread of the driver. */
static void on_copied(void *cookie, bool failed)
{
    chunk *c = cookie;
    stage *s = c->of_stage;
    int event = s->event;
    atomic_store(&c->broken, failed);
    c->next_done = atomic_load(&s->done);
    while (!atomic_compare_exchange_weak(&s->done, &c->next_done, c))
        ;
    wake_up(event);
}

/* *settled false: the device may still write to the chunk. */
static fanin_status launch(stage *s, const filling *f, bool *settled,
                           fanin_error *error)
{
    chunk *c = f->to;
    gpu_stream **stream = &s->streams[f->device];
    fanin_status status = FANIN_OK;
    *settled = true;
    if (!*stream)
        status = gpu_stream_create(s->gpu, f->device, stream, error);
    if (status == FANIN_OK && c->digests.n_pieces > 0)
        status = gpu_digest_run(*stream, &c->digests, error);
    else if (status == FANIN_OK)
        status = gpu_entries_run(*stream, c->entries, f->n_device, 0, 0, error);
    if (status != FANIN_OK)
        return status;
    status = gpu_stream_notify(*stream, on_copied, c, error);
    /* A copy under way that cannot be watched: waiting is all that is left. */
    *settled = status == FANIN_OK ||
               gpu_stream_wait(*stream, deadline_in_ms(UNSETTLED_MS), NULL) !=
                   FANIN_ERR_TIMEOUT;
    return status;
}

/* The log gets to know it, however many reads fail and whoever's they are. */
static void tell_stage_failed(stage *s, int device, const fanin_error *why)
{
    if (!deadline_passed(s->tell_at[device]))
        return;
    s->tell_at[device] = deadline_in_ms(TELL_MS);
    log_write(&s->server->log, FANIN_LOG_ERROR, "device-failed",
              "%s: reads of its memory fail; %s", why->message, why->remedy);
}

static void device_failed(stage *s, int device, fanin_error *error)
{
    fanin_error why = *error;
    error_place place = {.phase = "read",
                         .rank_plus_1 = (int32_t)s->server->rank + 1,
                         .remedy = why.remedy};
    error_set(error, FANIN_ERR_TRANSPORT, &place, "CUDA device %d of rank %u: %.300s",
              device, (unsigned)s->server->rank, why.message);
    tell_stage_failed(s, device, error);
}

static void append(staged *of, chunk *c)
{
    c->next = NULL;
    if (of->last)
        of->last->next = c;
    else
        of->first = c;
    of->last = c;
    of->count++;
}

/* As many ranges as the chunk holds whole, one at least: the next may be digested by a kernel. */
static job whole_ranges(const job *j)
{
    job some = *j;
    uint64_t bytes = j->ranges[j->current].length;
    for (some.n_ranges = j->current + 1; some.n_ranges < j->n_ranges; some.n_ranges++) {
        bytes += j->ranges[some.n_ranges].length;
        if (bytes > CHUNK_BYTES)
            break;
    }
    return some;
}

/* By the digest kernel what can be so. */
static filling fill(stage *s, chunk *to, const connection *c, const job *j,
                    const guarded *through)
{
    const digester *d = &c->digester;
    filling f;
    to->digests = (digest_list){0};
    if (d->on && filling_digest(to, j, d->convert, &f) &&
        gpu_prepare(s->gpu, f.device, GPU_DIGEST, NULL) == FANIN_OK)
        return f;
    to->digests = (digest_list){0};
    to->bytes = 0;
    const job some = d->on ? whole_ranges(j) : *j;
    return filling_gather(to, &some, through);
}

static fill_result unreadable(stage *s, const filling *f, const job *j,
                              fanin_error *error)
{
    unread(s, f->to);
    chunk_free(s, f->to);
    shard_catalog_unreadable(j->catalog, f->box, s->server->rank, error);
    return FILL_FAILED;
}

fill_result stage_fill(stage *s, connection *c, job *j, const guarded *through,
                       fanin_error *error)
{
    chunk *to = chunk_obtain(s, c, error);
    if (!to)
        return error->status != FANIN_OK ? FILL_FAILED : FILL_WAIT;
    to->bytes = to->sent = 0;
    to->of = j->of;
    to->epoch = j->epoch;
    to->reading = bracket_enter(s->server, j->of, j->epoch);
    if (!to->reading) {
        chunk_free(s, to);
        return FILL_VOID;
    }
    ON_SEND();
    const filling f = fill(s, to, c, j, through);
    if (f.failed)
        return unreadable(s, &f, j, error);
    to->device = f.device;
    to->state = f.device >= 0 ? CHUNK_COPYING : CHUNK_READY;
    to->due = deadline_in_ms(STALL_MS);
    bool settled = true;
    if (f.device >= 0 && launch(s, &f, &settled, error) != FANIN_OK) {
        device_failed(s, f.device, error);
        unread(s, to);
        if (settled) {
            chunk_free(s, to);
        } else {
            to->next = s->lost;
            s->lost = to;
        }
        return FILL_FAILED;
    }
    if (f.device >= 0) {
        to->catalog = shard_catalog_retain(j->catalog);
        to->next_copying = s->copying;
        s->copying = to;
    } else {
        unread(s, to);
    }
    to->owner = c;
    append(&c->staged, to);
    job_skip(j, to->bytes);
    j->ungathered -= to->bytes;
    return FILL_DONE;
}

void stage_drop_first(stage *s, staged *of)
{
    chunk *c = of->first;
    of->first = c->next;
    of->count--;
    if (!of->first)
        of->last = NULL;
    if (c->catalog)
        c->owner = NULL; /* under way: stage_reap() frees it */
    else
        chunk_free(s, c);
}

void stage_leave(stage *s, connection *c)
{
    if (c->staged.turn.waits)
        turns_leave(&s->waiting[c->from->is_own], &c->staged.turn);
    while (c->staged.first)
        stage_drop_first(s, &c->staged);
    chunk *granted = c->staged.granted;
    c->staged.granted = NULL;
    if (granted)
        chunk_free(s, granted);
}

/* -------------------------------------------------------------------- ends */

static void end_copy(stage *s, chunk *c)
{
    chunk **link = &s->copying;
    while (*link != c)
        link = &(*link)->next_copying;
    *link = c->next_copying;
    unread(s, c);
    catalog_retire(s->server, c->catalog);
    c->catalog = NULL;
    if (c->state == CHUNK_COPYING) /* else given up */
        c->state = atomic_load(&c->broken) ? CHUNK_FAILED : CHUNK_READY;
    if (c->owner)
        s->wake(s->cookie, c->owner);
    else
        chunk_free(s, c);
}

void stage_reap(stage *s)
{
    wake_heard(s->event);
    chunk *c = atomic_exchange(&s->done, NULL);
    while (c) {
        chunk *next = c->next_done;
        end_copy(s, c);
        c = next;
    }
}

/* Of each peer who has waited longest comes first. */
static deadline expire_waits(stage *s, const peer_turns *q)
{
    deadline soonest = UINT64_MAX;
    for (const peer_turn *t = q->first; t; t = t->next_peer) {
        connection *c = t->of;
        if (deadline_passed(c->staged.wait_due))
            s->wake(s->cookie, c);
        else
            soonest = deadline_sooner(soonest, c->staged.wait_due);
    }
    return soonest;
}

deadline stage_expire(stage *s)
{
    deadline soonest = UINT64_MAX;
    for (chunk *c = s->copying; c; c = c->next_copying) {
        if (c->state != CHUNK_COPYING)
            continue;
        if (!deadline_passed(c->due)) {
            soonest = deadline_sooner(soonest, c->due);
            continue;
        }
        log_write(&s->server->log, FANIN_LOG_ERROR, "device-stalled",
                  "CUDA device %d has not finished a copy of %zu bytes in %d s",
                  c->device, c->bytes, STALL_MS / 1000);
        c->state = CHUNK_FAILED; /* the chunk itself is kept until the copy ends */
        unread(s, c);
        if (c->owner)
            s->wake(s->cookie, c->owner);
    }
    return deadline_sooner(soonest,
                           deadline_sooner(expire_waits(s, &s->waiting[false]),
                                           expire_waits(s, &s->waiting[true])));
}

bool stage_is_short(const stage *s)
{
    return s->waiting[false].first || s->waiting[true].first;
}

void stage_explain(stage *s, const chunk *c, fanin_error *error)
{
    fanin_error why = FANIN_ERROR_INIT;
    /* The wait does not wait: it asks a failed device for the error. */
    if (atomic_load(&c->broken) && s->streams[c->device])
        gpu_stream_wait(s->streams[c->device], 0, &why);
    if (why.status != FANIN_ERR_TRANSPORT)
        error_set(&why, FANIN_ERR_TRANSPORT, NULL, "%s",
                  atomic_load(&c->broken) ? "it has failed"
                                          : "it does not finish a copy");
    *error = why;
    device_failed(s, c->device, error);
}

/* -------------------------------------------------------------------- life */

int stage_event(const stage *s)
{
    return s->event;
}

fanin_status stage_create(fanin_server *server, gpu *g, stage_wake_fn wake,
                          void *cookie, stage **out, fanin_error *error)
{
    stage *s = calloc(1, sizeof *s);
    if (!s)
        return error_set_memory(error);
    s->server = server;
    s->gpu = g;
    s->wake = wake;
    s->cookie = cookie;
    /* All stages together: a quarter of the connections' memory, and one chunk each in any case. */
    uint64_t most = server->max_memory / 4 / CHUNK_SIZE + 1;
    most = most < CHUNKS_MOST ? most : CHUNKS_MOST;
    s->n_most = most > server->data_threads ? (unsigned)most / server->data_threads : 1;
    s->event = wake_open();
    if (s->event < 0) {
        free(s);
        return error_set_errno(error, FANIN_ERR_IO, errno, NULL,
                               "cannot set up copies of device memory");
    }
    *out = s;
    return FANIN_OK;
}

void stage_destroy(stage **stage_ptr)
{
    stage *s = *stage_ptr;
    if (!s)
        return;
    *stage_ptr = NULL;
    deadline at = deadline_in_ms(STALL_MS);
    while (s->copying && !deadline_passed(at)) {
        struct pollfd p = {.fd = s->event, .events = POLLIN};
        (void)poll(&p, 1, deadline_poll_ms(at));
        stage_reap(s);
    }
    if (s->copying || s->lost) {
        log_write(
            &s->server->log, FANIN_LOG_ERROR, "device-stalled",
            "CUDA device %d does not finish its copies: their memory is not freed",
            (s->copying ? s->copying : s->lost)->device);
        for (chunk *c = s->copying; c; c = c->next_copying)
            unread(s, c);
        return;
    }
    for (int i = 0; i < GPU_MAX_DEVICES; i++)
        gpu_stream_destroy(&s->streams[i]);
    while (s->free) {
        chunk *c = s->free;
        s->free = c->next;
        gpu_host_free(s->gpu, c->data);
        free(c);
    }
    memory_account(s->server, NULL, &s->memory, 0);
    close(s->event);
    free(s);
}
