/* SPDX-License-Identifier: Apache-2.0 */
#include "pull/described.h"

#include "error_set.h"
#include "versioned.h"
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ------------------------------------------------------------------ tensors */

const fanin_tensor *described_at(const described *d, size_t index)
{
    return (const fanin_tensor *)((const char *)d->tensors +
                                  index * d->tensors->struct_size);
}

/* Those of an older caller's end before this version's do. */
static bool widen_elements(described *d)
{
    if (d->tensors->struct_size >= sizeof(fanin_tensor))
        return true;
    d->own = calloc(d->count, sizeof *d->own);
    for (size_t i = 0; i < d->count && d->own; i++)
        versioned_element(&d->own[i], sizeof *d->own, d->tensors, i);
    d->tensors = d->own;
    return d->own != NULL;
}

bool described_box_is_empty(const fanin_tensor *t, const fanin_box *box)
{
    for (uint32_t d = 0; d < t->n_dims; d++) {
        if (box->extent[d] == 0)
            return true;
    }
    return false;
}

fanin_status described_refuse(const fanin_tensor *t, const char *remedy,
                              fanin_error *error, const char *format, ...)
{
    char what[256];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(what, sizeof what, format, arguments);
    va_end(arguments);
    error_place place = {.phase = "plan", .key = t->name, .remedy = remedy};
    return error_set(error, FANIN_ERR_ARGUMENT, &place, "%s", what);
}

static fanin_status check_described(const fanin_tensor *t, size_t index,
                                    fanin_error *error)
{
    if (!t->name || t->n_dims > FANIN_MAX_DIMS || !fanin_dtype_name(t->dtype) ||
        (t->n_boxes > 0 && !t->boxes))
        return described_refuse(
            t, NULL, error, "tensor %zu: name, dtype, dimensions or boxes are invalid",
            index);
    if (t->memory.kind < FANIN_MEMORY_DETECT || t->memory.kind > FANIN_MEMORY_CUDA)
        return described_refuse(t, NULL, error,
                                "tensor %zu: there is no memory of kind %d", index,
                                (int)t->memory.kind);
    return FANIN_OK;
}

fanin_status described_open(described *d, const fanin_tensor *tensors, size_t count,
                            fanin_error *error)
{
    fanin_status status = FANIN_OK;
    *d = (described){0};
    if (!tensors || count == 0 || tensors->struct_size < TENSOR_LEAST)
        return error_set(error, FANIN_ERR_ARGUMENT, NULL,
                         "no tensors were given, or their struct_size is not set");
    if (count >= UINT32_MAX)
        return error_set(error, FANIN_ERR_ARGUMENT, NULL,
                         "too many tensors are wanted");
    *d = (described){.tensors = tensors, .count = count};
    if (!widen_elements(d))
        return error_set_memory(error);
    for (size_t i = 0; i < count && status == FANIN_OK; i++)
        status = check_described(described_at(d, i), i, error);
    return status;
}

void described_close(described *d)
{
    free(d->own);
    *d = (described){0};
}

/* ------------------------------------------------------------ kinds of memory */

/* The device that a box is on, -1: host memory. */
static fanin_status find_box(gpu_finder *f, const fanin_tensor *t, const fanin_box *box,
                             int32_t *device_out, fanin_error *error)
{
    gpu_range here;
    fanin_error why = FANIN_ERROR_INIT;
    bool host = t->memory.kind == FANIN_MEMORY_HOST;
    *device_out = -1;
    fanin_status status = gpu_find(f, box->address, &here, &why);
    if (status != FANIN_OK && !host)
        return described_refuse(t, "pull into memory that is allocated", error,
                                "CUDA knows no allocation at a box's address: %.180s",
                                why.message);
    if (status != FANIN_OK)
        return FANIN_OK; /* the driver cannot contradict */
    char wrong[160];
    const char *remedy = gpu_contradiction(t->memory, &here, wrong);
    if (remedy)
        return described_refuse(t, remedy, error, "%s", wrong);
    if (!host && here.memory.kind == FANIN_MEMORY_CUDA)
        *device_out = here.memory.device;
    return FANIN_OK;
}

