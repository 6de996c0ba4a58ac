/* SPDX-License-Identifier: Apache-2.0 */
#include "arena.h"
#include "failure.h"
#include "output.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

void *arena_map(uint64_t size)
{
    void *memory = mmap(NULL, size > 0 ? size : 1, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
    return memory == MAP_FAILED ? NULL : memory;
}

static bool on_entry(void *cookie, const fanin_entry *e)
{
    arena *a = cookie;
    if (a->count == a->capacity) {
        size_t capacity = a->capacity > 0 ? 2 * a->capacity : 1024;
        fanin_tensor *tensors = realloc(a->tensors, capacity * sizeof(tensors[0]));
        if (tensors == NULL) {
            return false;
        }
        a->tensors = tensors;
        a->capacity = capacity;
    }
    char *name = strdup(e->name);
    if (name == NULL) {
        return false;
    }
    fanin_tensor *t = &a->tensors[a->count++];
    *t = (fanin_tensor){.struct_size = sizeof(*t),
                        .name = name,
                        .dtype = e->dtype,
                        .n_dims = e->n_dims,
                        .n_boxes = e->bytes > 0,
                        .memory = {FANIN_MEMORY_HOST, -1}};
    memcpy(t->shape, e->shape, sizeof(t->shape));
    a->bytes += e->bytes;
    a->size += (e->bytes + 63) / 64 * 64;
    return true;
}

static uint64_t tensor_bytes(const fanin_tensor *t)
{
    uint64_t bits = fanin_dtype_bits(t->dtype);
    for (uint32_t d = 0; d < t->n_dims; d++) {
        bits *= t->shape[d];
    }
    return bits / 8;
}

fanin_status arena_make(fanin_client *client, const char *publication,
                        uint32_t timeout_ms, arena *out, fanin_error *error)
{
    *out = (arena){0};
    fanin_status status = fanin_client_catalog(client, publication, NULL, timeout_ms,
                                               on_entry, out, error);
    if (status != FANIN_OK) {
        return status;
    }
    out->boxes = calloc(out->count + 1, sizeof(out->boxes[0]));
    out->memory = arena_map(out->size);
    if (out->boxes == NULL || out->memory == NULL) {
        return failure_set(error, FANIN_ERR_MEMORY, "free memory",
                           "no memory for %s of tensors", output_bytes(out->bytes).s);
    }
    uint8_t *to = out->memory;
    for (size_t i = 0; i < out->count; i++) {
        fanin_tensor *t = &out->tensors[i];
        memcpy(out->boxes[i].extent, t->shape, sizeof(t->shape));
        out->boxes[i].address = to;
        t->boxes = &out->boxes[i];
        to += (tensor_bytes(t) + 63) / 64 * 64;
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
    if (a->memory != NULL) {
        munmap(a->memory, a->size > 0 ? a->size : 1);
    }
    free(a->tensors);
    free(a->boxes);
    *a = (arena){0};
}
