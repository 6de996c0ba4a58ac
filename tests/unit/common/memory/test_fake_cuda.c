/* SPDX-License-Identifier: Apache-2.0 */
/* That the stand-in for the CUDA driver is as strict as fake_cuda.h promises: other tests rely on
   it to notice what a real device would not forgive. */
#include "fake_cuda.h"
#include "gpu.h"
#include "own_process.h"
#include "testing.h"
#include <cuda.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>

#define SIZE 8192

static gpu *g;

static int load(void)
{
    return gpu_load(NULL, &g, NULL) == FANIN_OK ? PASSED : FAILED;
}

static int load_with_own_ipc(void)
{
    return setenv("FAKE_CUDA_OWN_IPC", "1", 1) == 0 ? load() : FAILED;
}

#define CASE(name, end) OWN_PROCESS(name, .before = load, .signal = (end))

/* The kernel of @p device copies; what stops it does so before this returns. */
static int kernel_copies(int device, const void *from, void *to)
{
    gpu_stream *s;
    gpu_table *t;
    const copy_entry e = {
        .from = (uintptr_t)from, .to = (uintptr_t)to, .run = SIZE, .runs = 1};
    CHECK(gpu_stream_create(g, device, &s, NULL) == FANIN_OK);
    CHECK(gpu_table_create(g, device, &e, 1, 1, &t, NULL) == FANIN_OK);
    CHECK(gpu_table_run(t, s, 0, 1, 0, 0, NULL) == FANIN_OK);
    CHECK(gpu_stream_wait(s, deadline_in_ms(20000), NULL) == FANIN_OK);
    gpu_table_destroy(&t);
    gpu_stream_destroy(&s);
    return PASSED;
}

static void *memory_on(int device)
{
    return fake_cuda_alloc(device, SIZE, FAKE_CUDA_MALLOC);
}

/* ---------------------------------------------------------- what the CPU may do */

static int cpu_reads(void)
{
    return *(volatile char *)memory_on(0);
}

CASE(system_calls, 0)
{
    void *memory = memory_on(0);
    int file = open("/dev/null", O_WRONLY), pipes[2];
    CHECK(file >= 0 && pipe(pipes) == 0);
    CHECK(write(pipes[1], memory, SIZE) == -1 && errno == EFAULT);
    CHECK(write(pipes[1], "x", 1) == 1);
    CHECK(read(pipes[0], memory, 1) == -1 && errno == EFAULT);
    return PASSED;
}

CASE(cpu_uses_managed_memory, 0)
{
    char *memory = fake_cuda_alloc(0, SIZE, FAKE_CUDA_MANAGED);
    char *to = memory_on(0);
    memset(memory, 'm', SIZE);
    CHECK(kernel_copies(0, memory, to) == PASSED);
    CHECK(*(char *)fake_cuda_alias(to) == 'm');
    fake_cuda_free(memory);
    return PASSED;
}

/* ----------------------------------------------------------- what kernels may do */

CASE(kernel_reads_pageable_memory, SIGABRT)
{
    static char host[SIZE];
    return kernel_copies(0, host, memory_on(0));
}

CASE(kernel_reads_past_the_end, SIGABRT)
{
    char *memory = memory_on(0);
    memory_on(0);
    return kernel_copies(0, memory + 1, memory_on(0));
}

CASE(kernel_writes_freed_memory, SIGABRT)
{
    void *from = memory_on(0), *to = memory_on(0);
    fake_cuda_free(to);
    return kernel_copies(0, from, to);
}

CASE(kernel_reads_another_device, SIGABRT)
{
    return kernel_copies(0, memory_on(1), memory_on(0));
}

CASE(kernel_reads_a_peer, 0)
{
    CUcontext context, peer;
    CHECK(cuDevicePrimaryCtxRetain(&context, 0) == CUDA_SUCCESS);
    CHECK(cuDevicePrimaryCtxRetain(&peer, 1) == CUDA_SUCCESS);
    CHECK(cuCtxEnablePeerAccess(peer, 0) == CUDA_ERROR_INVALID_CONTEXT);
    CHECK(cuCtxPushCurrent(context) == CUDA_SUCCESS);
    CHECK(cuCtxEnablePeerAccess(peer, 0) == CUDA_SUCCESS);
    CHECK(cuCtxEnablePeerAccess(peer, 0) == CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED);
    return kernel_copies(0, memory_on(1), memory_on(0));
}

/* ------------------------------------------------------------------- misuse ends */

