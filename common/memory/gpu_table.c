/* SPDX-License-Identifier: Apache-2.0 */
#include "array.h"
#include "copy_list.h"
#include "gpu_internal.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

struct gpu_table {
    gpu *g;
    int device;
    uint64_t n;      /**< entries of the caller */
    uint32_t *first; /**< [n + 1]: entry i is the units first[i] .. first[i + 1] - 1 */
    uint32_t ways;
    uint32_t n_bases;
    uint64_t *bases;    /**< what the device's are, or will be in the stream's order */
    bool unsure;        /**< they are not: the last copy of them failed */
    CUdeviceptr memory; /**< the units, then the bases */
    CUdeviceptr device_bases;
};

/* For uploads on the device, used by all threads; its context must be current. */
static fanin_status uploads_stream(gpu *g, int device, CUstream *out,
                                   fanin_error *error)
{
    gpu_slot *slot = &g->slots[device];
    CUresult result = CUDA_SUCCESS;
    pthread_mutex_lock(&g->lock);
    if (!slot->uploads)
        result = g->cuStreamCreate(&slot->uploads, CU_STREAM_NON_BLOCKING);
    *out = slot->uploads;
    pthread_mutex_unlock(&g->lock);
    if (result != CUDA_SUCCESS)
        return gpu_error(g, error, result, "making a stream on device %d", device);
    return FANIN_OK;
}

/* Where each entry's units begin. */
static fanin_status count_units(gpu_table *t, const copy_entry *entries,
                                fanin_error *error)
{
    uint64_t total = 0;
    for (uint64_t i = 0; i < t->n; i++) {
        t->first[i] = (uint32_t)total;
        total += copy_units_cut(&entries[i], NULL);
        if (total > UINT32_MAX)
            return error_set(error, FANIN_ERR_LIMIT, NULL,
                             "a table of copies has more than %u parts", UINT32_MAX);
    }
    t->first[t->n] = (uint32_t)total;
    return FANIN_OK;
}

/* Units that are cut before they are uploaded: 3 MiB. */
#define BLOCK_UNITS UINT32_C(65536)

/* Behind the last entry of a block that begins with @p first: one at least. */
static uint64_t end_of_block(const gpu_table *t, uint64_t first)
{
    uint64_t end = first + 1;
    while (end < t->n && t->first[end + 1] - t->first[first] <= BLOCK_UNITS)
        end++;
    return end;
}

/* They come from pageable memory, so a copy has read a block when it returns. */
static fanin_status upload_units(const gpu_table *t, const copy_entry *entries,
                                 CUstream stream, fanin_error *error)
{
    copy_entry *block = NULL;
    size_t capacity = 0;
    CUresult result = CUDA_SUCCESS;
    for (uint64_t i = 0, end; i < t->n && result == CUDA_SUCCESS; i = end) {
        end = end_of_block(t, i);
        uint32_t begin = t->first[i], units = t->first[end] - begin;
        if (units == 0)
            continue;
        if (!array_reserve(&block, &capacity, units, sizeof *block)) {
            free(block);
            return error_set_memory(error);
        }
        for (uint64_t j = i; j < end; j++)
            copy_units_cut(&entries[j], block + (t->first[j] - begin));
        result = t->g->cuMemcpyAsync(t->memory + begin * sizeof *block,
                                     (CUdeviceptr)block, units * sizeof *block, stream);
    }
    free(block);
    return result == CUDA_SUCCESS
               ? FANIN_OK
               : gpu_error(t->g, error, result, "copying a table to device %d",
                           t->device);
}

/* Not on the default stream, which would wait for other work of the process. */
static fanin_status upload(gpu_table *t, const copy_entry *entries, fanin_error *error)
{
    gpu *g = t->g;
    CUstream stream;
    size_t unit_bytes = t->first[t->n] * sizeof *entries;
    size_t base_bytes = t->n_bases * sizeof *t->bases;
    fanin_status status = uploads_stream(g, t->device, &stream, error);
    if (status != FANIN_OK)
        return status;
    CUresult result = g->cuMemAlloc(&t->memory, unit_bytes + base_bytes);
    if (result == CUDA_ERROR_OUT_OF_MEMORY)
        return error_set(error, FANIN_ERR_MEMORY, NULL,
                         "device %d (%s) has no %zu bytes left for a table of copies",
                         t->device, g->slots[t->device].info.name,
                         unit_bytes + base_bytes);
    t->device_bases = t->memory + unit_bytes;
    if (result == CUDA_SUCCESS) {
        status = upload_units(t, entries, stream, error);
        if (status != FANIN_OK)
            return status;
    }
    if (result == CUDA_SUCCESS && base_bytes > 0)
        result = g->cuMemcpyAsync(t->device_bases, (CUdeviceptr)t->bases, base_bytes,
                                  stream);
    if (result == CUDA_SUCCESS)
        result = g->cuStreamSynchronize(stream);
    if (result != CUDA_SUCCESS)
        return gpu_error(g, error, result, "copying a table to device %d", t->device);
    return FANIN_OK;
}

