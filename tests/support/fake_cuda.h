/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file
 * A stand-in for the CUDA driver (libcuda.so.1) for machines without a GPU: the functions that
 * common/memory uses, on host memory, between real processes. Tests link libcuda-fake.so for the
 * functions below, and it then names itself in FANIN_CUDA_LIBRARY; other programs are told there.
 *
 * What it has in common with the real one:
 * - Device memory has addresses that the CPU cannot touch: reading one is a SIGSEGV, giving one
 *   to a system call is EFAULT. It shares no aligned 2 MiB of addresses with host memory.
 *   Neighbouring allocations touch each other; addresses of freed
 *   memory are used again at once, ids of allocations never.
 * - Streams work asynchronously and in order, each in a thread of its own. The default streams
 *   are streams like others: they do not wait for each other.
 * - Functions that need a current context fail without one. Handles belong to a context.
 * - Device memory can be mapped by other processes, not by its own, and once more by one that
 *   has it already (the same address, counted); not while older memory of the same addresses of
 *   its owner is mapped (CUDA_ERROR_ALREADY_MAPPED).
 * - A failed device stays failed. A child of a process that has initialized it cannot use it.
 *
 * Where it is stricter, it ends the process with a message (SIGABRT): a kernel touches anything
 * but allocations that its device can reach and pinned host memory; memory is unmapped, unpinned
 * or freed under a running copy; memory was unmapped while it was pinned; a primary context is
 * released for the last time with something alive in it; a wait for work that is held takes 30
 * seconds. A function of the driver that is called in a callback fails.
 *
 * Its own choices where the real one is undefined: memory that its owner has freed reads as
 * zeros where it is still mapped, and cannot be mapped any more; memory of a process that has died
 * stays as it was where it is mapped, and cannot be mapped any more (CUDA_ERROR_MAP_FAILED);
 * pointers of mapped memory cannot be exported again.
 *
 * Environment, read by cuInit(): FAKE_CUDA_DEVICES (2; 0: no device), FAKE_CUDA_VERSION
 * (13000), FAKE_CUDA_MEMORY (bytes of a device for each process, 16 GiB), FAKE_CUDA_NO_PEER
 * (1: no device can reach another), FAKE_CUDA_OWN_IPC (1: a process maps its own memory, too, for
 * tests that have both ends in one), FAKE_CUDA_KIND (what cuMemAlloc() really gives: malloc,
 * virtual, pool or managed), CUDA_VISIBLE_DEVICES (numbers, as in CUDA), and
 * FAKE_CUDA_FAIL (FUNCTION=ERROR[@AFTER], separated by commas: the call after AFTER good ones
 * and all later ones fail).
 *
 * Thread: all functions any, except in callbacks.
 */
#ifndef FAKE_CUDA_H
#define FAKE_CUDA_H

#include <stdbool.h>
#include <stdint.h>

#define FAKE_CUDA_API __attribute__((visibility("default")))

typedef enum fake_cuda_kind {
    FAKE_CUDA_MALLOC,
    FAKE_CUDA_VIRTUAL, /**< as cuMemCreate() and cuMemMap() make it: no legacy IPC handle */
    FAKE_CUDA_POOL,    /**< as cuMemAllocAsync() makes it: no legacy IPC handle */
    FAKE_CUDA_MANAGED, /**< the CPU can touch it; no IPC handle */
} fake_cuda_kind;

/** Memory of that kind, without a context; given back by cuMemFree() or fake_cuda_free(). Aborts
    if there is none. */
FAKE_CUDA_API void *fake_cuda_alloc(int device, uint64_t bytes, fake_cuda_kind kind);
FAKE_CUDA_API void fake_cuda_free(void *memory);
/** Where the CPU finds the bytes of that device pointer (own or mapped); NULL: no live
    allocation. Valid until it is freed. */
FAKE_CUDA_API void *fake_cuda_alias(const void *device_pointer);
/** How many other processes' contexts have mapped the allocation so far and not unmapped it; one
    that died counts on. */
FAKE_CUDA_API unsigned fake_cuda_mapped_by_others(const void *device_pointer);

/** What this process has alive, and what it has done so far. */
typedef struct fake_cuda_counts {
    uint64_t allocations, bytes; /**< device memory of its own */
    uint64_t pinned, pinned_bytes;
    uint64_t mappings; /**< opened handles that have not been closed, each opening */
    uint64_t streams, events, modules;
    uint64_t retains; /**< of primary contexts */
    uint64_t
        peak_bytes; /**< of device memory, since the last fake_cuda_reset_peaks() */
    uint64_t peak_pinned_bytes;
    uint64_t kernels, copies, opens; /**< done so far */
    uint64_t digests;                /**< of the kernels, those that digest */
} fake_cuda_counts;
FAKE_CUDA_API void fake_cuda_count(fake_cuda_counts *out);
FAKE_CUDA_API void fake_cuda_reset_peaks(void);

/** How often a function of the driver has been called in this process, by its linker name
    ("cuMemAlloc_v2"), failed calls as well. */
FAKE_CUDA_API uint64_t fake_cuda_calls(const char *function);
/** The function's calls fail with that CUresult: after @p after good ones, @p times of them (0: all
    from then on). CUDA_SUCCESS: withdraws it. */
FAKE_CUDA_API void fake_cuda_fail(const char *function, int result, unsigned after,
                                  unsigned times);
/** A capture into a graph, in mode global, begins, of which nothing is known but that calls that
    are unsafe then fail in all threads that have not asked for the mode relaxed, and invalidate it.
    False: it was invalidated. */
FAKE_CUDA_API void fake_cuda_begin_capture(void);
FAKE_CUDA_API bool fake_cuda_end_capture(void);
/** The device fails: what is queued on it is lost, and everything that has to do with it returns
    CUDA_ERROR_LAUNCH_FAILED from now on. */
FAKE_CUDA_API void fake_cuda_break(int device);
/** As in a new process: unlike a real device it works again. */
FAKE_CUDA_API void fake_cuda_repair(int device);

/** All streams of the device stop before their next operation, until fake_cuda_release(). */
FAKE_CUDA_API void fake_cuda_hold(int device);
/** One stream (a CUstream). */
FAKE_CUDA_API void fake_cuda_hold_stream(void *stream);
/** The next kernel on that device stops after @p entries copies, the rest is done after
    fake_cuda_release(). */
FAKE_CUDA_API void fake_cuda_hold_kernel(int device, uint64_t entries);
/** Ends all three kinds of holding on the device. */
FAKE_CUDA_API void fake_cuda_release(int device);
/** Blocks until the device has @p n operations queued or at work, at least, and at most 20 s:
    then false. */
FAKE_CUDA_API bool fake_cuda_wait_queued(int device, uint64_t n);
/** Blocks until a kernel stands as fake_cuda_hold_kernel() says, at most 20 s: then false. */
FAKE_CUDA_API bool fake_cuda_wait_kernel_held(int device);
/** Blocks until nothing is queued on the device; 20 s: false. */
FAKE_CUDA_API bool fake_cuda_wait_idle(int device);

#endif
