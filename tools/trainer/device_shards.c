/* SPDX-License-Identifier: Apache-2.0 */
#include "trainer/device_shards.h"
#include "fetch/failure.h"
#include "fetch/output.h"

#include <stdlib.h>
#include <string.h>

/* c10/cuda/CUDACachingAllocator.h: kMinBlockSize, kSmallSize, kSmallBuffer, kMinLargeAlloc,
   kLargeBuffer, kRoundLarge. */
#define MIN_BLOCK UINT64_C(512)
#define SMALL_SIZE (UINT64_C(1) << 20)
#define SMALL_SEGMENT (UINT64_C(2) << 20)
#define LARGE_SIZE (UINT64_C(10) << 20)
#define LARGE_SEGMENT (UINT64_C(20) << 20)
#define LARGE_ROUND (UINT64_C(2) << 20)

typedef struct segment {
    uint8_t *memory;
    uint64_t size, used; /**< what is beyond `used` is free, unless closed */
    uint8_t *image;      /**< host memory with what it is to hold */
    bool small, closed;
} segment;

struct device_shards {
    int device;
    const shard *shards;
    void **memory, **images;
    segment *segments;
    size_t n_segments, segments_capacity;
    uint32_t *in_segment; /**< of each shard */
    gpu *gpu;
    gpu_stream *stream;
};

fanin_status device_load(gpu **out, fanin_error *error)
{
    fanin_error why = FANIN_ERROR_INIT;
    return gpu_load(NULL, out, &why) == FANIN_OK
               ? FANIN_OK
               : failure_set(error, FANIN_ERR_TRANSPORT,
                             "run where an NVIDIA driver and a GPU are, or with host "
                             "memory: without --device, --dest device",
                             "no CUDA: %s", why.message);
}

static uint64_t round_up(uint64_t n, uint64_t to)
{
    return (n + to - 1) / to * to;
}

/* A new segment for a request of @p size; its number, SIZE_MAX after an error. */
static size_t open_segment(device_shards *s, uint64_t size, fanin_error *error)
{
    s->segments = output_room(s->segments, s->n_segments, &s->segments_capacity,
                              sizeof s->segments[0]);
    segment made = {.small = size <= SMALL_SIZE};
    made.size = made.small          ? SMALL_SEGMENT
                : size < LARGE_SIZE ? LARGE_SEGMENT
                                    : round_up(size, LARGE_ROUND);
    void *memory;
    if (gpu_alloc(s->gpu, s->device, made.size, &memory, error) != FANIN_OK)
        return SIZE_MAX;
    made.memory = memory;
    s->segments[s->n_segments] = made;
    return s->n_segments++;
}

/* The block that fits best in the segments of the right pool, else a new segment. */
static size_t find_segment(device_shards *s, uint64_t size, fanin_error *error)
{
    size_t best = SIZE_MAX;
    uint64_t best_left = UINT64_MAX;
    for (size_t i = 0; i < s->n_segments; i++) {
        const segment *g = &s->segments[i];
        uint64_t left = g->size - g->used;
        if (!g->closed && g->small == (size <= SMALL_SIZE) && left >= size &&
            left < best_left) {
            best = i;
            best_left = left;
        }
    }
    return best != SIZE_MAX ? best : open_segment(s, size, error);
}

static fanin_status device_shards_place(device_shards *s, size_t i, fanin_error *error)
{
    uint64_t size = round_up(s->shards[i].bytes, MIN_BLOCK);
    s->memory[i] = NULL;
    if (size == 0)
        return FANIN_OK;
    size_t at = find_segment(s, size, error);
    if (at == SIZE_MAX)
        return error->status;
    segment *g = &s->segments[at];
    s->memory[i] = g->memory + g->used;
    s->in_segment[i] = (uint32_t)at;
    g->used += size;
    /* A rest too small to be split off goes with the block. */
    g->closed = g->size - g->used < (g->small ? MIN_BLOCK : SMALL_SIZE + 1);
    return FANIN_OK;
}