/* Where the tensor's boxes are: one kind of memory, one device, and what the caller says. */
static fanin_status find_device(gpu_finder *f, const fanin_tensor *t,
                                int32_t *device_out, fanin_error *error)
{
    bool first = true;
    *device_out = -1;
    if (!f->g && t->memory.kind == FANIN_MEMORY_CUDA)
        return described_refuse(
            t, "let the library find out: FANIN_MEMORY_DETECT", error,
            "the tensor says CUDA memory, and this process does not use CUDA");
    for (size_t i = 0; f->g && i < t->n_boxes; i++) {
        const fanin_box *box = &t->boxes[i];
        int32_t device;
        if (!box->address || described_box_is_empty(t, box))
            continue;
        fanin_status status = find_box(f, t, box, &device, error);
        if (status != FANIN_OK)
            return status;
        if (!first && device != *device_out)
            return described_refuse(
                t, "pull them as two tensors of one name, one a device", error,
                "boxes of the tensor are on CUDA devices %d and %d (-1: host "
                "memory)",
                (int)*device_out, (int)device);
        *device_out = device;
        first = false;
    }
    return FANIN_OK;
}

/* -------------------------------------------------------------------- layout */

/* A digest of many short fields: full blocks are digested, each with the digest of those
   before it. */
typedef struct summary {
    size_t used;
    uint8_t bytes[16384];
} summary;

/* The most that one tensor adds besides its name, or one box. */
#define RECORD_MAX (sizeof(uint64_t) * (4 + 3 * FANIN_MAX_DIMS))
/* Tensors by which memory is asked for in advance: names and boxes of a large adapter are in no
   cache when the next pull comes, and waiting for each of them takes longer than all the rest. */
#define AHEAD 8
#define CACHE_LINE 64

static void close_block(summary *s)
{
    digest full = digest_of(s->bytes, s->used);
    memcpy(s->bytes, &full, sizeof full);
    s->used = sizeof full;
}

static void put_name(summary *s, const char *name)
{
    size_t size = strlen(name) + 1;
    while (size > 0) {
        size_t room = sizeof s->bytes - s->used;
        size_t here = size < room ? size : room;
        memcpy(s->bytes + s->used, name, here);
        s->used += here;
        name += here;
        size -= here;
        if (s->used == sizeof s->bytes)
            close_block(s);
    }
}

/* Where the next record goes: room for RECORD_MAX bytes. */
static uint8_t *open_record(summary *s)
{
    if (sizeof s->bytes - s->used < RECORD_MAX)
        close_block(s);
    return s->bytes + s->used;
}

static void close_record(summary *s, const uint8_t *end)
{
    s->used = (size_t)(end - s->bytes);
}

static uint8_t *put_word(uint8_t *to, uint64_t word)
{
    memcpy(to, &word, sizeof word);
    return to + sizeof word;
}

/* A call of memcpy() for each array would cost more than the words. */
static uint8_t *put_words(uint8_t *to, const uint64_t *words, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++)
        to = put_word(to, words[i]);
    return to;
}

static void put_box(summary *s, gpu_finder *f, const fanin_tensor *t, int32_t device,
                    const fanin_box *box)
{
    gpu_range range;
    uint8_t *to = open_record(s);
    to = put_words(to, box->offset, t->n_dims);
    to = put_words(to, box->extent, t->n_dims);
    to = put_words(to, (const uint64_t *)box->stride, t->n_dims);
    to = put_word(to, (uint64_t)(uintptr_t)box->address);
    /* The ranges follow from the allocations too. */
    if (device >= 0 && !described_box_is_empty(t, box) &&
        gpu_find(f, box->address, &range, NULL) == FANIN_OK) {
        to = put_word(to, range.base);
        to = put_word(to, range.length);
        to = put_word(to, range.id);
    }
    close_record(s, to);
}

static void put_tensor(summary *s, const fanin_tensor *t, int32_t device)
{
    put_name(s, t->name);
    uint8_t *to = open_record(s);
    to = put_word(to, (uint64_t)(uint32_t)t->dtype << 32 | t->n_dims);
    to = put_word(to, (uint64_t)(int64_t)device);
    to = put_word(to, t->n_boxes);
    to = put_words(to, t->shape, t->n_dims);
    close_record(s, to);
}

