/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file
 * CUDA, through its driver alone, loaded at run time: what memory a pointer names, memory and
 * streams of our own, exported allocations, and the kernels that copy and digest. The only place
 * that knows CUDA's API. A build without CUDA has the same functions; gpu_load() then says so.
 *
 * No CUDA runtime is linked or loaded: the library has one build for machines with and without
 * a GPU, and brings no second runtime into a trainer's process. All work is done in the devices'
 * primary contexts, those of the runtime and of PyTorch.
 *
 * Every function leaves the calling thread's current context and device as they were, and none
 * needs one. Thread: any, several at once; a stream and a table by one at a time.
 * Errors of the driver are FANIN_ERR_TRANSPORT with the driver's name and text of the error;
 * memory that is short is FANIN_ERR_MEMORY and says of which device and how much.
 */
#ifndef GPU_H
#define GPU_H

#include "clock.h"
#include "copy_entry.h"
#include "copy_list.h"
#include "log.h"
#include "patch_kernel.h"
#include <fanin/types.h>

#define GPU_MAX_DEVICES 64
#define GPU_UUID_SIZE 16
#define GPU_HANDLE_SIZE 64 /**< of an exported allocation */

/** The loaded driver. One a process; never unloaded. */
typedef struct gpu gpu;
typedef struct gpu_stream gpu_stream; /**< a stream of our own on one device */
typedef struct gpu_table gpu_table;   /**< copy entries that stay on a device */

/** Whether this build has CUDA; whether this machine has it is what gpu_load() finds out. */
bool gpu_built(void);
/**
 * Loads and initializes the driver: FANIN_CUDA_LIBRARY (a file; empty string: no CUDA), else
 * libcuda.so.1. Later calls return the same. Takes up to a second the first time, no context is
 * created. FANIN_ERR_UNSUPPORTED with a sentence: built without CUDA; no driver; no device;
 * a driver that is too old.
 */
fanin_status gpu_load(const logger *log, gpu **out, fanin_error *error);
/**
 * The driver if this process has it in memory and initialized already, by us or by anybody else;
 * NULL otherwise: then no pointer of the process can be device memory. Loads and starts nothing.
 */
gpu *gpu_present(void);
/** "13.0": the CUDA version that the driver supports. */
const char *gpu_driver_version(const gpu *g);

int gpu_count(const gpu *g);

typedef struct gpu_device {
    uint8_t uuid[GPU_UUID_SIZE];
    char name[64], pci[16]; /**< "NVIDIA H200", "0000:1b:00.0" in lower case */
    int major, minor;       /**< compute capability */
    uint64_t memory;        /**< bytes */
} gpu_device;
/** FANIN_ERR_ARGUMENT: there is no such device. */
fanin_status gpu_device_get(const gpu *g, int device, gpu_device *out,
                            fanin_error *error);
/** The device of that UUID among those that this process sees, -1: none. */
int gpu_device_of_uuid(const gpu *g, const uint8_t uuid[GPU_UUID_SIZE]);
/** Whether kernels on @p device may read memory of @p peer (true if they are the same). */
bool gpu_can_access(const gpu *g, int device, int peer);
/** Lets copies of @p device go to and from memory of @p peer directly, from now on; false: they go
    through the host. */
bool gpu_let_access(gpu *g, int device, int peer);

/* ------------------------------------------------------ what a pointer names */

typedef enum gpu_origin {
    GPU_ORIGIN_HOST,   /**< no CUDA memory, or pinned host memory */
    GPU_ORIGIN_MALLOC, /**< cudaMalloc: can be exported */
    GPU_ORIGIN_VIRTUAL, /**< virtual-memory API, as PyTorch's expandable_segments: no IPC handle */
    GPU_ORIGIN_POOL,    /**< stream-ordered pool (cudaMallocAsync): no IPC handle */
    GPU_ORIGIN_MANAGED, /**< managed memory: no IPC handle */
} gpu_origin;

typedef struct gpu_range {
    fanin_memory memory; /**< HOST with device -1, or CUDA with its device */
    gpu_origin origin;
    uint64_t base,
        length;  /**< the allocation that holds the pointer; 0, 0 for host memory */
    uint64_t id; /**< of the allocation; never used twice in a process */
} gpu_range;

/** The driver gives device memory addresses in whole, aligned stretches of so many bytes: where one
    byte of a stretch is host memory, all of it is. */
#define GPU_ADDRESS_GRAIN ((uint64_t)2 << 20)

