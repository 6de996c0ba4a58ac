/* SPDX-License-Identifier: Apache-2.0 */
/* Changed words of ranks' copies, and where a plan's pieces have landed them: in host memory, or in
   that of devices, where a kernel reads them in the pinned host memory that they have come to. */
#include "delta/delta.h"
#include "device/devices.h"
#include "error_set.h"
#include "patch_kernel.h"

#include <stdlib.h>
#include <string.h>

/* Where the piece's bytes have landed, for a kernel or the calling thread. */
static patch_landing landing_of(const plan *plan, const box_table *boxes,
                                const piece *p, const uint8_t *base)
{
    const strided *view = p->view ? &plan->views[p->view - 1] : NULL;
    patch_landing l = {.from = delta_origin(boxes, p),
                       .to = (uint64_t)(uintptr_t)base + p->to};
    l.end = l.from + p->length;
    uint64_t bits = l.from | l.end | l.to;
    if (view) {
        l.n_dims = view->n_dims;
        l.run = view->run;
        bits |= l.run;
    }
    for (uint32_t i = 0; i < l.n_dims; i++) {
        l.extent[i] = view->extent[i];
        l.from_step[i] = (uint64_t)view->from[i];
        l.to_step[i] = view->to[i];
        bits |= l.from_step[i] | (uint64_t)l.to_step[i];
    }
    l.even = bits % 2 == 0;
    return l;
}

/* Where the piece's byte @p at landed; NULL: it lies between two runs, and nobody wants it. The
   view's strides in the piece descend, as those of packed rows do. */
static uint8_t *landed_at(const patch_landing *l, uint64_t at)
{
    uint8_t *to = (uint8_t *)(uintptr_t)l->to;
    if (l->n_dims == 0)
        return to + at;
    for (uint32_t i = 0; i < l->n_dims; i++) {
        uint64_t index = at / l->from_step[i];
        if (index >= l->extent[i])
            return NULL;
        at -= index * l->from_step[i];
        to += (int64_t)index * l->to_step[i];
    }
    return at < l->run ? to + at : NULL;
}

static void land_bytes(const patch_landing *l, uint64_t at, const uint8_t *word)
{
    for (unsigned i = 0; i < 2; i++) {
        uint64_t byte = at + i;
        uint8_t *to =
            byte >= l->from && byte < l->end ? landed_at(l, byte - l->from) : NULL;
        if (to)
            *to = word[i];
    }
}

static void land_word(const patch_landing *l, uint64_t at, const uint8_t *word)
{
    uint8_t *to = landed_at(l, at - l->from);
    if (to)
        memcpy(to, word, 2);
}

