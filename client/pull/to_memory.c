/* SPDX-License-Identifier: Apache-2.0 */
/* Pulling into memory of the caller. */
#include "convert.h"
#include "dtype.h"
#include "error_set.h"
#include "gpu_finder.h"
#include "pull/pull_session.h"
#include "versioned.h"
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define PAGE ((uintptr_t)4096)

typedef struct memory_destination {
    const fanin_tensor *tensors;
    fanin_tensor *own; /* a copy of them, NULL: none is needed */
    size_t count;
    fanin_dtype dtype; /* what F32 arrives as, unless F32 is wanted; 0: F32 */
    plan_target *targets;
    size_t n_targets;
    memory_range *ranges;
    size_t n_ranges;
    gpu_finder finder; /* without a driver: nothing in this process is device memory */
    int32_t *device;   /* of each tensor, -1: host memory */
} memory_destination;

/* The caller's array may have larger elements than this version knows. */
static const fanin_tensor *tensor_at(const memory_destination *m, size_t index)
{
    return (const fanin_tensor *)((const char *)m->tensors +
                                  index * m->tensors->struct_size);
}

/* Those of an older caller's end before this version's do. */
static bool widen(memory_destination *m)
{
    if (m->tensors->struct_size >= sizeof(fanin_tensor))
        return true;
    m->own = calloc(m->count, sizeof *m->own);
    for (size_t i = 0; i < m->count && m->own; i++)
        versioned_element(&m->own[i], sizeof *m->own, m->tensors, i);
    m->tensors = m->own;
    return m->own != NULL;
}

static bool box_is_empty(const fanin_tensor *t, const fanin_box *box)
{
    for (uint32_t d = 0; d < t->n_dims; d++) {
        if (box->extent[d] == 0)
            return true;
    }
    return false;
}

/* ------------------------------------------------------------ kinds of memory */

static fanin_status refuse(const fanin_tensor *t, const char *remedy,
                           fanin_error *error, const char *format, ...)
    __attribute__((format(printf, 4, 5)));