/** Cheap (under 2 us). FANIN_ERR_TRANSPORT: device memory whose allocation the driver denies
    (freed, say). */
fanin_status gpu_range_of(gpu *g, const void *pointer, gpu_range *out,
                          fanin_error *error);
/** "cudaMalloc", "virtual-memory API", ... for messages. */
const char *gpu_origin_name(gpu_origin origin);

/* -------------------------------------------------------------- own memory */

/** Device memory, from cudaMalloc's allocator: it can be exported. */
fanin_status gpu_alloc(gpu *g, int device, size_t bytes, void **out,
                       fanin_error *error);
void gpu_free(gpu *g, int device, void *memory);
/** Pinned host memory that all devices and kernels may use at its own address. */
fanin_status gpu_host_alloc(gpu *g, size_t bytes, void **out, fanin_error *error);
void gpu_host_free(gpu *g, void *memory);
/** Pins memory that is there already (whole pages, mapped; a tmpfs mapping is fine), for use
    as that of gpu_host_alloc(). FANIN_ERR_LIMIT: says the limit and how to raise it. */
fanin_status gpu_pin(gpu *g, void *base, size_t length, fanin_error *error);
void gpu_unpin(gpu *g, void *base);

/* ------------------------------------------------- memory of other processes */

/** The handle of the allocation that @p range describes. FANIN_ERR_UNSUPPORTED: its origin has
    none (says so, and the remedy). */
fanin_status gpu_export(gpu *g, const gpu_range *range, uint8_t handle[GPU_HANDLE_SIZE],
                        fanin_error *error);
/**
 * Maps another process's allocation for kernels of @p device; not for the exporting process
 * itself. Costs some 100 us. The address belongs to the device's primary context and is to be
 * given back once per call. FANIN_ERR_UNSUPPORTED (no peer access), FANIN_ERR_TRANSPORT.
 */
fanin_status gpu_map(gpu *g, int device, const uint8_t handle[GPU_HANDLE_SIZE],
                     void **base_out, fanin_error *error);
/** No work may be under way that uses it. Errors are ignored: the owner may be dead. */
void gpu_unmap(gpu *g, int device, void *base);

/* --------------------------------------------- other libraries on our memory */

/** Makes the primary context of @p device current in this thread until gpu_context_leave(), for
    libraries that expect one (UCX while it registers or reads into device memory). Pairs nest. */
fanin_status gpu_context_enter(gpu *g, int device, fanin_error *error);
void gpu_context_leave(gpu *g);
/** After the writes of an RDMA adapter into memory of @p device have completed: work queued on
    the device from now on sees them. Cheap; does nothing where the hardware keeps that order. */
fanin_status gpu_flush_remote_writes(gpu *g, int device, fanin_error *error);

/* ----------------------------------------------------------------- streams */

fanin_status gpu_stream_create(gpu *g, int device, gpu_stream **out,
                               fanin_error *error);
/** Waits for the work on it. NULL is fine. */
void gpu_stream_destroy(gpu_stream **stream);
/** As CUDA knows it (CUstream). */
void *gpu_stream_handle(const gpu_stream *stream);
/** Copies between any two of: device memory, pinned and pageable host memory; ordered, and
    asynchronous unless pageable memory takes part. */
fanin_status gpu_copy(gpu_stream *stream, void *to, const void *from, size_t bytes,
                      fanin_error *error);
/** Zeroes device memory, in the stream's order. */
fanin_status gpu_zero(gpu_stream *stream, void *memory, size_t bytes,
                      fanin_error *error);
/** Blocks until the work queued so far is done. FANIN_ERR_TIMEOUT when @p at passes: the work is
    still under way. FANIN_ERR_TRANSPORT: the device has failed. */
fanin_status gpu_stream_wait(gpu_stream *stream, deadline at, fanin_error *error);
/** Everything on @p stream from now on comes after what is on the caller's stream now. Does nothing
    if its handle is NULL. FANIN_ERR_STATE: it is being captured into a graph. */
fanin_status gpu_stream_after(gpu_stream *stream, const fanin_stream *callers,
                              fanin_error *error);
/** Whether something on the caller's stream has not ended; false also if that cannot be told. */
bool gpu_is_busy(gpu *g, const fanin_stream *callers);
/** Everything on the caller's stream from now on comes after what is on @p stream now. */
fanin_status gpu_stream_before(gpu_stream *stream, const fanin_stream *callers,
                               fanin_error *error);