static void prefetch(const fanin_tensor *t)
{
    const fanin_box *box = t->boxes;
    __builtin_prefetch(t->name);
    __builtin_prefetch((const void *)((uintptr_t)t->name + CACHE_LINE));
    if (t->n_boxes == 0)
        return;
    __builtin_prefetch(box->offset);
    __builtin_prefetch(box->extent);
    __builtin_prefetch(box->stride);
    __builtin_prefetch(&box->address);
}

static digest layout_of(const described *d, gpu_finder *f, const int32_t *device)
{
    summary s;
    s.used = 0;
    for (size_t i = 0; i < d->count; i++) {
        const fanin_tensor *t = described_at(d, i);
        if (d->count - i > AHEAD)
            prefetch(described_at(d, i + AHEAD));
        put_tensor(&s, t, device[i]);
        for (size_t j = 0; j < t->n_boxes; j++)
            put_box(&s, f, t, device[i], &t->boxes[j]);
    }
    return digest_of(s.bytes, s.used);
}

/* -------------------------------------------------------------------- whole */

static fanin_status keep_allocations(const gpu_finder *f, places *out,
                                     fanin_error *error)
{
    out->too_many =
        out->on_devices && (f->n_known == 0 || f->n_known == GPU_FINDER_KNOWN);
    if (f->n_known == 0 || out->too_many)
        return FANIN_OK;
    out->allocations = malloc(f->n_known * sizeof *out->allocations);
    if (!out->allocations)
        return error_set_memory(error);
    memcpy(out->allocations, f->known, f->n_known * sizeof *f->known);
    out->n_allocations = f->n_known;
    return FANIN_OK;
}

fanin_status places_find(const described *d, gpu_finder *f, places *out,
                         fanin_error *error)
{
    out->device = calloc(d->count, sizeof *out->device);
    if (!out->device)
        return error_set_memory(error);
    for (size_t i = 0; i < d->count; i++) {
        fanin_status status =
            find_device(f, described_at(d, i), &out->device[i], error);
        if (status != FANIN_OK)
            return status;
        out->on_devices = out->on_devices || out->device[i] >= 0;
    }
    out->layout = layout_of(d, f, out->device);
    return keep_allocations(f, out, error);
}

/* Whether the allocations that they were found in are still there, so that finding them again would
   find the same. */
static bool places_stand(const places *p, gpu *g)
{
    if (p->too_many || (p->n_allocations > 0 && !g))
        return false;
    for (size_t i = 0; i < p->n_allocations; i++) {
        const gpu_range *then = &p->allocations[i];
        gpu_range now;
        /* NOLINTNEXTLINE(performance-no-int-to-ptr) */
        const void *base = (const void *)(uintptr_t)then->base;
        if (gpu_range_of(g, base, &now, NULL) != FANIN_OK || now.id != then->id ||
            now.base != then->base || now.length != then->length)
            return false;
    }
    return true;
}

void places_clear(places *p)
{
    free(p->device);
    free(p->allocations);
    *p = (places){0};
}

/* ----------------------------------------------------------- described once */

struct fanin_destination {
    described all; /* its tensors: the three arrays below */
    fanin_tensor *tensors;
    fanin_box *boxes;
    char *names;
    delta_base *base;     /* what its memory holds */
    pthread_mutex_t lock; /* held for the members below */
    places *now;          /* those that were found last, one use of which is this */
};

delta_base *prepared_base(fanin_destination *d)
{
    return d->base;
}

void fanin_destination_touched(fanin_destination *destination)
{
    if (destination)
        (void)delta_base_drop(destination->base);
}

/* ------------------------------------------------------------------ copying */