/* The first change whose word does not end before byte @p at of the segment. */
static uint64_t first_from(const uint8_t *changes, uint64_t count, uint64_t at)
{
    uint64_t low = 0, high = count;
    while (low < high) {
        uint64_t middle = low + (high - low) / 2;
        if (patch_place(changes, middle) < at / 2)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

/* Changed words lie in lines of memory that no cache holds, too far apart for the processor to
   guess: asked for so many words ahead, applying takes about half the time. */
#define WORDS_AHEAD 16

static uint64_t byte_of(uint64_t start, const uint8_t *changes, uint64_t i)
{
    return start + UINT64_C(2) * patch_place(changes, i);
}

/* @p changes of the segment that begins at @p start. */
static void apply_segment(const patch_landing *l, uint64_t start,
                          const uint8_t *changes, uint64_t count)
{
    const uint8_t *words = changes + 2 * count;
    uint64_t i = first_from(changes, count, l->from > start ? l->from - start : 0);
    for (; i < count; i++) {
        uint64_t at = byte_of(start, changes, i);
        if (at >= l->end)
            return;
        uint64_t next =
            i + WORDS_AHEAD < count ? byte_of(start, changes, i + WORDS_AHEAD) : l->end;
        if (l->n_dims == 0 && next < l->end)
            __builtin_prefetch(landed_at(l, next - l->from), 1);
        if (l->even)
            land_word(l, at, words + 2 * i);
        else
            land_bytes(l, at, words + 2 * i);
    }
}

void delta_apply(const delta *d, size_t source, uint64_t from, uint64_t to,
                 uint8_t *base)
{
    const delta_source *s = &d->sources[source];
    const plan *plan = d->whole->plan;
    for (uint64_t i = from; i < to; i++) {
        const piece *p = &plan->ranks[source].pieces[i];
        const patch_landing l =
            landing_of(plan, d->whole->sources[source].boxes, p, base);
        if (delta_device_of(d, base + p->to) >= 0)
            continue;
        for (uint32_t k = s->chain; k-- > 0;) {
            const uint64_t *first = s->first + k * (s->segments + 1);
            const uint64_t *at = s->at + k * s->segments;
            for (uint64_t j = l.from / PATCH_SEGMENT; j * PATCH_SEGMENT < l.end; j++) {
                if (at[j] != DELTA_NONE)
                    apply_segment(&l, j * PATCH_SEGMENT, d->staging + at[j],
                                  first[j + 1] - first[j]);
            }
        }
    }
}

/* --------------------------------------------------------------- to devices */

_Static_assert(PATCH_DIMS == FANIN_MAX_DIMS && PATCH_KERNEL_SEGMENT == PATCH_SEGMENT,
               "what the kernel knows");

#define CANCEL_MS 20 /* until a wait sees that the call was cancelled */

/* What a device is told. */
typedef struct tables {
    int device;
    patch_landing *landings; /* of each source, ascending by `from` */
    size_t n_landings, landing_room;
    patch_run *runs;
    size_t n_runs, run_room;
} tables;

static int order_landings(const void *a, const void *b)
{
    const patch_landing *one = a, *other = b;
    return one->from < other->from ? -1 : one->from > other->from;
}

/* The source's pieces on the device. False: no memory. */
static bool add_landings(tables *t, const delta *d, size_t source, const uint8_t *base)
{
    const plan *plan = d->whole->plan;
    const plan_rank *rank = &plan->ranks[source];
    uint64_t first = t->n_landings;
    for (uint64_t i = 0; i < rank->n_pieces; i++) {
        const piece *p = &rank->pieces[i];
        if (delta_device_of(d, base + p->to) != t->device)
            continue;
        if (!array_reserve(&t->landings, &t->landing_room, t->n_landings + 1,
                           sizeof *t->landings))
            return false;
        t->landings[t->n_landings++] =
            landing_of(plan, d->whole->sources[source].boxes, p, base);
    }
    if (t->n_landings > first)
        qsort(t->landings + first, t->n_landings - first, sizeof *t->landings,
              order_landings);
    return true;
}

/* Of one patch of the source, whose landings are [@p low, @p end). False: no memory. */
static bool add_patch_runs(tables *t, const delta *d, size_t source, uint32_t patch,
                           uint64_t low, uint64_t end)
{
    const delta_source *s = &d->sources[source];
    const uint64_t *first = s->first + patch * (s->segments + 1);
    const uint64_t *at = s->at + patch * s->segments;
    uint64_t high = low;
    for (uint64_t i = 0; i < s->segments; i++) {
        uint64_t start = i * PATCH_SEGMENT;
        while (high < end && t->landings[high].from < start + PATCH_SEGMENT)
            high++;
        while (low < high && t->landings[low].end <= start)
            low++;
        if (at[i] == DELTA_NONE || low == high)
            continue;
        if (!array_reserve(&t->runs, &t->run_room, t->n_runs + 1, sizeof *t->runs))
            return false;
        t->runs[t->n_runs++] = (patch_run){.changes = d->staging + at[i],
                                           .start = start,
                                           .count = (uint32_t)(first[i + 1] - first[i]),
                                           .first = (uint32_t)low,
                                           .n = (uint32_t)(high - low)};
    }
    return true;
}

/* Patch k of all sources: ends[k] is where its runs end; the oldest come first. @p landed: where
   each source's landings end. */
static bool add_runs(tables *t, const delta *d, const uint64_t *landed,
                     uint64_t ends[PATCHES_MOST])
{
    for (uint32_t k = PATCHES_MOST; k-- > 0; ends[k] = t->n_runs) {
        for (size_t i = 0; i < d->whole->n_sources; i++) {
            uint64_t first = i > 0 ? landed[i - 1] : 0;
            if (k < d->sources[i].chain &&
                !add_patch_runs(t, d, i, k, first, landed[i]))
                return false;
        }
    }
    return true;
}

static fanin_status upload_tables(const tables *t, device_memory *m, gpu_stream *stream,
                                  patch_apply_parameters *out, fanin_error *error)
{
    uint8_t *room;
    size_t landings = t->n_landings * sizeof *t->landings,
           runs = t->n_runs * sizeof *t->runs;
    fanin_status status =
        device_memory_tables(m, t->device, landings + runs, &room, error);
    if (status == FANIN_OK)
        status = gpu_copy(stream, room, t->landings, landings, error);
    if (status == FANIN_OK)
        status = gpu_copy(stream, room + landings, t->runs, runs, error);
    if (status == FANIN_OK)
        *out = (patch_apply_parameters){
            .landings = (const patch_landing *)room,
            .runs = (const patch_run *)(room + landings),
        };
    return status;
}

/* The oldest patch first. Does not wait. */
static fanin_status start_kernels(const tables *t, const uint64_t ends[PATCHES_MOST],
                                  device_memory *m, fanin_error *error)
{
    gpu_stream *stream;
    patch_apply_parameters job = {0};
    uint64_t done = 0;
    fanin_status status = device_memory_stream(m, t->device, &stream, error);
    if (status == FANIN_OK)
        status = upload_tables(t, m, stream, &job, error);
    for (uint32_t k = PATCHES_MOST; k-- > 0 && status == FANIN_OK; done = ends[k]) {
        job.count = ends[k] - done;
        status = gpu_patch_apply(stream, &job, error);
        job.runs += job.count;
    }
    return status;
}

static fanin_status apply_to_device(const delta *d, int device, const uint8_t *base,
                                    fanin_error *error)
{
    tables t = {.device = device};
    uint64_t ends[PATCHES_MOST];
    uint64_t *landed = calloc(d->whole->n_sources + 1, sizeof *landed);
    bool listed = landed != NULL;
    for (size_t i = 0; i < d->whole->n_sources && listed; i++) {
        listed = d->sources[i].chain == 0 || add_landings(&t, d, i, base);
        landed[i] = t.n_landings;
    }
    listed = listed && add_runs(&t, d, landed, ends);
    fanin_status status = FANIN_OK;
    if (!listed)
        status = error_set_memory(error);
    else if (t.n_runs > 0)
        status = start_kernels(&t, ends, d->client->devices->memory, error);
    free(landed);
    free(t.landings);
    free(t.runs);
    return status;
}

fanin_status delta_await_stream(const delta *d, const fanin_stream *after, deadline at,
                                fanin_error *error)
{
    fanin_error why = FANIN_ERROR_INIT;
    client_work work;
    gpu_stream *stream;
    if (d->devices.n == 0 || !after->handle)
        return FANIN_OK;
    client_work_start(&work, d->client, at);
    fanin_status status = device_memory_stream(d->client->devices->memory,
                                               d->devices.device[0], &stream, error);
    if (status == FANIN_OK)
        status = gpu_stream_after(stream, after, error);
    if (status != FANIN_OK)
        return status;
    do
        status = gpu_stream_wait(stream, deadline_sooner(at, deadline_in_ms(CANCEL_MS)),
                                 &why);
    while (status == FANIN_ERR_TIMEOUT && !client_work_over(&work));
    if (status == FANIN_ERR_TIMEOUT)
        return client_work_end(&work, devices_tell_busy(after, "apply", error), error);
    return status == FANIN_OK ? FANIN_OK : error_copy(error, &why);
}

fanin_status delta_apply_devices(const delta *d, const uint8_t *base,
                                 fanin_error *error)
{
    device_memory *m = d->client->devices->memory;
    fanin_status status = FANIN_OK;
    bool late = false;
    for (size_t i = 0; i < d->devices.n && status == FANIN_OK; i++)
        status = apply_to_device(d, d->devices.device[i], base, error);
    deadline at = deadline_in_ms(DEVICE_DRAIN_MS);
    for (size_t i = 0; i < d->devices.n; i++) {
        gpu_stream *stream;
        fanin_error *why = status == FANIN_OK ? error : NULL;
        fanin_status ended =
            device_memory_stream(m, d->devices.device[i], &stream, why);
        if (ended == FANIN_OK)
            ended = gpu_stream_wait(stream, at, why);
        late = late || ended == FANIN_ERR_TIMEOUT;
        status = status == FANIN_OK ? ended : status;
    }
    if (late)
        device_memory_leave(m);
    return late ? FANIN_ERR_TIMEOUT : status;
}
