/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file
 * CUDA of the stand-in trainer and of the benchmark: memory, streams and copies, as any program
 * beside the library would use them, through the driver alone (libcuda.so.1, or the file that
 * FANIN_CUDA_LIBRARY names), loaded when the first function is called. Work is done in the devices'
 * primary contexts; a function leaves its device's context current in the calling thread. Thread:
 * one. Errors are FANIN_ERR_UNSUPPORTED (no driver), FANIN_ERR_ARGUMENT (no such
 * device), FANIN_ERR_MEMORY and FANIN_ERR_TRANSPORT with the driver's words.
 */
#ifndef DEVICE_DRIVER_H
#define DEVICE_DRIVER_H

#include <fanin/error.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { DEVICE_MAX = 64 };

/** Memory is the host's. */
#define DEVICE_HOST (-1)

/** Loads the driver, if that was not done, and opens @p device's primary context. */
fanin_status device_open(int device, fanin_error *error);
/** Devices that this process sees; 0 without CUDA. */
int device_count(void);
/** Lets @p device read and write @p peer's memory directly; false: it cannot. Both are open. */
bool device_peer(int device, int peer);

/** Device memory as cudaMalloc gives it. */
fanin_status device_alloc(int device, size_t bytes, void **out, fanin_error *error);
void device_free(int device, void *memory);
/** Pinned host memory. */
fanin_status device_alloc_pinned(int device, size_t bytes, void **out,
                                 fanin_error *error);
void device_free_pinned(int device, void *memory);
/** Pins pages that are there already, for all devices. */
fanin_status device_register(int device, void *memory, size_t bytes,
                             fanin_error *error);
void device_unregister(int device, void *memory);

/** A stream (CUstream) that does not wait for the default one. */
fanin_status device_stream(int device, void **out, fanin_error *error);
void device_stream_free(int device, void *stream);
/** Until all that was queued is done. */
fanin_status device_wait(int device, void *stream, fanin_error *error);

/** Queues a copy between any two of host and device memory. */
fanin_status device_copy(int device, void *stream, void *to, const void *from,
                         size_t bytes, fanin_error *error);

/** The driver's function of that name, for what is not above; NULL: there is none. The driver
    is loaded. */
void *device_symbol(const char *name);

#endif
