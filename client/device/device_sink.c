/* SPDX-License-Identifier: Apache-2.0 */
#include "device/device_sink.h"

#include "array.h"
#include "copy_kernel.h"
#include "copy_list.h"
#include "error_set.h"
#include "wake.h"
#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

#define MAX_ITEMS 16384 /* of a chunk */
/* Of pieces in a chunk, whatever the views: what a copy kernel moves at once. */
#define ALIGNMENT 16

/* Where the driver's threads tell what they saw. Outlives the sink, since the caller's stream may
    reach its point long after. */
typedef struct sink_signal {
    pthread_mutex_t lock;
    int fd; /* eventfd, -1: the sink is gone */
    unsigned references;
    bool reached, failed; /* the caller's stream */
} sink_signal;

typedef struct sink_device {
    int device;
    gpu_stream *stream;
} sink_device;

typedef struct job_list {
    sink_job *first, **end;
} job_list;

struct device_sink {
    gpu *g;
    const memory_range *ranges;
    size_t n_ranges;
    sink_device *devices;
    size_t n_devices, device_capacity;
    sink_signal *signal;
    loop_source source;
    loop *loop; /* NULL: not attached */
    device_memory *pool;
    bool ready, failed, stuck;
    fanin_error error;
    job_list held, active; /* before the caller's stream got there, and after */
    sink_job *spare;
    sink_waiter *waiters;
    copy_list blocks, cut; /* scratch */
};

struct sink_item {
    const uint8_t *from;
    uint8_t *to;
    const strided *view;
    uint64_t length;
    size_t device; /* of sink->devices */
};

int device_sink_device(const device_sink *sink, const void *to)
{
    const memory_range *r =
        sink ? memory_range_find(sink->ranges, sink->n_ranges, to) : NULL;
    return r ? r->device : -1;
}

/* ------------------------------------------------------------------- items */

/* What a run becomes that copy_units_cut() cuts where lines of memory end. */
static uint64_t entries_of_run(uint64_t run)
{
    return run > COPY_UNIT_BYTES ? run / COPY_UNIT_BYTES + 2 : 1;
}

/* Entries that a piece becomes, or a few more: a chunk keeps all multiprocessors busy. */
static uint64_t entries_of(uint64_t length, const strided *view)
{
    if (!view || view->n_dims == 0)
        return entries_of_run(length);
    uint64_t inner = view->extent[view->n_dims - 1];
    uint64_t outer = strided_runs(view) / inner;
    if (view->run > COPY_UNIT_BYTES)
        return outer * inner * entries_of_run(view->run);
    uint64_t at_once = COPY_UNIT_BYTES / view->run;
    at_once = at_once < COPY_UNIT_RUNS ? at_once : COPY_UNIT_RUNS;
    return outer * (inner / at_once + 1);
}

bool sink_job_add(sink_job *job, const uint8_t *from, uint64_t length, uint8_t *to,
                  const strided *view)
{
    const device_sink *s = job->sink;
    int device = device_sink_device(s, to);
    size_t index = 0;
    while (index < s->n_devices && s->devices[index].device != device)
        index++;
    if (index == s->n_devices || !array_reserve(&job->items, &job->max_items,
                                                job->n_items + 1, sizeof *job->items))
        return false;
    job->items[job->n_items++] = (sink_item){
        .from = from, .to = to, .view = view, .length = length, .device = index};
    job->expected += entries_of(length, view);
    return true;
}