static fanin_status make_images(device_shards *s, size_t count, fanin_error *error)
{
    for (size_t i = 0; i < s->n_segments; i++) {
        s->segments[i].image = calloc(1, s->segments[i].used + 1);
        if (s->segments[i].image == NULL)
            return failure_set(error, FANIN_ERR_MEMORY, "free memory",
                               "no memory for the bytes of the shards");
    }
    for (size_t i = 0; i < count; i++) {
        const segment *g = &s->segments[s->in_segment[i]];
        s->images[i] = s->memory[i] != NULL
                           ? g->image + ((uint8_t *)s->memory[i] - g->memory)
                           : NULL;
    }
    return FANIN_OK;
}

fanin_status device_shards_make(int device, const shard *shards, size_t count,
                                void **memory_out, device_shards **out,
                                fanin_error *error)
{
    device_shards *s = *out = output_require(calloc(1, sizeof *s));
    s->in_segment = output_require(calloc(count + 1, sizeof s->in_segment[0]));
    s->images = output_require(calloc(count + 1, sizeof s->images[0]));
    s->device = device;
    s->shards = shards;
    s->memory = memory_out;
    fanin_status status = device_load(&s->gpu, error);
    if (status == FANIN_OK)
        status = gpu_stream_create(s->gpu, device, &s->stream, error);
    for (size_t i = 0; status == FANIN_OK && i < count; i++)
        status = device_shards_place(s, i, error);
    return status == FANIN_OK ? make_images(s, count, error) : status;
}

void device_shards_free(device_shards **shards)
{
    device_shards *s = shards != NULL ? *shards : NULL;
    if (s == NULL)
        return;
    gpu_stream_destroy(&s->stream);
    for (size_t i = 0; i < s->n_segments; i++) {
        gpu_free(s->gpu, s->device, s->segments[i].memory);
        free(s->segments[i].image);
    }
    free(s->segments);
    free(s->in_segment);
    free(s->images);
    free(s);
    *shards = NULL;
}

fanin_status device_shards_images(const device_shards *s, void ***out,
                                  fanin_error *error)
{
    *out = s->images;
    return gpu_stream_wait(s->stream, UINT64_MAX, error);
}

fanin_status device_shards_send(const device_shards *s, fanin_error *error)
{
    fanin_status status = FANIN_OK;
    for (size_t i = 0; status == FANIN_OK && i < s->n_segments; i++) {
        const segment *g = &s->segments[i];
        status = gpu_copy(s->stream, g->memory, g->image, g->used, error);
    }
    return status;
}

gpu_stream *device_shards_stream(const device_shards *s)
{
    return s->stream;
}

void shard_chunk(uint64_t n, uint32_t parts, uint32_t index, uint32_t multiple,
                 uint64_t *begin_out, uint64_t *end_out)
{
    uint64_t size = n / parts + (n % parts != 0);
    size = (size + multiple - 1) / multiple * multiple;
    uint64_t begin = size * index;
    *begin_out = begin < n ? begin : n;
    *end_out = n - *begin_out < size ? n : *begin_out + size;
}

void shard_cut(const tensor_spec *t, uint32_t dim, uint32_t parts, uint32_t index,
               shard *out)
{
    uint64_t bits = fanin_dtype_bits(t->dtype);
    uint64_t outer = 1;
    uint64_t inner = 1;
    *out = (shard){0};
    if (t->n_dims == 0) {
        out->bytes = index == 0 ? t->bytes : 0;
        out->runs = 1;
        out->run_bytes = out->bytes;
        return;
    }
    if (dim >= t->n_dims)
        dim = t->n_dims - 1;
    for (uint32_t d = 0; d < t->n_dims; d++) {
        out->extent[d] = t->shape[d];
        outer *= d < dim ? t->shape[d] : 1;
        inner *= d > dim ? t->shape[d] : 1;
    }
    /* Packed elements are cut on whole bytes. */
    uint32_t multiple = dim + 1 < t->n_dims || bits % 8 == 0 ? 1 : bits == 4 ? 2 : 4;
    uint64_t begin;
    uint64_t end;
    shard_chunk(t->shape[dim], parts, index, multiple, &begin, &end);
    out->offset[dim] = begin;
    out->extent[dim] = end - begin;
    out->runs = outer;
    out->run_bytes = (end - begin) * inner * bits / 8;
    out->first = begin * inner * bits / 8;
    out->step = t->shape[dim] * inner * bits / 8;
    out->bytes = outer * out->run_bytes;
}
