/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A build without CUDA. There is never a driver, so none of the functions that take one can be
 * reached; they refuse all the same.
 */
/* NOLINTBEGIN(misc-unused-parameters): there is nothing that arguments could change. */
#pragma GCC diagnostic ignored "-Wunused-parameter"

#include "error_set.h"
#include "gpu.h"

static fanin_status gpu_none_refuse(fanin_error *error)
{
    static const error_place place = {
        .phase = "load",
        .remedy = "rebuild with nvcc and cuda.h (tools/setup installs them)",
    };
    return error_set(error, FANIN_ERR_UNSUPPORTED, &place,
                     "this build has no CUDA support: GPU memory cannot be used");
}

bool gpu_built(void)
{
    return false;
}

fanin_status gpu_load(const logger *log, gpu **out, fanin_error *error)
{
    return gpu_none_refuse(error);
}

gpu *gpu_present(void)
{
    return NULL;
}

const char *gpu_driver_version(const gpu *g)
{
    return "";
}

int gpu_count(const gpu *g)
{
    return 0;
}

fanin_status gpu_device_get(const gpu *g, int device, gpu_device *out,
                            fanin_error *error)
{
    return gpu_none_refuse(error);
}

int gpu_device_of_uuid(const gpu *g, const uint8_t uuid[GPU_UUID_SIZE])
{
    return -1;
}

bool gpu_can_access(const gpu *g, int device, int peer)
{
    return false;
}

fanin_status gpu_range_of(gpu *g, const void *pointer, gpu_range *out,
                          fanin_error *error)
{
    return gpu_none_refuse(error);
}

const char *gpu_origin_name(gpu_origin origin)
{
    return "host memory";
}

fanin_status gpu_alloc(gpu *g, int device, size_t bytes, void **out, fanin_error *error)
{
    return gpu_none_refuse(error);
}

void gpu_free(gpu *g, int device, void *memory)
{
}

fanin_status gpu_host_alloc(gpu *g, size_t bytes, void **out, fanin_error *error)
{
    return gpu_none_refuse(error);
}

void gpu_host_free(gpu *g, void *memory)
{
}

fanin_status gpu_pin(gpu *g, void *base, size_t length, fanin_error *error)
{
    return gpu_none_refuse(error);
}

void gpu_unpin(gpu *g, void *base)
{
}

fanin_status gpu_export(gpu *g, const gpu_range *range, uint8_t handle[GPU_HANDLE_SIZE],
                        fanin_error *error)
{
    return gpu_none_refuse(error);
}

fanin_status gpu_map(gpu *g, int device, const uint8_t handle[GPU_HANDLE_SIZE],
                     void **base_out, fanin_error *error)
{
    return gpu_none_refuse(error);
}

void gpu_unmap(gpu *g, int device, void *base)
{
}

fanin_status gpu_context_enter(gpu *g, int device, fanin_error *error)
{
    return gpu_none_refuse(error);
}

void gpu_context_leave(gpu *g)
{
}

fanin_status gpu_flush_remote_writes(gpu *g, int device, fanin_error *error)
{
    return gpu_none_refuse(error);
}

fanin_status gpu_stream_create(gpu *g, int device, gpu_stream **out, fanin_error *error)
{
    return gpu_none_refuse(error);
}

void gpu_stream_destroy(gpu_stream **stream)
{
}

fanin_status gpu_copy(gpu_stream *stream, void *to, const void *from, size_t bytes,
                      fanin_error *error)
{
    return gpu_none_refuse(error);
}

fanin_status gpu_zero(gpu_stream *stream, void *memory, size_t bytes,
                      fanin_error *error)
{
    return gpu_none_refuse(error);
}

fanin_status gpu_stream_wait(gpu_stream *stream, deadline at, fanin_error *error)
{
    return gpu_none_refuse(error);
}

fanin_status gpu_stream_after(gpu_stream *stream, const fanin_stream *callers,
                              fanin_error *error)
{
    return gpu_none_refuse(error);
}

fanin_status gpu_stream_before(gpu_stream *stream, const fanin_stream *callers,
                               fanin_error *error)
{
    return gpu_none_refuse(error);
}

fanin_status gpu_stream_notify(gpu_stream *stream, gpu_reached_fn fn, void *cookie,
                               fanin_error *error)
{
    return gpu_none_refuse(error);
}

fanin_status gpu_notify(gpu *g, const fanin_stream *callers, gpu_reached_fn fn,
                        void *cookie, fanin_error *error)
{
    return gpu_none_refuse(error);
}

fanin_status gpu_prepare(gpu *g, int device, fanin_error *error)
{
    return gpu_none_refuse(error);
}

fanin_status gpu_table_create(gpu *g, int device, const copy_entry *entries, uint64_t n,
                              uint32_t n_bases, gpu_table **out, fanin_error *error)
{
    return gpu_none_refuse(error);
}

void gpu_table_destroy(gpu_table **table)
{
}

void gpu_table_take_in_turns(gpu_table *table, uint32_t ways)
{
}

uint64_t gpu_table_count(const gpu_table *table)
{
    return 0;
}

fanin_status gpu_table_set_bases(gpu_table *table, gpu_stream *stream,
                                 const uint64_t *bases, fanin_error *error)
{
    return gpu_none_refuse(error);
}

fanin_status gpu_table_run(const gpu_table *table, gpu_stream *stream, uint64_t first,
                           uint64_t count, uint64_t from_add, uint64_t to_add,
                           fanin_error *error)
{
    return gpu_none_refuse(error);
}

fanin_status gpu_entries_run(gpu_stream *stream, const copy_entry *pinned, uint64_t n,
                             uint64_t from_add, uint64_t to_add, fanin_error *error)
{
    return gpu_none_refuse(error);
}

fanin_status gpu_prepare_digest(gpu *g, int device, fanin_error *error)
{
    return gpu_none_refuse(error);
}

fanin_status gpu_prepare_file_digest(gpu *g, int device, fanin_error *error)
{
    return gpu_none_refuse(error);
}

fanin_status gpu_file_digest_run(gpu_stream *stream, const void *bytes, uint64_t n,
                                 uint64_t *out, fanin_error *error)
{
    return gpu_none_refuse(error);
}

fanin_status gpu_digest_run(gpu_stream *stream, const digest_list *list,
                            fanin_error *error)
{
    return gpu_none_refuse(error);
}

fanin_status gpu_prepare_patches(gpu *g, int device, fanin_error *error)
{
    return gpu_none_refuse(error);
}

fanin_status gpu_patch_run(gpu_stream *stream, const patch_parameters *p,
                           fanin_error *error)
{
    return gpu_none_refuse(error);
}

fanin_status gpu_prepare_apply(gpu *g, int device, fanin_error *error)
{
    return gpu_none_refuse(error);
}

fanin_status gpu_patch_apply(gpu_stream *stream, const patch_apply_parameters *p,
                             fanin_error *error)
{
    return gpu_none_refuse(error);
}

/* NOLINTEND(misc-unused-parameters) */