static fanin_status gpu_table_fill(gpu_table *t, const copy_entry *entries,
                                   fanin_error *error)
{
    if (t->n >= SIZE_MAX / sizeof *t->first)
        return error_set_memory(error);
    t->first = calloc((size_t)t->n + 1, sizeof *t->first);
    t->bases = calloc(t->n_bases ? t->n_bases : 1, sizeof *t->bases);
    if (!t->first || !t->bases)
        return error_set_memory(error);
    fanin_status status = count_units(t, entries, error);
    if (status != FANIN_OK || t->first[t->n] == 0)
        return status;
    status = gpu_context_enter(t->g, t->device, error);
    if (status == FANIN_OK) {
        status = upload(t, entries, error);
        gpu_context_leave(t->g);
    }
    return status;
}

fanin_status gpu_table_create(gpu *g, int device, const copy_entry *entries, uint64_t n,
                              uint32_t n_bases, gpu_table **out, fanin_error *error)
{
    if (!gpu_slot_of(g, device, error))
        return FANIN_ERR_ARGUMENT;
    gpu_table *t = calloc(1, sizeof *t);
    if (!t)
        return error_set_memory(error);
    t->g = g;
    t->device = device;
    t->n = n;
    t->ways = 1;
    t->n_bases = n_bases;
    fanin_status status = gpu_table_fill(t, entries, error);
    if (status == FANIN_OK)
        *out = t;
    else
        gpu_table_destroy(&t);
    return status;
}

void gpu_table_destroy(gpu_table **table)
{
    gpu_table *t = *table;
    *table = NULL;
    if (!t)
        return;
    if (t->memory)
        gpu_free(t->g, t->device,
                 (void *)t->memory); /* NOLINT(performance-no-int-to-ptr) */
    free(t->first);
    free(t->bases);
    free(t);
}

void gpu_table_take_in_turns(gpu_table *table, uint32_t ways)
{
    table->ways = ways > 0 ? ways : 1;
}

uint64_t gpu_table_count(const gpu_table *table)
{
    return table->n;
}

static fanin_status gpu_table_check_device(const gpu_table *t, const gpu_stream *stream,
                                           fanin_error *error)
{
    if (t->device == stream->device)
        return FANIN_OK;
    return error_set(error, FANIN_ERR_ARGUMENT, NULL,
                     "a table on device %d cannot be used on a stream of device %d",
                     t->device, stream->device);
}

fanin_status gpu_table_set_bases(gpu_table *table, gpu_stream *stream,
                                 const uint64_t *bases, fanin_error *error)
{
    gpu *g = table->g;
    size_t bytes = (size_t)table->n_bases * sizeof *bases;
    fanin_status status = gpu_table_check_device(table, stream, error);
    if (status != FANIN_OK || bytes == 0 ||
        (!table->unsure && memcmp(table->bases, bases, bytes) == 0))
        return status;
    memcpy(table->bases, bases, bytes);
    if (table->memory) {
        table->unsure = true;
        status = gpu_context_enter(g, table->device, error);
        if (status != FANIN_OK)
            return status;
        /* Ours is pageable memory, so it has been read when this returns. */
        CUresult result = g->cuMemcpyAsync(
            table->device_bases, (CUdeviceptr)table->bases, bytes, stream->handle);
        gpu_context_leave(g);
        table->unsure = result != CUDA_SUCCESS;
        if (result != CUDA_SUCCESS)
            return gpu_error(g, error, result, "copying addresses to device %d",
                             table->device);
    }
    return FANIN_OK;
}

fanin_status gpu_table_run(const gpu_table *table, gpu_stream *stream, uint64_t first,
                           uint64_t count, uint64_t from_add, uint64_t to_add,
                           fanin_error *error)
{
    fanin_status status = gpu_table_check_device(table, stream, error);
    if (status != FANIN_OK)
        return status;
    if (first > table->n || count > table->n - first)
        return error_set(error, FANIN_ERR_ARGUMENT, NULL,
                         "a table of %" PRIu64 " copies has none of %" PRIu64
                         " from %" PRIu64 " on",
                         table->n, count, first);
    uint32_t begin = table->first[first], end = table->first[first + count];
    if (begin == end)
        return FANIN_OK;
    copy_parameters parameters = {
        /* NOLINTBEGIN(performance-no-int-to-ptr) */
        .entries = (const copy_entry *)table->memory + begin,
        .bases = table->n_bases ? (const uint64_t *)table->device_bases : NULL,
        /* NOLINTEND(performance-no-int-to-ptr) */
        .count = end - begin,
        .from_add = from_add,
        .to_add = to_add,
        .parts = 1,
        .ways = table->ways,
    };
    return gpu_kernel_launch(stream, &parameters, error);
}
