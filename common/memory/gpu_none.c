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

#define STUB(type, name, parameters, value)                                            \
    type name parameters                                                               \
    {                                                                                  \
        return value;                                                                  \
    }
#define REFUSE(name, parameters)                                                       \
    STUB(fanin_status, name, parameters, gpu_none_refuse(error))

STUB(bool, gpu_built, (void), false)
REFUSE(gpu_load, (const logger *log, gpu **out, fanin_error *error))
STUB(gpu *, gpu_present, (void), NULL)
STUB(const char *, gpu_driver_version, (const gpu *g), "")
STUB(int, gpu_count, (const gpu *g), 0)
REFUSE(gpu_device_get, (const gpu *g, int device, gpu_device *out, fanin_error *error))
STUB(int, gpu_device_of_uuid, (const gpu *g, const uint8_t uuid[GPU_UUID_SIZE]), -1)
STUB(bool, gpu_can_access, (const gpu *g, int device, int peer), false)
STUB(bool, gpu_let_access, (gpu * g, int device, int peer), false)
REFUSE(gpu_range_of, (gpu * g, const void *pointer, gpu_range *out, fanin_error *error))
STUB(const char *, gpu_origin_name, (gpu_origin origin), "host memory")
REFUSE(gpu_alloc, (gpu * g, int device, size_t bytes, void **out, fanin_error *error))
STUB(void, gpu_free, (gpu * g, int device, void *memory), )
REFUSE(gpu_host_alloc, (gpu * g, size_t bytes, void **out, fanin_error *error))
STUB(void, gpu_host_free, (gpu * g, void *memory), )
REFUSE(gpu_pin, (gpu * g, void *base, size_t length, fanin_error *error))
STUB(void, gpu_unpin, (gpu * g, void *base), )
REFUSE(gpu_export, (gpu * g, const gpu_range *range, uint8_t handle[GPU_HANDLE_SIZE],
                    fanin_error *error))
REFUSE(gpu_map, (gpu * g, int device, const uint8_t handle[GPU_HANDLE_SIZE],
                 void **base_out, fanin_error *error))
STUB(void, gpu_unmap, (gpu * g, int device, void *base), )
REFUSE(gpu_context_enter, (gpu * g, int device, fanin_error *error))
STUB(void, gpu_context_leave, (gpu * g), )
REFUSE(gpu_flush_remote_writes, (gpu * g, int device, fanin_error *error))
REFUSE(gpu_stream_create, (gpu * g, int device, gpu_stream **out, fanin_error *error))
STUB(void, gpu_stream_destroy, (gpu_stream * *stream), )
STUB(void *, gpu_stream_handle, (const gpu_stream *stream), NULL)
REFUSE(gpu_copy, (gpu_stream * stream, void *to, const void *from, size_t bytes,
                  fanin_error *error))
REFUSE(gpu_zero, (gpu_stream * stream, void *memory, size_t bytes, fanin_error *error))
REFUSE(gpu_stream_wait, (gpu_stream * stream, deadline at, fanin_error *error))
REFUSE(gpu_stream_after,
       (gpu_stream * stream, const fanin_stream *callers, fanin_error *error))
STUB(bool, gpu_is_busy, (gpu * g, const fanin_stream *callers), false)
REFUSE(gpu_stream_before,
       (gpu_stream * stream, const fanin_stream *callers, fanin_error *error))
REFUSE(gpu_stream_notify,
       (gpu_stream * stream, gpu_reached_fn fn, void *cookie, fanin_error *error))
REFUSE(gpu_notify, (gpu * g, const fanin_stream *callers, gpu_reached_fn fn,
                    void *cookie, fanin_error *error))
REFUSE(gpu_prepare, (gpu * g, int device, gpu_kernel_id id, fanin_error *error))
REFUSE(gpu_table_create, (gpu * g, int device, const copy_entry *entries, uint64_t n,
                          uint32_t n_bases, gpu_table **out, fanin_error *error))
STUB(void, gpu_table_destroy, (gpu_table * *table), )
STUB(void, gpu_table_take_in_turns, (gpu_table * table, uint32_t ways), )
STUB(uint64_t, gpu_table_count, (const gpu_table *table), 0)
REFUSE(gpu_table_set_bases, (gpu_table * table, gpu_stream *stream,
                             const uint64_t *bases, fanin_error *error))
REFUSE(gpu_table_run,
       (const gpu_table *table, gpu_stream *stream, uint64_t first, uint64_t count,
        uint64_t from_add, uint64_t to_add, fanin_error *error))
REFUSE(gpu_entries_run, (gpu_stream * stream, const copy_entry *pinned, uint64_t n,
                         uint64_t from_add, uint64_t to_add, fanin_error *error))
REFUSE(gpu_file_digest_run, (gpu_stream * stream, const void *bytes, uint64_t n,
                             uint64_t *out, fanin_error *error))
REFUSE(gpu_digest_run,
       (gpu_stream * stream, const digest_list *list, fanin_error *error))
REFUSE(gpu_prepare_patches, (gpu * g, int device, fanin_error *error))
REFUSE(gpu_patch_run,
       (gpu_stream * stream, const patch_parameters *p, fanin_error *error))
REFUSE(gpu_patch_apply,
       (gpu_stream * stream, const patch_apply_parameters *p, fanin_error *error))

/* NOLINTEND(misc-unused-parameters) */