static fanin_status refuse(const fanin_tensor *t, const char *remedy,
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

/* The device that a box is on, -1: host memory. */
static fanin_status find_box(memory_destination *m, const fanin_tensor *t,
                             const fanin_box *box, int32_t *device_out,
                             fanin_error *error)
{
    gpu_range here;
    fanin_error why = FANIN_ERROR_INIT;
    bool host = t->memory.kind == FANIN_MEMORY_HOST;
    *device_out = -1;
    fanin_status status = gpu_find(&m->finder, box->address, &here, &why);
    if (status != FANIN_OK && !host)
        return refuse(t, "pull into memory that is allocated", error,
                      "CUDA knows no allocation at a box's address: %.180s",
                      why.message);
    if (status != FANIN_OK)
        return FANIN_OK; /* the driver cannot contradict */
    char wrong[160];
    const char *remedy = gpu_contradiction(t->memory, &here, wrong);
    if (remedy)
        return refuse(t, remedy, error, "%s", wrong);
    if (!host && here.memory.kind == FANIN_MEMORY_CUDA)
        *device_out = here.memory.device;
    return FANIN_OK;
}

/* Where the tensor's boxes are: one kind of memory, one device, and what the caller says. */
static fanin_status find_device(memory_destination *m, const fanin_tensor *t,
                                int32_t *device_out, fanin_error *error)
{
    bool first = true;
    *device_out = -1;
    if (!m->finder.g && t->memory.kind == FANIN_MEMORY_CUDA)
        return refuse(
            t, "let the library find out: FANIN_MEMORY_DETECT", error,
            "the tensor says CUDA memory, and this process does not use CUDA");
    for (size_t i = 0; m->finder.g && i < t->n_boxes; i++) {
        const fanin_box *box = &t->boxes[i];
        int32_t device;
        if (!box->address || box_is_empty(t, box))
            continue;
        fanin_status status = find_box(m, t, box, &device, error);
        if (status != FANIN_OK)
            return status;
        if (!first && device != *device_out)
            return refuse(t, "pull them as two tensors of one name, one a device",
                          error,
                          "boxes of the tensor are on CUDA devices %d and %d (-1: host "
                          "memory)",
                          (int)*device_out, (int)device);
        *device_out = device;
        first = false;
    }
    return FANIN_OK;
}

static fanin_status find_devices(memory_destination *m, fanin_error *error)
{
    m->finder.g = gpu_present();
    m->device = malloc(m->count * sizeof *m->device);
    if (!m->device)
        return error_set_memory(error);
    for (size_t i = 0; i < m->count; i++) {
        fanin_status status = find_device(m, tensor_at(m, i), &m->device[i], error);
        if (status != FANIN_OK)
            return status;
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

static void put_box(summary *s, memory_destination *m, const fanin_tensor *t,
                    int32_t device, const fanin_box *box)
{
    gpu_range range;
    uint8_t *to = open_record(s);
    to = put_words(to, box->offset, t->n_dims);
    to = put_words(to, box->extent, t->n_dims);
    to = put_words(to, (const uint64_t *)box->stride, t->n_dims);
    to = put_word(to, (uint64_t)(uintptr_t)box->address);
    /* The ranges follow from the allocations too. */
    if (device >= 0 && !box_is_empty(t, box) &&
        gpu_find(&m->finder, box->address, &range, NULL) == FANIN_OK) {
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

static digest layout(void *cookie)
{
    memory_destination *m = cookie;
    summary s;
    s.used = 0;
    for (size_t i = 0; i < m->count; i++) {
        const fanin_tensor *t = tensor_at(m, i);
        if (m->count - i > AHEAD)
            prefetch(tensor_at(m, i + AHEAD));
        put_tensor(&s, t, m->device[i]);
        for (size_t j = 0; j < t->n_boxes; j++)
            put_box(&s, m, t, m->device[i], &t->boxes[j]);
    }
    return digest_of(s.bytes, s.used);
}

/* ------------------------------------------------------------------ targets */

/* What has no such key is told when the plan is made. */
static void mark(void *cookie, const key_table *keys, bool *marks)
{
    const memory_destination *m = cookie;
    for (size_t i = 0; i < m->count; i++) {
        int64_t key = key_table_find(keys, tensor_at(m, i)->name);
        if (key >= 0)
            marks[key] = true;
    }
}

static fanin_status check_tensor(const fanin_tensor *t, size_t index,
                                 fanin_error *error)
{
    if (!t->name || t->n_dims > FANIN_MAX_DIMS || !fanin_dtype_name(t->dtype) ||
        (t->n_boxes > 0 && !t->boxes))
        return refuse(t, NULL, error,
                      "tensor %zu: name, dtype, dimensions or boxes are invalid",
                      index);
    if (t->memory.kind < FANIN_MEMORY_DETECT || t->memory.kind > FANIN_MEMORY_CUDA)
        return refuse(t, NULL, error, "tensor %zu: there is no memory of kind %d",
                      index, (int)t->memory.kind);
    return FANIN_OK;
}

static fanin_status match(const memory_destination *m, const fanin_tensor *t,
                          const key_table *keys, uint32_t *key_out, fanin_error *error)
{
    int64_t key = key_table_find(keys, t->name);
    error_place place = {.phase = "plan", .key = t->name};
    if (key < 0) {
        place.remedy = "`nixl-fetch list` shows the names";
        return error_set(error, FANIN_ERR_NOT_FOUND, &place,
                         "no tensor of that name is published");
    }
    const key_entry *e = &keys->entries[key];
    place.remedy = "describe the tensor as the trainer published it";
    bool converts =
        m->dtype != 0 && e->dtype == FANIN_DTYPE_F32 && t->dtype != e->dtype;
    fanin_dtype arrives = converts ? m->dtype : e->dtype;
    if (arrives != t->dtype)
        return error_set(error, FANIN_ERR_MISMATCH, &place,
                         "the tensor %s %s, not as %s",
                         converts ? "arrives as" : "is published as",
                         fanin_dtype_name(arrives), fanin_dtype_name(t->dtype));
    if (e->n_dims != t->n_dims ||
        memcmp(e->shape, t->shape, t->n_dims * sizeof *t->shape) != 0)
        return error_set(error, FANIN_ERR_MISMATCH, &place,
                         "the tensor is published with another global shape");
    *key_out = (uint32_t)key;
    return FANIN_OK;
}

static fanin_status add_targets(memory_destination *m, size_t index, uint32_t key,
                                fanin_error *error)
{
    const fanin_tensor *t = tensor_at(m, index);
    for (size_t i = 0; i < t->n_boxes; i++) {
        const fanin_box *box = &t->boxes[i];
        plan_target *target = &m->targets[m->n_targets];
        *target = (plan_target){.key = key,
                                .to = (uint64_t)(uintptr_t)box->address,
                                .as_is = t->dtype == FANIN_DTYPE_F32,
                                .group = (uint32_t)index};
        target->block.n_dims = t->n_dims;
        memcpy(target->block.offset, box->offset, t->n_dims * sizeof *box->offset);
        memcpy(target->block.extent, box->extent, t->n_dims * sizeof *box->extent);
        memcpy(target->stride, box->stride, t->n_dims * sizeof *box->stride);
        if (block_is_empty(&target->block))
            continue;
        if (!box->address)
            return refuse(t, NULL, error, "box %zu is not empty and has no address", i);
        m->n_targets++;
    }
    return FANIN_OK;
}

static fanin_status prepare(void *cookie, const key_table *keys,
                            const plan_target **targets, size_t *n_targets,
                            const uint64_t **to_of_key, fanin_error *error)
{
    memory_destination *m = cookie;
    size_t boxes = 0;
    for (size_t i = 0; i < m->count; i++)
        boxes += tensor_at(m, i)->n_boxes;
    free(m->targets);
    m->n_targets = 0;
    m->targets = calloc(boxes + 1, sizeof *m->targets);
    if (!m->targets)
        return error_set_memory(error);
    for (size_t i = 0; i < m->count; i++) {
        uint32_t key = 0;
        fanin_status status = match(m, tensor_at(m, i), keys, &key, error);
        if (status == FANIN_OK)
            status = add_targets(m, i, key, error);
        if (status != FANIN_OK)
            return status;
    }
    if (m->n_targets == 0) {
        /* An empty plan would mean "everything". */
        return error_set(error, FANIN_ERR_ARGUMENT, NULL, "all boxes are empty");
    }
    *targets = m->targets;
    *n_targets = m->n_targets;
    *to_of_key = NULL;
    return FANIN_OK;
}

static fanin_status agreed(void *cookie, const key_table *keys,
                           const adapter_identity *identity, uint8_t **base_out,
                           bool *skip_out, fanin_error *error)
{
    (void)cookie;
    (void)keys;
    (void)identity;
    (void)error;
    *base_out = NULL; /* targets hold addresses */
    *skip_out = false;
    return FANIN_OK;
}

/* ------------------------------------------------------------------- ranges */

/* A box's bytes, and what holds them. */
typedef struct stretch {
    memory_range range;
    gpu_range in;
} stretch;

static memory_range range_of(const fanin_tensor *t, const fanin_box *box)
{
    dtype_unit unit = dtype_get_unit(t->dtype);
    uint64_t bytes = 0;
    bool packed = true;
    for (uint32_t d = 0; d < t->n_dims; d++)
        packed = packed && box->stride[d] == 0;
    if (packed) {
        (void)dtype_bytes(t->dtype, t->n_dims, box->extent, &bytes);
        return (memory_range){box->address, bytes, -1};
    }
    int64_t low = 0, high = (int64_t)unit.bytes;
    for (uint32_t d = 0; d < t->n_dims; d++) {
        uint64_t steps = box->extent[d] / (d + 1 == t->n_dims ? unit.elements : 1) - 1;
        int64_t reach = (int64_t)steps * box->stride[d];
        low += reach < 0 ? reach : 0;
        high += reach > 0 ? reach : 0;
    }
    return (memory_range){(uint8_t *)box->address + low, (size_t)(high - low), -1};
}

static fanin_status stretch_of(memory_destination *m, size_t index,
                               const fanin_box *box, stretch *out, fanin_error *error)
{
    const fanin_tensor *t = tensor_at(m, index);
    *out = (stretch){.range = range_of(t, box), .in.memory = {FANIN_MEMORY_HOST, -1}};
    out->range.device = m->device[index];
    if (out->range.device < 0)
        return FANIN_OK;
    fanin_status status = gpu_find(&m->finder, box->address, &out->in, error);
    uint64_t low = (uintptr_t)out->range.base;
    if (status != FANIN_OK ||
        gpu_find_holds(&m->finder, &out->in, low, low + out->range.length))
        return status;
    return refuse(t, "check the box's address, extent and strides", error,
                  "a box reaches beyond its allocation of %" PRIu64
                  " bytes on CUDA device %d",
                  out->in.length, (int)out->in.memory.device);
}

static int by_base(const void *a, const void *b)
{
    const stretch *x = a, *y = b;
    return x->range.base < y->range.base ? -1 : x->range.base > y->range.base;
}

static size_t merge(stretch *all, size_t n)
{
    size_t last = 0;
    qsort(all, n, sizeof *all, by_base);
    for (size_t i = 1; i < n; i++) {
        stretch *a = &all[last];
        const stretch *b = &all[i];
        const uint8_t *end = b->range.base + b->range.length;
        const uint8_t *before = a->range.base + a->range.length;
        if (!gpu_range_continues(&a->in, (uintptr_t)before, &b->in,
                                 (uintptr_t)b->range.base, PAGE))
            all[++last] = *b;
        else if (end > before)
            a->range.length = (size_t)(end - a->range.base);
    }
    return n ? last + 1 : 0;
}

static fanin_status collect(memory_destination *m, stretch *all, size_t *n_out,
                            fanin_error *error)
{
    size_t n = 0;
    for (size_t i = 0; i < m->count; i++) {
        const fanin_tensor *t = tensor_at(m, i);
        for (size_t j = 0; j < t->n_boxes; j++) {
            if (box_is_empty(t, &t->boxes[j]))
                continue;
            fanin_status status = stretch_of(m, i, &t->boxes[j], &all[n++], error);
            if (status != FANIN_OK)
                return status;
        }
    }
    *n_out = merge(all, n);
    return FANIN_OK;
}

static fanin_status ranges(void *cookie, const memory_range **out, size_t *n,
                           fanin_error *error)
{
    memory_destination *m = cookie;
    fanin_status status = FANIN_OK;
    if (!m->ranges) {
        size_t boxes = 0;
        for (size_t i = 0; i < m->count; i++)
            boxes += tensor_at(m, i)->n_boxes;
        stretch *all = calloc(boxes + 1, sizeof *all);
        m->ranges = calloc(boxes + 1, sizeof *m->ranges);
        status = all && m->ranges ? collect(m, all, &m->n_ranges, error)
                                  : error_set_memory(error);
        for (size_t i = 0; i < m->n_ranges && status == FANIN_OK; i++)
            m->ranges[i] = all[i].range;
        free(all);
    }
    *out = m->ranges;
    *n = m->n_ranges;
    return status;
}

/* -------------------------------------------------------------------- whole */

static void close_memory(memory_destination *m)
{
    free(m->own);
    free(m->targets);
    free(m->device);
    gpu_finder_free(&m->finder);
    free(m->ranges);
}

/* @p options: checked. What it leaves in @p m is closed in any case. */
static fanin_status open_memory(memory_destination *m,
                                const fanin_pull_options *options,
                                const fanin_tensor *tensors, size_t count,
                                destination *d, fanin_error *error)
{
    fanin_status status = FANIN_OK;
    if (!tensors || count == 0 || tensors->struct_size < TENSOR_LEAST)
        return error_set(error, FANIN_ERR_ARGUMENT, NULL,
                         "no tensors were given, or their struct_size is not set");
    *m = (memory_destination){
        .tensors = tensors, .count = count, .dtype = options->dtype};
    if (count >= UINT32_MAX)
        return error_set(error, FANIN_ERR_ARGUMENT, NULL,
                         "too many tensors are wanted");
    if (!widen(m))
        return error_set_memory(error);
    for (size_t i = 0; i < count && status == FANIN_OK; i++)
        status = check_tensor(tensor_at(m, i), i, error);
    *d = (destination){.cookie = m,
                       .plan_slot = 0,
                       .wants = {.cookie = m, .name = layout, .mark = mark},
                       .layout = layout,
                       .prepare = prepare,
                       .agreed = agreed,
                       .ranges = ranges,
                       .lasting_ranges = true,
                       .dtype = options->dtype};
    return status == FANIN_OK ? find_devices(m, error) : status;
}

fanin_status fanin_client_pull(fanin_client *client, const fanin_pull_options *options,
                               const fanin_tensor *tensors, size_t count,
                               fanin_result **result_out, fanin_error *error)
{
    fanin_pull_options checked;
    memory_destination m = {0};
    destination d;
    fanin_status status = pull_check(client, options, &checked, error);
    if (status != FANIN_OK)
        return status;
    status = open_memory(&m, &checked, tensors, count, &d, error);
    if (status == FANIN_OK)
        status = pull_run(client, &checked, &d, result_out, error);
    close_memory(&m);
    return status;
}

fanin_status fanin_client_begin(fanin_client *client, const fanin_pull_options *options,
                                const fanin_tensor *all, size_t count,
                                fanin_session **session_out, fanin_error *error)
{
    fanin_pull_options checked;
    memory_destination m = {0};
    destination d;
    fanin_status status = pull_check(client, options, &checked, error);
    if (status != FANIN_OK)
        return status;
    if (!session_out)
        return error_set(error, FANIN_ERR_ARGUMENT, NULL, "session_out is NULL");
    status = open_memory(&m, &checked, all, count, &d, error);
    if (status == FANIN_OK)
        status = pull_session_open(client, &checked, &d, count, session_out, error);
    close_memory(&m);
    return status;
}
