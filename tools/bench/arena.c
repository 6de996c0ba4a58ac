/* SPDX-License-Identifier: Apache-2.0 */
#include "bench/arena.h"
#include "fetch/failure.h"
#include "fetch/pattern.h"
#include "fetch/output.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

enum {
    ALIGNMENT = 512, /* as allocators of devices place tensors */
    SPOILED = 0xa5,
};

static uint64_t aligned(uint64_t bytes)
{
    return (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
}

void *arena_map(uint64_t size)
{
    void *memory = mmap(NULL, size > 0 ? size : 1, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
    return memory == MAP_FAILED ? NULL : memory;
}

static bool bench_arena_on_entry(void *cookie, const fanin_entry *e)
{
    arena *a = cookie;
    a->tensors = output_room(a->tensors, a->count, &a->capacity, sizeof a->tensors[0]);
    fanin_tensor *t = &a->tensors[a->count++];
    *t = (fanin_tensor){.struct_size = sizeof *t,
                        .name = output_require(strdup(e->name)),
                        .dtype = e->dtype,
                        .n_dims = e->n_dims,
                        .memory = {FANIN_MEMORY_DETECT, -1}};
    memcpy(t->shape, e->shape, sizeof t->shape);
    if (a->half != 0 && half_converts(e->dtype, a->half))
        t->dtype = a->half;
    return true;
}

static fanin_status bench_arena_no_memory(const arena *a, fanin_error *error)
{
    return failure_set(error, FANIN_ERR_MEMORY, "free memory",
                       "no memory for %s of tensors", output_bytes(a->bytes).s);
}

static fanin_status make_memory(arena *a, fanin_error *error)
{
    if (a->device == DEVICE_HOST) {
        a->memory = arena_map(a->size);
        return a->memory != NULL ? FANIN_OK : bench_arena_no_memory(a, error);
    }
    void *memory = NULL;
    fanin_status status = device_load(&a->gpu, error);
    if (status == FANIN_OK)
        status = gpu_stream_create(a->gpu, a->device, &a->stream, error);
    if (status == FANIN_OK)
        status = gpu_alloc(a->gpu, a->device, a->size + 1, &memory, error);
    a->memory = memory;
    return status;
}

/* Gives the names of tensors [first, a->count) back. */
static void free_names(const arena *a, size_t first)
{
    for (size_t i = first; i < a->count; i++) {
        union {
            const char *name;
            char *owned;
        } pointer = {a->tensors[i].name};
        free(pointer.owned);
    }
}

static placed_box *add_box(engine_layout *l)
{
    l->boxes = output_room(l->boxes, l->count, &l->capacity, sizeof l->boxes[0]);
    l->boxes[l->count] = (placed_box){.tensor = 0};
    return &l->boxes[l->count++];
}

/* Of so many of the tensor's elements, packed. */
static uint64_t engine_tensor_bytes(const fanin_tensor *t, const uint64_t *extent)
{
    uint64_t bits = fanin_dtype_bits(t->dtype);
    for (uint32_t d = 0; d < t->n_dims; d++)
        bits *= extent[d];
    return bits / 8;
}

/* Every tensor whole, in a parameter of its own; nothing of an empty one. */
static void lay_out_whole(engine_layout *l, const fanin_tensor *tensors, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        uint64_t bytes = engine_tensor_bytes(&tensors[i], tensors[i].shape);
        if (bytes > 0) {
            placed_box *b = add_box(l);
            b->tensor = i;
            b->at = l->size;
            memcpy(b->box.extent, tensors[i].shape, sizeof b->box.extent);
            l->size += aligned(bytes);
        }
    }
}

/* Tensors without a box go; the others get theirs. Boxes ascend by tensor. */
static void give_boxes(arena *a, const engine_layout *l)
{
    size_t kept = 0, next = 0;
    a->boxes = output_require(calloc(l->count + 1, sizeof a->boxes[0]));
    for (size_t i = 0; i < a->count; i++) {
        fanin_tensor t = a->tensors[i];
        t.boxes = &a->boxes[next];
        for (; next < l->count && l->boxes[next].tensor == i; next++) {
            const placed_box *b = &l->boxes[next];
            a->boxes[next] = b->box;
            a->boxes[next].address = a->memory + b->at;
            a->bytes += engine_tensor_bytes(&t, b->box.extent);
            t.n_boxes++;
        }
        if (t.n_boxes > 0) {
            a->tensors[i] = a->tensors[kept]; /* names stay owned, each once */
            a->tensors[kept++] = t;
        }
    }
    free_names(a, kept);
    a->count = kept;
}

/* As @p mapping says; NULL: every tensor whole. */
static fanin_status lay_out(const arena *a, const char *mapping, engine_layout *out,
                            fanin_error *error)
{
    mapping_file m;
    if (mapping == NULL) {
        lay_out_whole(out, a->tensors, a->count);
        return FANIN_OK;
    }
    fanin_status status = mapping_read(mapping, &m, error);
    if (status == FANIN_OK) {
        status = engine_layout_of_mapping(a->tensors, a->count, &m, out, error);
        mapping_free(&m);
    }
    return status;
}

fanin_status arena_make(fanin_client *client, const char *publication,
                        uint32_t timeout_ms, int device, fanin_dtype half,
                        const char *mapping, arena *out, fanin_error *error)
{
    engine_layout l = {.boxes = NULL};
    *out = (arena){.device = device, .half = half};
    fanin_status status = fanin_client_catalog(client, publication, NULL, timeout_ms,
                                               bench_arena_on_entry, out, error);
    if (status == FANIN_OK)
        status = lay_out(out, mapping, &l, error);
    out->size = l.size;
    if (status == FANIN_OK)
        status = make_memory(out, error);
    if (status == FANIN_OK) {
        give_boxes(out, &l);
        status = fanin_destination_create(out->tensors, out->count, &out->into, error);
    }
    engine_layout_free(&l);
    return status;
}

void arena_free(arena *a)
{
    fanin_destination_free(&a->into);
    free_names(a, 0);
    if (a->device != DEVICE_HOST) {
        if (a->copy != NULL)
            munmap(a->copy, a->size + 1);
        gpu_free(a->gpu, a->device, a->memory);
        gpu_stream_destroy(&a->stream);
    } else if (a->memory != NULL) {
        munmap(a->memory, a->size > 0 ? a->size : 1);
    }
    free(a->tensors);
    free(a->boxes);
    *a = (arena){.device = DEVICE_HOST};
}

/* Copies between a device's memory and the host's copy of it. */
static fanin_status transfer(arena *a, bool out, fanin_error *error)
{
    if (a->copy == NULL) {
        a->copy = arena_map(a->size + 1);
        if (a->copy == NULL)
            return bench_arena_no_memory(a, error);
    }
    if (out)
        memset(a->copy, SPOILED, a->size);
    fanin_status status = gpu_copy(a->stream, out ? a->memory : a->copy,
                                   out ? a->copy : a->memory, a->size, error);
    return status == FANIN_OK ? gpu_stream_wait(a->stream, UINT64_MAX, error) : status;
}

fanin_status arena_read(arena *a, const uint8_t **out, fanin_error *error)
{
    *out = a->memory;
    if (a->device == DEVICE_HOST)
        return FANIN_OK;
    fanin_status status = transfer(a, false, error);
    *out = a->copy;
    return status;
}

fanin_status arena_spoil(arena *a, fanin_error *error)
{
    if (a->device == DEVICE_HOST) {
        memset(a->memory, SPOILED, a->size);
        return FANIN_OK;
    }
    return transfer(a, true, error);
}

void engine_layout_free(engine_layout *l)
{
    free(l->boxes);
    *l = (engine_layout){.boxes = NULL};
}

/* ------------------------------------------------------------------ a mapping */

static int engine_layout_by_name(const void *a, const void *b)
{
    const fanin_tensor *const *x = a;
    const fanin_tensor *const *y = b;
    return strcmp((*x)->name, (*y)->name);
}

/* NULL after an error. */
static const fanin_tensor *find_tensor(const fanin_tensor **sorted, size_t count,
                                       const mapping_source *s, fanin_error *error)
{
    const fanin_tensor key = {.name = s->name};
    const fanin_tensor *wanted = &key;
    const fanin_tensor **found =
        count > 0
            ? bsearch(&wanted, sorted, count, sizeof sorted[0], engine_layout_by_name)
            : NULL;
    if (found == NULL || (*found)->n_dims != s->n_dims ||
        memcmp((*found)->shape, s->shape, s->n_dims * sizeof s->shape[0]) != 0) {
        failure_set(error, FANIN_ERR_MISMATCH,
                    "record the mapping for what is published",
                    "%s of the mapping is %s", s->name,
                    found == NULL ? "not published" : "published with another shape");
        return NULL;
    }
    return *found;
}

/* Packed ones lie as bytes. */
static uint32_t element_bits(fanin_dtype dtype)
{
    uint32_t bits = fanin_dtype_bits(dtype);
    return bits < 8 ? 8 : bits;
}

/* Bytes where elements have @p to bits that are @p bytes where they have @p from. */
static uint64_t narrowed(uint64_t bytes, uint32_t from, uint32_t to)
{
    return bytes / (from / 8) *
           (to / 8); /* whole elements, as the mapping was checked */
}

/* @p begin: of the parameter. */
static void place_source(engine_layout *l, uint64_t begin, size_t tensor, uint32_t from,
                         uint32_t to, const mapping_source *s)
{
    for (size_t i = 0; i < s->n_boxes; i++) {
        const mapping_box *b = &s->boxes[i];
        placed_box *out = add_box(l);
        out->tensor = tensor;
        out->at = begin + narrowed(b->at, from, to);
        memcpy(out->box.offset, b->offset, sizeof b->offset);
        memcpy(out->box.extent, b->extent, sizeof b->extent);
        for (uint32_t d = 0; d < s->n_dims; d++)
            out->box.stride[d] = (int64_t)narrowed((uint64_t)b->stride[d], from, to);
    }
}

static int by_tensor(const void *a, const void *b)
{
    const placed_box *x = a;
    const placed_box *y = b;
    if (x->tensor != y->tensor)
        return x->tensor < y->tensor ? -1 : 1;
    return (x->at > y->at) - (x->at < y->at);
}

/* Behind those that were placed. */
static fanin_status place_parameter(engine_layout *l, const fanin_tensor *tensors,
                                    const fanin_tensor **sorted, size_t count,
                                    const mapping_tensor *p, fanin_error *error)
{
    const uint64_t begin = l->size;
    for (size_t i = 0; i < p->n_sources; i++) {
        const fanin_tensor *t = find_tensor(sorted, count, &p->sources[i], error);
        if (t == NULL)
            return error->status;
        uint32_t from = element_bits(p->dtype), to = element_bits(t->dtype);
        uint64_t end = begin + aligned(narrowed(p->span, from, to));
        l->size = end > l->size ? end : l->size;
        place_source(l, begin, (size_t)(t - tensors), from, to, &p->sources[i]);
    }
    return FANIN_OK;
}

static fanin_status place_module(engine_layout *l, const fanin_tensor *tensors,
                                 const fanin_tensor **sorted, size_t count,
                                 const mapping_module *m, fanin_error *error)
{
    fanin_status status = FANIN_OK;
    if (m->fallback != NULL)
        return failure_set(error, FANIN_ERR_MISMATCH, "give a mapping of boxes alone",
                           "module '%s' needs the engine's loader: %s", m->path,
                           m->fallback);
    for (size_t i = 0; status == FANIN_OK && i < m->n_tensors; i++)
        status = place_parameter(l, tensors, sorted, count, &m->tensors[i], error);
    return status;
}

fanin_status engine_layout_of_mapping(const fanin_tensor *tensors, size_t count,
                                      const mapping_file *m, engine_layout *out,
                                      fanin_error *error)
{
    fanin_status status = FANIN_OK;
    *out = (engine_layout){.boxes = NULL};
    const fanin_tensor **sorted = output_require(calloc(count + 1, sizeof sorted[0]));
    for (size_t i = 0; i < count; i++)
        sorted[i] = &tensors[i];
    qsort(sorted, count, sizeof sorted[0], engine_layout_by_name);
    for (size_t i = 0; status == FANIN_OK && i < m->n_modules; i++)
        status = place_module(out, tensors, sorted, count, &m->modules[i], error);
    free(sorted);
    if (status != FANIN_OK)
        engine_layout_free(out);
    else if (out->count > 0)
        qsort(out->boxes, out->count, sizeof out->boxes[0], by_tensor);
    return status;
}