static fanin_status allocate_descriptions(fanin_destination *d, const described *from,
                                          fanin_error *error)
{
    size_t boxes = 0, names = 0;
    for (size_t i = 0; i < from->count; i++) {
        const fanin_tensor *t = described_at(from, i);
        boxes += t->n_boxes;
        names += strlen(t->name) + 1;
    }
    d->tensors = calloc(from->count, sizeof *d->tensors);
    d->boxes = malloc((boxes + 1) * sizeof *d->boxes);
    d->names = malloc(names);
    if (!d->tensors || !d->boxes || !d->names)
        return error_set_memory(error);
    return FANIN_OK;
}

static void copy_descriptions(fanin_destination *d, const described *from)
{
    fanin_box *box = d->boxes;
    char *name = d->names;
    for (size_t i = 0; i < from->count; i++) {
        fanin_tensor *to = &d->tensors[i];
        const fanin_tensor *t = described_at(from, i);
        size_t length = strlen(t->name) + 1;
        *to = *t;
        to->struct_size = sizeof *to;
        to->name = memcpy(name, t->name, length);
        to->boxes = box;
        if (t->n_boxes > 0)
            memcpy(box, t->boxes, t->n_boxes * sizeof *box);
        name += length;
        box += t->n_boxes;
    }
    d->all = (described){.tensors = d->tensors, .count = from->count};
}

/* ------------------------------------------------------------------- places */

/* Lock held. */
static void release_places(places *p)
{
    if (!p || --p->users > 0)
        return;
    places_clear(p);
    free(p);
}

/* Lock held. */
static fanin_status find_places_again(fanin_destination *d, gpu_finder *f,
                                      fanin_error *error)
{
    places *found = calloc(1, sizeof *found);
    if (!found)
        return error_set_memory(error);
    found->users = 1;
    fanin_status status = places_find(&d->all, f, found, error);
    if (status != FANIN_OK) {
        release_places(found);
        return status;
    }
    release_places(d->now);
    d->now = found;
    return FANIN_OK;
}

fanin_status prepared_take(fanin_destination *d, gpu_finder *f, const described **all,
                           const places **where, fanin_error *error)
{
    fanin_status status = FANIN_OK;
    *where = NULL;
    pthread_mutex_lock(&d->lock);
    if (!places_stand(d->now, f->g))
        status = find_places_again(d, f, error);
    if (status == FANIN_OK) {
        d->now->users++;
        *where = d->now;
        *all = &d->all;
    }
    pthread_mutex_unlock(&d->lock);
    return status;
}

void prepared_give(fanin_destination *d, const places *where)
{
    pthread_mutex_lock(&d->lock);
    release_places((places *)where);
    pthread_mutex_unlock(&d->lock);
}

/* -------------------------------------------------------------------- whole */

static fanin_status create_described(const described *from, fanin_destination **out,
                                     fanin_error *error)
{
    gpu_finder finder = {.g = gpu_present()};
    fanin_destination *d = calloc(1, sizeof *d);
    if (!d)
        return error_set_memory(error);
    pthread_mutex_init(&d->lock, NULL);
    d->base = delta_base_create();
    fanin_status status =
        d->base ? allocate_descriptions(d, from, error) : error_set_memory(error);
    if (status == FANIN_OK) {
        copy_descriptions(d, from);
        status = find_places_again(d, &finder, error);
    }
    gpu_finder_free(&finder);
    if (status != FANIN_OK)
        fanin_destination_free(&d);
    *out = d;
    return status;
}

fanin_status fanin_destination_create(const fanin_tensor *tensors, size_t count,
                                      fanin_destination **destination_out,
                                      fanin_error *error)
{
    described from;
    if (!destination_out)
        return error_set(error, FANIN_ERR_ARGUMENT, NULL, "destination_out is NULL");
    *destination_out = NULL;
    fanin_status status = described_open(&from, tensors, count, error);
    if (status == FANIN_OK)
        status = create_described(&from, destination_out, error);
    described_close(&from);
    return status;
}

void fanin_destination_free(fanin_destination **destination)
{
    if (!destination || !*destination)
        return;
    fanin_destination *d = *destination;
    *destination = NULL;
    release_places(d->now);
    delta_base_release(d->base);
    pthread_mutex_destroy(&d->lock);
    free(d->tensors);
    free(d->boxes);
    free(d->names);
    free(d);
}