uint8_t *sink_job_place(sink_job *job, uint64_t length, uint8_t *to,
                        const strided *view)
{
    size_t at = (job->used + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    if (job->n_items > 0 &&
        (length > CHUNK_BYTES - at || job->n_items == MAX_ITEMS ||
         entries_of(length, view) + job->expected > job->max_entries))
        return NULL;
    uint8_t *bytes = job->chunk->bytes + at;
    if (length > CHUNK_BYTES - at || !sink_job_add(job, bytes, length, to, view))
        return NULL;
    job->used = at + length;
    return bytes;
}

void sink_job_clear(sink_job *job)
{
    for (size_t i = 0; job->tables && i < job->sink->n_devices; i++) {
        if (job->tables[i])
            gpu_table_destroy(&job->tables[i]);
    }
    job->n_items = job->n_entries = job->expected = 0;
    job->used = 0;
    job->requests = job->bytes = 0;
    job->finished = job->broken = false;
    job->next = NULL;
}

/* Frees what a job without a chunk has. */
static void sink_job_release(sink_job *job)
{
    sink_job_clear(job);
    free(job->items);
    free(job->tables);
    job->items = NULL;
    job->tables = NULL;
    job->max_items = 0;
}

/* ----------------------------------------------------------------- entries */

static bool cut_job_entry(copy_list *out, const copy_entry *entry)
{
    uint64_t n = copy_units_cut(entry, NULL);
    if (!array_reserve(&out->entries, &out->capacity, out->n + n, sizeof *entry))
        return false;
    out->n += copy_units_cut(entry, out->entries + out->n);
    return true;
}

/* Copy entries of the items on device @p index, cut so that the whole device is busy, in
   sink->cut; there may be none. False: out of memory. */
static bool sink_job_entries(const sink_job *job, size_t index)
{
    device_sink *s = job->sink;
    s->blocks.n = s->cut.n = 0;
    s->blocks.failed = false;
    for (size_t i = 0; i < job->n_items; i++) {
        const sink_item *item = &job->items[i];
        uint64_t from = (uint64_t)(uintptr_t)item->from;
        uint64_t to = (uint64_t)(uintptr_t)item->to;
        if (item->device != index)
            continue;
        if (item->view)
            copy_list_add_view(&s->blocks, 0, from, to, item->view);
        else
            copy_list_add(&s->blocks, 0, from, to, item->length);
    }
    bool ok = !s->blocks.failed;
    for (uint64_t i = 0; i < s->blocks.n && ok; i++)
        ok = cut_job_entry(&s->cut, &s->blocks.entries[i]);
    return ok;
}

/* ------------------------------------------------------------------ signal */

static fanin_status signal_create(sink_signal **out, fanin_error *error)
{
    sink_signal *s = calloc(1, sizeof *s);
    if (!s)
        return error_set_memory(error);
    s->fd = wake_open();
    if (s->fd < 0) {
        int failed = errno;
        free(s);
        return error_set_errno(error, FANIN_ERR_LIMIT, failed, NULL,
                               "cannot create an event descriptor");
    }
    pthread_mutex_init(&s->lock, NULL);
    s->references = 1;
    *out = s;
    return FANIN_OK;
}

/* With the lock, which goes. */
static void signal_drop(sink_signal *s)
{
    bool last = --s->references == 0;
    pthread_mutex_unlock(&s->lock);
    if (!last)
        return;
    pthread_mutex_destroy(&s->lock);
    free(s);
}

static void wake_loop(const sink_signal *s)
{
    if (s->fd >= 0)
        wake_up(s->fd);
}

/* In a thread of the driver: the caller's stream got to where the pull began. */
static void on_stream_reached(void *cookie, bool failed)
{
    sink_signal *s = cookie;
    pthread_mutex_lock(&s->lock);
    s->reached = true;
    s->failed = failed;
    wake_loop(s);
    signal_drop(s);
}

/* In a thread of the driver: a device is through with a job. */
static void on_job_copied(void *cookie, bool failed)
{
    sink_job *job = cookie;
    sink_signal *s = job->sink->signal;
    pthread_mutex_lock(&s->lock);
    job->running--;
    job->broken = job->broken || failed;
    wake_loop(s);
    pthread_mutex_unlock(&s->lock);
}

/* -------------------------------------------------------------- life cycle */

static bool add_device(device_sink *s, int device)
{
    for (size_t i = 0; i < s->n_devices; i++) {
        if (s->devices[i].device == device)
            return true;
    }
    if (!array_reserve(&s->devices, &s->device_capacity, s->n_devices + 1,
                       sizeof *s->devices))
        return false;
    s->devices[s->n_devices++] = (sink_device){.device = device};
    return true;
}

static fanin_status follow_stream(device_sink *s, const fanin_stream *after,
                                  fanin_error *error)
{
    s->ready = !after || !after->handle;
    if (s->ready)
        return FANIN_OK;
    s->signal->references++;
    fanin_status status = gpu_notify(s->g, after, on_stream_reached, s->signal, error);
    if (status != FANIN_OK)
        s->signal->references--;
    return status;
}

fanin_status device_sink_create(gpu *g, const memory_range *ranges, size_t n,
                                const fanin_stream *after, device_sink **out,
                                fanin_error *error)
{
    *out = NULL;
    size_t on_devices = 0;
    for (size_t i = 0; i < n; i++)
        on_devices += ranges[i].device >= 0;
    if (on_devices == 0)
        return FANIN_OK;
    device_sink *s = calloc(1, sizeof *s);
    if (!s)
        return error_set_memory(error);
    s->g = g;
    s->ranges = ranges;
    s->n_ranges = n;
    s->source.fd = -1;
    s->error = (fanin_error)FANIN_ERROR_INIT;
    s->held.end = &s->held.first;
    s->active.end = &s->active.first;
    bool good = true;
    for (size_t i = 0; i < n && good; i++)
        good = ranges[i].device < 0 || add_device(s, ranges[i].device);
    fanin_status status =
        good ? signal_create(&s->signal, error) : error_set_memory(error);
    if (status == FANIN_OK)
        status = follow_stream(s, after, error);
    if (status != FANIN_OK)
        (void)device_sink_destroy(&s);
    *out = s;
    return status;
}

bool device_sink_destroy(device_sink **sink)
{
    device_sink *s = *sink;
    *sink = NULL;
    if (!s)
        return true;
    bool finished = !s->signal || device_sink_recall(s, NULL);
    if (s->loop)
        loop_remove(s->loop, &s->source);
    while (s->waiters)
        device_sink_unwait(s->waiters);
    if (!finished)
        return false; /* the driver's threads may still come with its jobs */
    if (s->signal) {
        pthread_mutex_lock(&s->signal->lock);
        close(s->signal->fd);
        s->signal->fd = -1;
        signal_drop(s->signal);
    }
    for (size_t i = 0; i < s->n_devices; i++)
        gpu_stream_destroy(&s->devices[i].stream);
    while (s->spare) {
        sink_job *job = s->spare;
        s->spare = job->later;
        sink_job_release(job);
        free(job);
    }
    copy_list_free(&s->blocks);
    copy_list_free(&s->cut);
    free(s->devices);
    free(s);
    return true;
}

void device_sink_fail(device_sink *sink, const fanin_error *error)
{
    if (sink->failed)
        return;
    sink->failed = true;
    error_copy(&sink->error, error);
    wake_loop(sink->signal);
}

bool device_sink_failed(const device_sink *sink, fanin_error *error)
{
    if (!sink || !sink->failed)
        return false;
    error_copy(error, &sink->error);
    return true;
}

/* An error of the driver, with the device that it is about. */
static void fail_device(device_sink *s, size_t index, const fanin_error *why)
{
    fanin_error named = FANIN_ERROR_INIT;
    error_place place = {.phase = "read"};
    error_set(&named, why->status, &place, "landing on CUDA device %d: %s",
              s->devices[index].device, why->message);
    device_sink_fail(s, &named);
}

static void on_signal(loop_source *source, uint32_t events);

bool device_sink_attach(device_sink *s, loop *l, device_memory **pool)
{
    if (s->loop || s->failed)
        return !s->failed;
    fanin_error why = FANIN_ERROR_INIT;
    if (!*pool)
        *pool = device_memory_create(s->g);
    fanin_status status = *pool ? FANIN_OK : error_set_memory(&why);
    s->pool = *pool;
    for (size_t i = 0; i < s->n_devices && status == FANIN_OK; i++) {
        status =
            gpu_stream_create(s->g, s->devices[i].device, &s->devices[i].stream, &why);
        if (status != FANIN_OK) {
            fail_device(s, i, &why);
            return false;
        }
    }
    if (status == FANIN_OK) {
        s->source =
            (loop_source){.fd = s->signal->fd, .events = EPOLLIN, .ready = on_signal};
        status = loop_add(l, &s->source, &why);
    }
    if (status != FANIN_OK) {
        device_sink_fail(s, &why);
        return false;
    }
    s->loop = l;
    return true;
}

bool device_sink_ready(const device_sink *sink)
{
    return sink->ready;
}

gpu *device_sink_gpu(const device_sink *sink)
{
    return sink->g;
}

/* -------------------------------------------------------------------- jobs */

static void append_job(job_list *list, sink_job *job)
{
    job->later = NULL;
    *list->end = job;
    list->end = &job->later;
}

/* Takes out the one that @p link points to. */
static sink_job *take_job_out(job_list *list, sink_job **link)
{
    sink_job *job = *link;
    *link = job->later;
    if (list->end == &job->later)
        list->end = link;
    job->later = NULL;
    return job;
}

sink_job *device_sink_take(device_sink *s, void *owner)
{
    pool_chunk *chunk;
    fanin_error why = FANIN_ERROR_INIT;
    if (s->failed)
        return NULL;
    if (device_memory_take(s->pool, &chunk, &why) != FANIN_OK)
        device_sink_fail(s, &why);
    if (!chunk)
        return NULL;
    sink_job *job = s->spare;
    if (job) {
        s->spare = job->later;
    } else if (!(job = calloc(1, sizeof *job))) {
        chunk->busy = false;
        error_set_memory(&why);
        device_sink_fail(s, &why);
        return NULL;
    }
    job->later = NULL;
    job->sink = s;
    job->owner = owner;
    job->chunk = chunk;
    job->entries = chunk->entries;
    job->max_entries = CHUNK_ENTRIES;
    return job;
}

void sink_job_give(sink_job *job)
{
    device_sink *s = job->sink;
    if (!job->chunk) {
        sink_job_release(job);
        return;
    }
    sink_job_clear(job);
    job->chunk->busy = false;
    job->chunk = NULL;
    job->later = s->spare;
    s->spare = job;
    if (s->waiters)
        wake_loop(s->signal);
}

void sink_job_init(sink_job *job, device_sink *sink, unsigned area, void *owner)
{
    fanin_error why = FANIN_ERROR_INIT;
    *job = (sink_job){.sink = sink, .owner = owner};
    if (device_memory_area(sink->pool, area, &job->entries, &why) == FANIN_OK)
        job->max_entries = AREA_ENTRIES;
    else
        device_sink_fail(sink, &why);
}

/* More entries than there is pinned room for: a table of the device's, for this job only. */
static fanin_status run_table(sink_job *job, size_t index, fanin_error *error)
{
    const device_sink *s = job->sink;
    const sink_device *d = &s->devices[index];
    if (!job->tables)
        job->tables = calloc(s->n_devices, sizeof(gpu_table *));
    if (!job->tables)
        return error_set_memory(error);
    gpu_table **table = &job->tables[index];
    fanin_status status =
        gpu_table_create(s->g, d->device, s->cut.entries, s->cut.n, 1, table, error);
    if (status != FANIN_OK)
        return status;
    return gpu_table_run(*table, d->stream, 0, s->cut.n, 0, 0, error);
}

static fanin_status run_entries(sink_job *job, size_t index, fanin_error *error)
{
    const device_sink *s = job->sink;
    if (s->cut.n > job->max_entries - job->n_entries)
        return run_table(job, index, error);
    copy_entry *entries = job->entries + job->n_entries;
    memcpy(entries, s->cut.entries, s->cut.n * sizeof *entries);
    job->n_entries += s->cut.n;
    return gpu_entries_run(s->devices[index].stream, entries, s->cut.n, 0, 0, error);
}

static void set_running(sink_job *job, int change)
{
    pthread_mutex_lock(&job->sink->signal->lock);
    job->running = (unsigned)((int)job->running + change);
    pthread_mutex_unlock(&job->sink->signal->lock);
}

/* Starts what a job has for one device. */
static void start_job(device_sink *s, sink_job *job, size_t index)
{
    fanin_error why = FANIN_ERROR_INIT;
    sink_device *d = &s->devices[index];
    fanin_status status =
        sink_job_entries(job, index) ? FANIN_OK : error_set_memory(&why);
    if (status == FANIN_OK && s->cut.n == 0)
        return;
    if (status == FANIN_OK)
        status = run_entries(job, index, &why);
    if (status != FANIN_OK) {
        fail_device(s, index, &why);
        return;
    }
    set_running(job, 1);
    if (gpu_stream_notify(d->stream, on_job_copied, job, &why) == FANIN_OK)
        return;
    fail_device(s, index, &why);
    /* Nobody will tell when it is through. */
    if (gpu_stream_wait(d->stream, deadline_in_ms(DEVICE_DRAIN_MS), &why) !=
        FANIN_ERR_TIMEOUT)
        set_running(job, -1);
}

static void launch_job(device_sink *s, sink_job *job)
{
    append_job(&s->active, job);
    for (size_t i = 0; i < s->n_devices && !s->failed; i++)
        start_job(s, job, i);
    pthread_mutex_lock(&s->signal->lock);
    bool idle = job->running == 0;
    pthread_mutex_unlock(&s->signal->lock);
    if (idle)
        wake_loop(s->signal);
}

void device_sink_submit(sink_job *job, sink_done_fn done)
{
    device_sink *s = job->sink;
    job->done = done;
    if (s->ready || s->failed)
        launch_job(s, job);
    else
        append_job(&s->held, job);
}

/* ------------------------------------------------------------------ events */

/* A job that is through, of @p owner or (NULL) of anybody; NULL: none. */
static sink_job *next_finished(device_sink *s, const void *owner)
{
    sink_job **link = &s->active.first, *found = NULL;
    pthread_mutex_lock(&s->signal->lock);
    while (*link && ((*link)->running > 0 || (owner && (*link)->owner != owner)))
        link = &(*link)->later;
    if (*link)
        found = take_job_out(&s->active, link);
    pthread_mutex_unlock(&s->signal->lock);
    return found;
}

/* Which device it was, and what its driver says. */
static void explain_failure(device_sink *s, const sink_job *job)
{
    fanin_error why = FANIN_ERROR_INIT;
    for (size_t i = 0; i < s->n_devices && !s->failed; i++) {
        if (gpu_stream_wait(s->devices[i].stream, 0, &why) == FANIN_ERR_TRANSPORT)
            fail_device(s, i, &why);
    }
    if (s->failed)
        return;
    size_t index = job->n_items ? job->items[0].device : 0;
    error_set(&why, FANIN_ERR_TRANSPORT, NULL, "the device failed");
    fail_device(s, index, &why);
}

static void look_at_stream(device_sink *s)
{
    if (s->ready)
        return;
    pthread_mutex_lock(&s->signal->lock);
    s->ready = s->signal->reached;
    bool failed = s->signal->failed;
    pthread_mutex_unlock(&s->signal->lock);
    if (failed) {
        fanin_error why = FANIN_ERROR_INIT;
        error_place place = {.phase = "read"};
        error_set(&why, FANIN_ERR_TRANSPORT, &place,
                  "the device of the CUDA stream that was given has failed");
        device_sink_fail(s, &why);
    }
}

static void on_signal(loop_source *source, uint32_t events)
{
    device_sink *s = (device_sink *)((char *)source - offsetof(device_sink, source));
    wake_heard(source->fd);
    (void)events;
    look_at_stream(s);
    while (s->held.first && (s->ready || s->failed))
        launch_job(s, take_job_out(&s->held, &s->held.first));
    for (sink_job *job; (job = next_finished(s, NULL));) {
        if (job->broken)
            explain_failure(s, job);
        job->done(job, !s->failed);
    }
    sink_waiter *waiters = s->waiters;
    s->waiters = NULL;
    if (waiters)
        waiters->link = &waiters;
    while (waiters) {
        sink_waiter *first = waiters;
        device_sink_unwait(first);
        first->ready(first);
    }
}

void device_sink_wait(device_sink *sink, sink_waiter *waiter)
{
    if (waiter->link)
        return;
    waiter->next = sink->waiters;
    waiter->link = &sink->waiters;
    if (waiter->next)
        waiter->next->link = &waiter->next;
    sink->waiters = waiter;
    if (sink->failed)
        wake_loop(sink->signal);
}

void device_sink_unwait(sink_waiter *waiter)
{
    if (!waiter->link)
        return;
    *waiter->link = waiter->next;
    if (waiter->next)
        waiter->next->link = waiter->link;
    waiter->next = NULL;
    waiter->link = NULL;
}

bool device_sink_is_short(const device_sink *sink)
{
    return sink->waiters != NULL;
}

/* ---------------------------------------------------------------- recalling */

static void discard_job(sink_job *job)
{
    if (job->chunk)
        sink_job_give(job);
    else
        sink_job_clear(job);
}

static bool is_active(const device_sink *s, const void *owner)
{
    const sink_job *job = s->active.first;
    while (job && owner && job->owner != owner)
        job = job->later;
    return job != NULL;
}

bool device_sink_recall(device_sink *s, const void *owner)
{
    for (sink_job **link = &s->held.first; *link;) {
        if (!owner || (*link)->owner == owner)
            discard_job(take_job_out(&s->held, link));
        else
            link = &(*link)->later;
    }
    deadline at = deadline_in_ms(DEVICE_DRAIN_MS);
    while (!s->stuck) {
        for (sink_job *job; (job = next_finished(s, owner));)
            discard_job(job);
        if (!is_active(s, owner))
            break;
        struct pollfd wait = {.fd = s->signal->fd, .events = POLLIN};
        (void)poll(&wait, 1, deadline_poll_ms(at));
        eventfd_t count;
        if (eventfd_read(s->signal->fd, &count) < 0)
            s->stuck = deadline_passed(at);
    }
    if (s->stuck && is_active(s, owner)) {
        device_memory_abandon(s->pool);
        return false;
    }
    wake_loop(s->signal); /* for what came here and is others' */
    return true;
}
