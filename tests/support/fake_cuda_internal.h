/* SPDX-License-Identifier: Apache-2.0 */
/** @file What the parts of the stand-in for the CUDA driver (fake_cuda.h) share. */
#ifndef FAKE_CUDA_INTERNAL_H
#define FAKE_CUDA_INTERNAL_H

#include "fake_cuda.h"

/* The functions of the driver are exported, whatever the build's default is. */
#pragma GCC visibility push(default)
#include <cuda.h>
#pragma GCC visibility pop

#include <pthread.h>
#include <stddef.h>
#include <sys/types.h>

#define FAKE_MAX_DEVICES 64
#define FAKE_WAIT_MS 20000

/** A device with its primary context: the only one that it has. */
struct CUctx_st {
    int device;   /**< as this process numbers them */
    int physical; /**< as the machine does */
    unsigned retains;
    CUresult failed;
    bool peers[FAKE_MAX_DEVICES]; /**< cuCtxEnablePeerAccess() */
    uint64_t used;                /**< bytes allocated */
    CUstream streams;
    CUstream defaults[2]; /**< legacy, per thread; made when first used */

    bool held;
    _Atomic bool hold_kernel; /**< the next kernel is to stand still */
    bool kernel_held;         /**< one does */
    uint64_t hold_after;
};

/** Memory that the driver knows. All fields are under the lock; the bytes are not. */
typedef struct fake_range {
    uint64_t start, length; /**< as the program sees it */
    uint8_t *alias;         /**< the same bytes, for us */
    CUcontext context; /**< of the allocation; of the mapping, if another process's */
    int device;        /**< that holds it, -1: host memory */
    fake_cuda_kind kind;
    uint64_t id;
    uint64_t offset;       /**< in the file of the process that owns it */
    uint64_t nonce;        /**< of the allocation, in all processes */
    unsigned opens;        /**< > 0: memory of another process */
    pid_t owner;           /**< that process */
    uint64_t owners;       /**< its address there */
    bool host, registered; /**< pinned host memory; not allocated by us */
    unsigned busy;         /**< running operations that use it */
} fake_range;

typedef struct fake_driver {
    pthread_mutex_t lock;
    pthread_cond_t changed; /**< anything that somebody may wait for */
    _Atomic pid_t pid;      /**< that has initialized it, 0: none */
    int n_devices;
    bool no_peer, own_ipc;
    bool captures, invalidated; /**< into a graph, in mode global */
    bool ending;                /**< the process exits: streams' threads are to end */
    uint64_t memory;
    fake_cuda_kind kind; /**< of what cuMemAlloc() gives */
    struct CUctx_st contexts[FAKE_MAX_DEVICES];
    fake_cuda_counts counts;
} fake_driver;
extern fake_driver fake;

/** What a function of the driver needs. */
enum { FAKE_INIT = 1, FAKE_CONTEXT = 3 };
/** Every function of the driver starts so. CUDA_SUCCESS: the lock is held. */
CUresult fake_enter(const char *function, int needs);
/** Gives the lock back and returns @p result. */
CUresult fake_leave(CUresult result);
/** Counts the call; the failure that a test has ordered for it, if it is good so far. */
CUresult fake_count_call(const char *function, bool good);
/** As FAKE_CUDA_FAIL has them; NULL: none. */
void fake_order_failures(const char *list);
CUcontext fake_current(void); /**< of the calling thread, NULL: none */
/** NULL: no such device, or the driver is not initialized. Call with the lock. */
CUcontext fake_context_of(int device);
bool fake_can_access(CUcontext from, int device);

/** Waits for `changed` until @p end (fake_end()); false: that has passed. Call with the lock. */
bool fake_wait(const struct timespec *end);
struct timespec fake_end(unsigned ms);
_Noreturn void fake_die(const char *format, ...) __attribute__((format(printf, 1, 2)));

/** What a callback runs in: it must not call the driver. */
void fake_set_in_callback(bool inside);

/* Memory. Call with the lock. */
void fake_memory_init(void);
/** The range that holds all of the bytes, NULL: none. */
fake_range *fake_find(uint64_t address, uint64_t length);
/** Whether no host memory can have that address. */
bool fake_is_device_address(uint64_t address);
/** Whether kernels of @p context may touch it. */
bool fake_reachable(CUcontext context, const fake_range *range);
bool fake_context_has_memory(const struct CUctx_st *context);

/* Streams. Call with the lock. */
bool fake_context_has_streams(const struct CUctx_st *context);
/** The stream that @p handle names for functions of @p context: also the defaults. NULL: none. */
CUstream fake_stream_of(CUcontext context, CUstream handle);
/** Waits for everything queued on the context's streams so far. */
CUresult fake_drain(CUcontext context);

/* Kernels. */
typedef struct fake_launch fake_launch;
/** Without the lock, in the stream's thread. */
void fake_kernel_run(CUcontext context, fake_launch *launch);
void fake_kernel_free(fake_launch *launch);
/** Takes the launch over, also if it fails. Call with the lock. */
CUresult fake_stream_launch(CUcontext context, CUstream handle, fake_launch *launch);
/** Stands still in a kernel if that was asked for; @p done: entries done. Without the lock. */
void fake_kernel_gate(CUcontext context, uint64_t done);

#endif
