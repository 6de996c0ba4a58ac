/* SPDX-License-Identifier: Apache-2.0 */
#include "bench/arena.h"
#include "trainer/device_driver.h"
#include "fetch/failure.h"
#include "fetch/half.h"
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
    if (a->half != 0 && half_converts(e->dtype, a->half)) {
        t->dtype = a->half;
    }
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
    fanin_status status = device_open(a->device, error);
    status = status != FANIN_OK ? status : device_stream(a->device, &a->stream, error);
    if (status == FANIN_OK) {
        status = device_alloc(a->device, a->size + 1, &memory, error);
    }
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

/* Tensors without a box go; the others get theirs. Boxes ascend by tensor. */
static void give_boxes(arena *a, const engine_layout *l, const uint64_t *begin)
{
    size_t kept = 0, next = 0;
    a->boxes = output_require(calloc(l->count + 1, sizeof a->boxes[0]));
    for (size_t i = 0; i < a->count; i++) {
        fanin_tensor t = a->tensors[i];
        t.boxes = &a->boxes[next];
        for (; next < l->count && l->boxes[next].tensor == i; next++) {
            const placed_box *b = &l->boxes[next];
            a->boxes[next] = b->box;
            a->boxes[next].address = a->memory + begin[b->parameter] + b->at;
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

/* Memory for parameters, and boxes in it. */
static fanin_status bench_arena_lay_out(arena *a, const engine_layout *l,
                                        fanin_error *error)
{
    uint64_t *begin = output_require(calloc(l->n_parameters + 1, sizeof begin[0]));
    for (size_t i = 0; i < l->n_parameters; i++) {
        begin[i] = a->size;
        a->size += aligned(l->parameters[i].bytes);
    }
    fanin_status status = make_memory(a, error);
    if (status == FANIN_OK) {
        give_boxes(a, l, begin);
    }
    free(begin);
    return status;
}

/* As @p mapping says; NULL: every tensor whole, in a parameter of its own. */
static fanin_status bench_arena_layout_of(const arena *a, const char *mapping,
                                          engine_layout *out, fanin_error *error)
{
    mapping_file m;
    if (mapping == NULL) {
        for (size_t i = 0; i < a->count; i++) {
            engine_layout_add_whole(out, a->tensors, i);
        }
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
    if (status != FANIN_OK) {
        return status;
    }
    status = bench_arena_layout_of(out, mapping, &l, error);
    if (status == FANIN_OK) {
        status = bench_arena_lay_out(out, &l, error);
        engine_layout_free(&l);
    }
    return status == FANIN_OK
               ? fanin_destination_create(out->tensors, out->count, &out->into, error)
               : status;
}

void arena_free(arena *a)
{
    fanin_destination_free(&a->into);
    free_names(a, 0);
    if (a->device != DEVICE_HOST) {
        if (a->copy != NULL) {
            munmap(a->copy, a->size + 1);
        }
        device_free(a->device, a->memory);
        device_stream_free(a->device, a->stream);
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
        if (a->copy == NULL) {
            return bench_arena_no_memory(a, error);
        }
    }
    if (out) {
        memset(a->copy, SPOILED, a->size);
    }
    fanin_status status = device_copy(a->device, a->stream, out ? a->memory : a->copy,
                                      out ? a->copy : a->memory, a->size, error);
    return status == FANIN_OK ? device_wait(a->device, a->stream, error) : status;
}

fanin_status arena_read(arena *a, const uint8_t **out, fanin_error *error)
{
    *out = a->memory;
    if (a->device == DEVICE_HOST) {
        return FANIN_OK;
    }
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