/** Called in a thread of the driver when the stream gets there; must not call gpu functions nor
    block; @p failed: the device is in an error state. Called exactly once if FANIN_OK was returned,
    otherwise never. */
typedef void (*gpu_reached_fn)(void *cookie, bool failed);
fanin_status gpu_stream_notify(gpu_stream *stream, gpu_reached_fn fn, void *cookie,
                               fanin_error *error);
/** The same on a stream of the caller's. */
fanin_status gpu_notify(gpu *g, const fanin_stream *callers, gpu_reached_fn fn,
                        void *cookie, fanin_error *error);

/* ------------------------------------------------------------------ kernels */

typedef enum gpu_kernel_id {
    GPU_COPY,
    GPU_DIGEST,
    GPU_FILE_DIGEST, /**< of pieces of a file */
    GPU_PATCH_COUNT,
    GPU_PATCH_SCAN,
    GPU_PATCH_EMIT,
    GPU_PATCH_APPLY,
    GPU_KERNELS
} gpu_kernel_id;

/** Loads a kernel on @p device (some milliseconds the first time), which its first run does
    otherwise. The driver is asked once, but for the copy kernel; later calls return the same and
    are cheap. FANIN_ERR_UNSUPPORTED: the device cannot run the copy kernel. Another error: who
    calls does without it. */
fanin_status gpu_prepare(gpu *g, int device, gpu_kernel_id id, fanin_error *error);
/** The three that make patches. */
fanin_status gpu_prepare_patches(gpu *g, int device, fanin_error *error);

/* ------------------------------------------------------------------ copying */

/**
 * Uploads entries (copy_entry.h) to @p device; blocks for that. @p n_bases is 1 + the highest
 * base that they name. Big blocks are cut so that all multiprocessors are busy: the caller's
 * numbering (first, count of gpu_table_run()) is that of @p entries nevertheless.
 */
fanin_status gpu_table_create(gpu *g, int device, const copy_entry *entries, uint64_t n,
                              uint32_t n_bases, gpu_table **out, fanin_error *error);
void gpu_table_destroy(gpu_table **table);
uint64_t gpu_table_count(const gpu_table *table);
/** From now on the entries that are run are taken as @p ways equal sections, one of each in turn:
    the
    memory of several devices is then read at once, where entries lie device by device. */
void gpu_table_take_in_turns(gpu_table *table, uint32_t ways);
/** What entries' bases are from now on, in the stream's order; nothing is done if they are the
    same as before. Until then all are 0. */
fanin_status gpu_table_set_bases(gpu_table *table, gpu_stream *stream,
                                 const uint64_t *bases, fanin_error *error);
/** Queues the copies of entries first .. first+count-1: from bases[base] + from + from_add to
    to + to_add. One kernel, whatever their number. */
fanin_status gpu_table_run(const gpu_table *table, gpu_stream *stream, uint64_t first,
                           uint64_t count, uint64_t from_add, uint64_t to_add,
                           fanin_error *error);
/** The same for entries in pinned host memory (read there by the kernel; to be kept until it has
    run), all of base 0 being 0. For entries made for one use. */
fanin_status gpu_entries_run(gpu_stream *stream, const copy_entry *pinned, uint64_t n,
                             uint64_t from_add, uint64_t to_add, fanin_error *error);

/* ---------------------------------------------------------------- digesting */

/** Queues the digests of @p n pieces of DIGEST_PIECE bytes, one behind the other from @p bytes on
    (memory of the stream's device, aligned to 16): two words each as digest_of_words() takes them,
    to @p out, which is pinned host memory, to be kept until it has run. */
fanin_status gpu_file_digest_run(gpu_stream *stream, const void *bytes, uint64_t n,
                                 uint64_t *out, fanin_error *error);
/** Queues the digests of the list's pieces. The list's memory is pinned host memory, to be kept
    until it has run; what its entries name is memory that the device can read. */
fanin_status gpu_digest_run(gpu_stream *stream, const digest_list *list,
                            fanin_error *error);

/* ------------------------------------------------------------------- patches */

/** Queues the making of a patch between two copies on the stream's device. All that @p p names is
    to be kept until it has run, also after an error: some of it may be queued. */
fanin_status gpu_patch_run(gpu_stream *stream, const patch_parameters *p,
                           fanin_error *error);
/** The same of applying one to memory of the device; one run a segment at most. */
fanin_status gpu_patch_apply(gpu_stream *stream, const patch_apply_parameters *p,
                             fanin_error *error);

#endif
