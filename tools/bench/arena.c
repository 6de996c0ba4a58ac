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

static bool on_entry(void *cookie, const fanin_entry *e)
{
    arena *a = cookie;
    a->tensors = output_room(a->tensors, a->count, &a->capacity, sizeof a->tensors[0]);
    fanin_tensor *t = &a->tensors[a->count++];
    *t = (fanin_tensor){.struct_size = sizeof *t,
                        .name = output_require(strdup(e->name)),
                        .dtype = e->dtype,
                        .n_dims = e->n_dims,
                        .n_boxes = e->bytes > 0,
                        .memory = {FANIN_MEMORY_DETECT, -1}};
    memcpy(t->shape, e->shape, sizeof t->shape);
    if (a->half != 0 && half_converts(e->dtype, a->half)) {
        t->dtype = a->half;
    }
    uint64_t bytes = arena_bytes(a, a->count - 1);
    a->bytes += bytes;
    a->size += aligned(bytes);
    return true;
}

uint64_t arena_bytes(const arena *a, size_t i)
{
    const fanin_tensor *t = &a->tensors[i];
    uint64_t bits = fanin_dtype_bits(t->dtype);
    for (uint32_t d = 0; d < t->n_dims; d++) {
        bits *= t->shape[d];
    }
    return bits / 8;
}

static fanin_status no_memory(const arena *a, fanin_error *error)
{
    return failure_set(error, FANIN_ERR_MEMORY, "free memory",
                       "no memory for %s of tensors", output_bytes(a->bytes).s);
}

static fanin_status make_memory(arena *a, fanin_error *error)
{
    if (a->device == DEVICE_HOST) {
        a->memory = arena_map(a->size);
        return a->memory != NULL ? FANIN_OK : no_memory(a, error);
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

fanin_status arena_make(fanin_client *client, const char *publication,
                        uint32_t timeout_ms, int device, fanin_dtype half, arena *out,
                        fanin_error *error)
{
    *out = (arena){.device = device, .half = half};
    fanin_status status = fanin_client_catalog(client, publication, NULL, timeout_ms,
                                               on_entry, out, error);
    if (status != FANIN_OK) {
        return status;
    }
    out->boxes = output_require(calloc(out->count + 1, sizeof out->boxes[0]));
    status = make_memory(out, error);
    if (status != FANIN_OK) {
        return status;
    }
    uint8_t *to = out->memory;
    for (size_t i = 0; i < out->count; i++) {
        fanin_tensor *t = &out->tensors[i];
        memcpy(out->boxes[i].extent, t->shape, sizeof t->shape);
        out->boxes[i].address = to;
        t->boxes = &out->boxes[i];
        to += aligned(arena_bytes(out, i));
    }
    return FANIN_OK;
}

void arena_free(arena *a)
{
    for (size_t i = 0; i < a->count; i++) {
        union {
            const char *name;
            char *owned;
        } pointer = {a->tensors[i].name};
        free(pointer.owned);
    }
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
            return no_memory(a, error);
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