CASE(unmapped_while_pinned, SIGABRT)
{
    void *memory =
        mmap(NULL, SIZE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(gpu_pin(g, memory, SIZE, NULL) == FANIN_OK);
    munmap(memory, SIZE);
    gpu_unpin(g, memory);
    return PASSED;
}

CASE(freed_under_a_kernel, SIGABRT)
{
    gpu_stream *s;
    void *host, *entries;
    CHECK(gpu_stream_create(g, 0, &s, NULL) == FANIN_OK);
    CHECK(gpu_host_alloc(g, SIZE, &host, NULL) == FANIN_OK);
    CHECK(gpu_host_alloc(g, 2 * sizeof(copy_entry), &entries, NULL) == FANIN_OK);
    const copy_entry e = {
        .from = (uintptr_t)host, .to = (uintptr_t)memory_on(0), .run = SIZE, .runs = 1};
    memcpy(entries, &e, sizeof e);
    memcpy((copy_entry *)entries + 1, &e, sizeof e);
    fake_cuda_hold_kernel(0, 1);
    CHECK(gpu_entries_run(s, entries, 2, 0, 0, NULL) == FANIN_OK);
    CHECK(fake_cuda_wait_kernel_held(0));
    gpu_host_free(g, host);
    return PASSED;
}

CASE(last_context_released, SIGABRT)
{
    CUcontext context;
    CHECK(cuDevicePrimaryCtxRetain(&context, 0) == CUDA_SUCCESS);
    memory_on(0);
    return (int)cuDevicePrimaryCtxRelease(0);
}

static int in_callback_result;

static void CUDA_CB in_callback(void *cookie)
{
    int count;
    (void)cookie;
    in_callback_result = (int)cuDeviceGetCount(&count);
}

CASE(callbacks_call_nothing, 0)
{
    CUcontext context;
    CHECK(cuDevicePrimaryCtxRetain(&context, 0) == CUDA_SUCCESS);
    CHECK(cuLaunchHostFunc(NULL, in_callback, NULL) == CUDA_ERROR_INVALID_CONTEXT);
    CHECK(cuCtxPushCurrent(context) == CUDA_SUCCESS);
    CHECK(cuLaunchHostFunc(NULL, in_callback, NULL) == CUDA_SUCCESS);
    CHECK(cuStreamSynchronize(NULL) == CUDA_SUCCESS);
    CHECK(in_callback_result == CUDA_ERROR_NOT_PERMITTED);
    return PASSED;
}

CASE(children_cannot_use_it, 0)
{
    int status;
    const pid_t pid = fork();
    if (pid == 0) {
        int count;
        _exit(cuInit(0) == CUDA_ERROR_NOT_INITIALIZED &&
                      cuDeviceGetCount(&count) == CUDA_ERROR_NOT_INITIALIZED
                  ? PASSED
                  : FAILED);
    }
    CHECK(waitpid(pid, &status, 0) == pid);
    return WIFEXITED(status) ? WEXITSTATUS(status) : FAILED;
}

/* Of memory that moves: new allocations beside the old ones, which are freed then. */
CASE(handles_name_one_allocation, 0)
{
    enum { MOVES = 200, EACH = 12, START = 8, LENGTH = 8 }; /* the nonce in a handle */
    static uint8_t known[MOVES * EACH][LENGTH];
    void *now[EACH] = {NULL};
    CUcontext context;
    CHECK(cuDevicePrimaryCtxRetain(&context, 0) == CUDA_SUCCESS);
    CHECK(cuCtxPushCurrent(context) == CUDA_SUCCESS);
    for (size_t i = 0; i < (size_t)MOVES * EACH; i++) {
        CUipcMemHandle handle;
        void *old = now[i % EACH];
        now[i % EACH] = fake_cuda_alloc(0, 64 + i % 3 * 10900, FAKE_CUDA_MALLOC);
        CHECK(cuIpcGetMemHandle(&handle, (CUdeviceptr)(uintptr_t)now[i % EACH]) ==
              CUDA_SUCCESS);
        memcpy(known[i], (const char *)&handle + START, LENGTH);
        for (size_t k = 0; k < i; k++)
            CHECK(memcmp(known[k], known[i], LENGTH) != 0);
        fake_cuda_free(old);
    }
    return PASSED;
}

static CUresult open_own(CUdeviceptr memory, uint64_t longer, CUdeviceptr *mapped)
{
    enum { LENGTH = 24 }; /* where it is in a handle */
    CUcontext context;
    CUipcMemHandle handle;
    uint64_t length;
    if (cuDevicePrimaryCtxRetain(&context, 0) != CUDA_SUCCESS ||
        cuCtxPushCurrent(context) != CUDA_SUCCESS ||
        cuIpcGetMemHandle(&handle, memory) != CUDA_SUCCESS)
        return CUDA_ERROR_UNKNOWN;
    memcpy(&length, (char *)&handle + LENGTH, sizeof length);
    length += longer;
    memcpy((char *)&handle + LENGTH, &length, sizeof length);
    return cuIpcOpenMemHandle(mapped, handle, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS);
}

CASE(own_memory_is_not_mapped, 0)
{
    CUdeviceptr mapped;
    CHECK(open_own((CUdeviceptr)(uintptr_t)memory_on(0), 0, &mapped) ==
          CUDA_ERROR_INVALID_CONTEXT);
    return PASSED;
}

OWN_PROCESS(own_memory_is_mapped_where_asked, .before = load_with_own_ipc)
{
    void *memory = memory_on(0);
    CUdeviceptr mapped, at = (CUdeviceptr)(uintptr_t)memory;
    CHECK(open_own(at, 0, &mapped) == CUDA_SUCCESS && mapped != at);
    *(char *)fake_cuda_alias(memory) = 'm';
    CHECK(*(char *)fake_cuda_alias((void *)(uintptr_t)mapped) == 'm');
    CHECK(cuIpcCloseMemHandle(mapped) == CUDA_SUCCESS);
    return PASSED;
}

OWN_PROCESS(handles_of_other_lengths_map_nothing, .before = load_with_own_ipc)
{
    CUdeviceptr mapped, at = (CUdeviceptr)(uintptr_t)memory_on(0);
    CHECK(open_own(at, 64, &mapped) == CUDA_ERROR_MAP_FAILED);
    CHECK(open_own(at, (uint64_t)0 - 64, &mapped) == CUDA_ERROR_MAP_FAILED);
    return PASSED;
}

/* ------------------------------------------------------------------------- main */

/* Sanitizers make an exit of the signal. */
CASE(cpu_reads_plainly, SIGSEGV)
{
    signal(SIGSEGV, SIG_DFL);
    return cpu_reads();
}
