/* SPDX-License-Identifier: Apache-2.0 */
/* What gpu.h says of pointers, memory and streams, on the stand-in for the CUDA driver. */
#include "fake_cuda.h"
#include "gpu.h"
#include "testing.h"
#include <cuda.h>
#include <pthread.h>
#include <sys/mman.h>

#define SIZE ((size_t)64 << 10)
#define SOON deadline_in_ms(20000)

static gpu *g;
static CUcontext contexts[2]; /* the tests' own references to the devices' contexts */
static fanin_error failure;
static fake_cuda_counts before;

static CUcontext current(void)
{
    CUcontext context;
    assert_int_equal(cuCtxGetCurrent(&context), CUDA_SUCCESS);
    return context;
}

static int set_up_all(void **state)
{
    for (int i = 0; i < 2; i++)
        if (cuInit(0) != CUDA_SUCCESS ||
            cuDevicePrimaryCtxRetain(&contexts[i], i) != CUDA_SUCCESS)
            return -1;
    /* Kernels of device 1 may read device 0, as a program's own might. */
    if (cuCtxPushCurrent(contexts[1]) != CUDA_SUCCESS ||
        cuCtxEnablePeerAccess(contexts[0], 0) != CUDA_SUCCESS ||
        cuCtxPopCurrent(NULL) != CUDA_SUCCESS)
        return -1;
    /* What is made once for a device and stays. */
    const copy_entry e = {.run = 1, .runs = 1};
    fanin_status status = gpu_load(NULL, &g, NULL);
    for (int i = 0; i < 2 && status == FANIN_OK; i++) {
        gpu_table *t;
        status = gpu_table_create(g, i, &e, 1, 1, &t, NULL);
        if (status == FANIN_OK)
            gpu_table_destroy(&t);
    }
    return status;
}

static int set_up(void **state)
{
    failure = (fanin_error)FANIN_ERROR_INIT;
    fake_cuda_count(&before);
    return current() != NULL;
}

/* Nothing is left, and this thread's context is as it was. */
static int tear_down(void **state)
{
    fake_cuda_counts after;
    fake_cuda_count(&after);
    bool same = after.allocations == before.allocations &&
                after.pinned == before.pinned && after.mappings == before.mappings &&
                after.streams == before.streams && after.events == before.events &&
                after.retains == before.retains;
    if (!same)
        fprintf(
            stderr,
            "left: %d allocations, %d pinned, %d streams, %d events, %d retains\n",
            (int)(after.allocations - before.allocations),
            (int)(after.pinned - before.pinned), (int)(after.streams - before.streams),
            (int)(after.events - before.events), (int)(after.retains - before.retains));
    return !same || current() != NULL;
}

#define CASE(name) TEST_WITH(name, set_up, tear_down)

static gpu_stream *stream_on(int device)
{
    gpu_stream *s;
    assert_ok(gpu_stream_create(g, device, &s, &failure), failure);
    return s;
}

static uint8_t *memory_on(int device)
{
    void *memory;
    assert_ok(gpu_alloc(g, device, SIZE, &memory, &failure), failure);
    return memory;
}

static void fill(void *device_memory, uint8_t value)
{
    memset(fake_cuda_alias(device_memory), value, SIZE);
}

static bool holds(void *device_memory, uint8_t value)
{
    const uint8_t *bytes = fake_cuda_alias(device_memory);
    for (size_t i = 0; i < SIZE; i++)
        if (bytes[i] != value)
            return false;
    return true;
}

/* The error says so, in the driver's words too. */
static void assert_told(fanin_status status, fanin_status expected, const char *word)
{
    assert_int_equal(status, expected);
    assert_int_equal(failure.status, expected);
    if (strstr(failure.message, word) == NULL && strstr(failure.remedy, word) == NULL)
        fail_msg("\"%s\" (%s) does not say \"%s\"", failure.message, failure.remedy,
                 word);
}

/* --------------------------------------------------------------------- devices */

CASE(test_devices)
{
    gpu_device d;
    for (int i = 0; i < 2; i++) {
        assert_ok(gpu_device_get(g, i, &d, &failure), failure);
        assert_string_equal(d.name, "Fake GPU");
        assert_string_equal(d.pci, i == 0 ? "0000:1b:00.0" : "0000:1c:00.0");
        assert_int_equal(d.major * 10 + d.minor, 90);
        assert_int_equal(d.memory, (uint64_t)16 << 30);
        assert_int_equal(gpu_device_of_uuid(g, d.uuid), i);
        assert_true(gpu_can_access(g, i, i));
        assert_true(gpu_can_access(g, i, 1 - i));
    }
    d.uuid[0] ^= 1;
    assert_int_equal(gpu_device_of_uuid(g, d.uuid), -1);
    assert_told(gpu_device_get(g, 2, &d, &failure), FANIN_ERR_ARGUMENT, "2");
    assert_told(gpu_device_get(g, -1, &d, &failure), FANIN_ERR_ARGUMENT, "-1");
    assert_false(gpu_can_access(g, 0, 2));
    assert_false(gpu_can_access(g, -1, 0));
}

CASE(test_no_such_device)
{
    void *memory;
    gpu_stream *s;
    gpu_table *t;
    const copy_entry entry = {.run = 4, .runs = 1};
    uint8_t handle[GPU_HANDLE_SIZE] = {0};
    assert_told(gpu_alloc(g, 2, SIZE, &memory, &failure), FANIN_ERR_ARGUMENT, "2");
    assert_told(gpu_map(g, 2, handle, &memory, &failure), FANIN_ERR_ARGUMENT, "2");
    assert_told(gpu_stream_create(g, 2, &s, &failure), FANIN_ERR_ARGUMENT, "2");
    assert_told(gpu_table_create(g, 2, &entry, 1, 1, &t, &failure), FANIN_ERR_ARGUMENT,
                "2");
    assert_told(gpu_context_enter(g, 2, &failure), FANIN_ERR_ARGUMENT, "2");
    assert_told(gpu_flush_remote_writes(g, 2, &failure), FANIN_ERR_ARGUMENT, "2");
}

/* Other libraries' contexts are put back, whatever is called between. */
CASE(test_contexts)
{
    assert_int_equal(cuCtxPushCurrent(contexts[1]), CUDA_SUCCESS);
    void *memory;
    gpu_range range;
    assert_ok(gpu_alloc(g, 0, SIZE, &memory, &failure), failure);
    assert_ptr_equal(current(), contexts[1]);
    assert_ok(gpu_range_of(g, memory, &range, &failure), failure);
    gpu_stream *s = stream_on(0);
    assert_ok(gpu_stream_wait(s, SOON, &failure), failure);
    gpu_stream_destroy(&s);
    gpu_free(g, 0, memory);
    assert_ptr_equal(current(), contexts[1]);
    assert_ok(gpu_context_enter(g, 0, &failure), failure);
    assert_ptr_equal(current(), contexts[0]);
    assert_ok(gpu_context_enter(g, 1, &failure), failure);
    gpu_context_leave(g);
    assert_ptr_equal(current(), contexts[0]);
    gpu_context_leave(g);
    assert_ok(gpu_flush_remote_writes(g, 0, &failure), failure);
    assert_ptr_equal(current(), contexts[1]);
    assert_int_equal(cuCtxPopCurrent(NULL), CUDA_SUCCESS);
}

/* -------------------------------------------------------------------- pointers */

CASE(test_kinds_of_memory)
{
    static const struct {
        fake_cuda_kind kind;
        gpu_origin origin;
    } kinds[] = {
        {FAKE_CUDA_MALLOC, GPU_ORIGIN_MALLOC},
        {FAKE_CUDA_VIRTUAL, GPU_ORIGIN_VIRTUAL},
        {FAKE_CUDA_POOL, GPU_ORIGIN_POOL},
        {FAKE_CUDA_MANAGED, GPU_ORIGIN_MANAGED},
    };
    uint64_t last_id = 0;
    for (int i = 0; i < 8; i++) {
        gpu_range r;
        uint8_t handle[GPU_HANDLE_SIZE];
        uint8_t *memory = fake_cuda_alloc(i / 4, SIZE, kinds[i % 4].kind);
        assert_ok(gpu_range_of(g, memory + SIZE - 1, &r, &failure), failure);
        assert_int_equal(r.memory.kind, FANIN_MEMORY_CUDA);
        assert_int_equal(r.memory.device, i / 4);
        assert_int_equal(r.origin, kinds[i % 4].origin);
        assert_int_equal(r.base, (uintptr_t)memory);
        assert_int_equal(r.length, SIZE);
        assert_int_not_equal(r.id, last_id);
        last_id = r.id;
        if (r.origin == GPU_ORIGIN_MALLOC)
            assert_ok(gpu_export(g, &r, handle, &failure), failure);
        else
            assert_told(gpu_export(g, &r, handle, &failure), FANIN_ERR_UNSUPPORTED,
                        gpu_origin_name(r.origin));
        fake_cuda_free(memory);
    }
}

CASE(test_remedy_of_virtual_memory)
{
    gpu_range r;
    uint8_t handle[GPU_HANDLE_SIZE];
    void *memory = fake_cuda_alloc(0, SIZE, FAKE_CUDA_VIRTUAL);
    assert_ok(gpu_range_of(g, memory, &r, &failure), failure);
    assert_told(gpu_export(g, &r, handle, &failure), FANIN_ERR_UNSUPPORTED,
                "expandable_segments");
    fake_cuda_free(memory);
}

static void assert_host(const void *pointer)
{
    gpu_range r;
    assert_ok(gpu_range_of(g, pointer, &r, &failure), failure);
    assert_int_equal(r.memory.kind, FANIN_MEMORY_HOST);
    assert_int_equal(r.memory.device, -1);
    assert_int_equal(r.origin, GPU_ORIGIN_HOST);
    assert_int_equal(r.base, 0);
    assert_int_equal(r.length, 0);
}

CASE(test_host_memory)
{
    void *pinned;
    assert_host(state);
    assert_host(NULL);
    assert_ok(gpu_host_alloc(g, SIZE, &pinned, &failure), failure);
    assert_host((char *)pinned + 5);
    gpu_host_free(g, pinned);
}

CASE(test_neighbours)
{
    gpu_range r;
    void *first, *second;
    assert_ok(gpu_alloc(g, 0, 512, &first, &failure), failure);
    assert_ok(gpu_alloc(g, 0, 512, &second, &failure), failure);
    assert_int_equal((uintptr_t)second - (uintptr_t)first, 512);
    assert_ok(gpu_range_of(g, second, &r, &failure), failure);
    assert_int_equal(r.base, (uintptr_t)second);
    uint64_t id = r.id;
    gpu_free(g, 0, second);
    assert_host(second);
    void *again;
    assert_ok(gpu_alloc(g, 0, 512, &again, &failure), failure);
    assert_ptr_equal(again, second);
    assert_ok(gpu_range_of(g, again, &r, &failure), failure);
    assert_int_not_equal(r.id, id);
    gpu_free(g, 0, first);
    gpu_free(g, 0, again);
}

/* ---------------------------------------------------------------------- memory */

CASE(test_memory_runs_out)
{
    void *memory = NULL;
    assert_told(gpu_alloc(g, 1, (size_t)17 << 30, &memory, &failure), FANIN_ERR_MEMORY,
                "device 1");
    assert_non_null(strstr(failure.message, "18253611008"));
    assert_null(memory);
    fake_cuda_fail("cuMemHostAlloc", CUDA_ERROR_OUT_OF_MEMORY, 0, 1);
    assert_told(gpu_host_alloc(g, 12345, &memory, &failure), FANIN_ERR_MEMORY, "12345");
    assert_null(memory);
}

CASE(test_pinning)
{
    gpu_stream *s = stream_on(0);
    uint8_t *device = memory_on(0);
    uint8_t *host =
        mmap(NULL, SIZE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    assert_true(host != MAP_FAILED);
    assert_ok(gpu_pin(g, host, SIZE, &failure), failure);
    assert_host(host);
    fake_cuda_hold(0);
    memset(host, 5, SIZE);
    assert_ok(gpu_copy(s, device, host, SIZE, &failure),
              failure); /* returns: it is pinned */
    assert_ok(gpu_copy(s, host, device, SIZE, &failure), failure);
    memset(host, 6, SIZE); /* and not read before the stream gets there */
    fake_cuda_release(0);
    assert_ok(gpu_stream_wait(s, SOON, &failure), failure);
    assert_true(holds(device, 6));
    assert_told(gpu_pin(g, host, SIZE, &failure), FANIN_ERR_EXISTS, "pinned already");
    gpu_unpin(g, host);
    fake_cuda_fail("cuMemHostRegister_v2", CUDA_ERROR_OUT_OF_MEMORY, 0, 1);
    assert_told(gpu_pin(g, host, SIZE, &failure), FANIN_ERR_LIMIT, "ulimit -l");
    munmap(host, SIZE);
    gpu_free(g, 0, device);
    gpu_stream_destroy(&s);
}

CASE(test_errors_are_named)
{
    gpu_range r;
    gpu_stream *s = stream_on(0);
    gpu_stream *other;
    uint8_t handle[GPU_HANDLE_SIZE] = {0};
    void *memory = memory_on(0), *more;
    assert_ok(gpu_range_of(g, memory, &r, &failure), failure);
    fake_cuda_fail("cuMemAlloc_v2", CUDA_ERROR_UNKNOWN, 0, 1);
    assert_told(gpu_alloc(g, 0, 1, &more, &failure), FANIN_ERR_TRANSPORT,
                "CUDA_ERROR_UNKNOWN");
    assert_non_null(strstr(failure.message, "unknown error"));
    fake_cuda_fail("cuPointerGetAttributes", CUDA_ERROR_UNKNOWN, 0, 1);
    assert_told(gpu_range_of(g, memory, &r, &failure), FANIN_ERR_TRANSPORT,
                "CUDA_ERROR_UNKNOWN");
    fake_cuda_fail("cuMemcpyAsync", CUDA_ERROR_ILLEGAL_ADDRESS, 0, 1);
    assert_told(gpu_copy(s, memory, memory, 1, &failure), FANIN_ERR_TRANSPORT,
                "CUDA_ERROR_ILLEGAL_ADDRESS");
    fake_cuda_fail("cuStreamCreate", CUDA_ERROR_ECC_UNCORRECTABLE, 0, 1);
    assert_told(gpu_stream_create(g, 0, &other, &failure), FANIN_ERR_TRANSPORT,
                "CUDA_ERROR_ECC_UNCORRECTABLE");
    fake_cuda_fail("cuCtxPushCurrent_v2", CUDA_ERROR_UNKNOWN, 0, 1);
    assert_told(gpu_alloc(g, 0, 1, &more, &failure), FANIN_ERR_TRANSPORT,
                "CUDA_ERROR_UNKNOWN");
    fake_cuda_fail("cuIpcGetMemHandle", CUDA_ERROR_INVALID_VALUE, 0, 1);
    assert_told(
        gpu_export(g, &(gpu_range){.memory = r.memory, .origin = GPU_ORIGIN_MALLOC},
                   handle, &failure),
        FANIN_ERR_TRANSPORT, "CUDA_ERROR_INVALID_VALUE");
    assert_told(gpu_copy(s, (uint8_t *)memory + SIZE - 1, memory, 2, &failure),
                FANIN_ERR_TRANSPORT, "CUDA_ERROR_INVALID_VALUE");
    gpu_free(g, 0, memory);
    gpu_free(g, 0, NULL);
    gpu_unmap(g, 0, NULL);
    gpu_stream_destroy(&s);
    gpu_stream_destroy(&s);
}

/* --------------------------------------------------------------------- streams */

/* Device to device, over devices, to and from pageable memory. */
CASE(test_copies)
{
    gpu_stream *s = stream_on(0);
    uint8_t *a = memory_on(0), *b = memory_on(1), *host = malloc(SIZE);
    assert_non_null(host);
    memset(host, 9, SIZE);
    assert_ok(gpu_copy(s, a, host, SIZE, &failure), failure);
    assert_ok(gpu_copy(s, b, a, SIZE, &failure), failure);
    memset(host, 0, SIZE);
    assert_ok(gpu_copy(s, host, b, SIZE, &failure), failure);
    assert_ok(gpu_stream_wait(s, SOON, &failure), failure);
    assert_true(holds(a, 9) && holds(b, 9));
    assert_int_equal(host[0], 9);
    assert_memory_equal(host, host + 1, SIZE - 1);
    free(host);
    gpu_free(g, 0, a);
    gpu_free(g, 1, b);
    gpu_stream_destroy(&s);
    assert_null(s);
}

CASE(test_waiting_has_a_deadline)
{
    gpu_stream *s = stream_on(0);
    uint8_t *a = memory_on(0), *b = memory_on(0);
    fill(a, 1);
    fill(b, 2);
    assert_ok(gpu_stream_wait(s, deadline_in_ms(0), &failure),
              failure); /* nothing to wait for */
    fake_cuda_hold(0);
    assert_ok(gpu_copy(s, a, b, SIZE, &failure), failure);
    uint64_t begin = clock_ns();
    assert_told(gpu_stream_wait(s, deadline_in_ms(50), &failure), FANIN_ERR_TIMEOUT,
                "");
    assert_true(clock_ns() - begin >= 50000000);
    assert_told(gpu_stream_wait(s, 0, &failure), FANIN_ERR_TIMEOUT, "");
    assert_true(holds(a, 1));
    fake_cuda_release(0);
    assert_ok(gpu_stream_wait(s, SOON, &failure), failure);
    assert_true(holds(a, 2));
    gpu_free(g, 0, a);
    gpu_free(g, 0, b);
    gpu_stream_destroy(&s);
}

/* A stream of the caller's, of torch's kind, on that device; or a default one. */
static fanin_stream callers_stream(int device, uintptr_t number)
{
    CUstream handle = (CUstream)number;
    if (number == 0) {
        assert_int_equal(cuCtxPushCurrent(contexts[device]), CUDA_SUCCESS);
        assert_int_equal(cuStreamCreate(&handle, CU_STREAM_NON_BLOCKING), CUDA_SUCCESS);
        assert_int_equal(cuCtxPopCurrent(NULL), CUDA_SUCCESS);
    }
    return (fanin_stream){.handle = handle, .device = device};
}

static void drop_stream(const fanin_stream *s)
{
    if ((uintptr_t)s->handle <= 2)
        return;
    assert_int_equal(cuCtxPushCurrent(contexts[s->device]), CUDA_SUCCESS);
    assert_int_equal(cuStreamDestroy(s->handle), CUDA_SUCCESS);
    assert_int_equal(cuCtxPopCurrent(NULL), CUDA_SUCCESS);
}

static void put_on(const fanin_stream *s, void *to, int value)
{
    assert_int_equal(cuCtxPushCurrent(contexts[s->device]), CUDA_SUCCESS);
    assert_int_equal(cuMemsetD8Async((CUdeviceptr)(uintptr_t)to, (unsigned char)value,
                                     SIZE, s->handle),
                     CUDA_SUCCESS);
    assert_int_equal(cuCtxPopCurrent(NULL), CUDA_SUCCESS);
}

/* Our copy waits for the caller's write on a stream of its device, which is held. */
static void check_after(int device, uintptr_t number)
{
    fanin_stream callers = callers_stream(device, number);
    gpu_stream *s = stream_on(0);
    uint8_t *from = memory_on(device), *to = memory_on(0);
    fill(from, 1);
    put_on(&callers, from, 1);
    assert_true(fake_cuda_wait_idle(device));
    assert_int_equal(cuCtxPushCurrent(contexts[device]), CUDA_SUCCESS);
    fake_cuda_hold_stream(callers.handle);
    assert_int_equal(cuCtxPopCurrent(NULL), CUDA_SUCCESS);
    put_on(&callers, from, 2);
    assert_ok(gpu_stream_after(s, &callers, &failure), failure);
    assert_ok(gpu_copy(s, to, from, SIZE, &failure), failure);
    assert_told(gpu_stream_wait(s, deadline_in_ms(20), &failure), FANIN_ERR_TIMEOUT,
                "");
    fake_cuda_release(device);
    assert_ok(gpu_stream_wait(s, SOON, &failure), failure);
    assert_true(holds(to, 2));
    gpu_stream_destroy(&s);
    drop_stream(&callers);
    gpu_free(g, device, from);
    gpu_free(g, 0, to);
}

/* The caller's write waits for our copy. */
static void check_before(int device, uintptr_t number)
{
    fanin_stream callers = callers_stream(device, number);
    gpu_stream *s = stream_on(1);
    uint8_t *from = memory_on(device), *to = memory_on(1);
    fill(from, 1);
    fake_cuda_hold_kernel(1, 0);
    const copy_entry entry = {
        .from = (uintptr_t)from, .to = (uintptr_t)to, .run = SIZE, .runs = 1};
    gpu_table *t;
    assert_ok(gpu_table_create(g, 1, &entry, 1, 1, &t, &failure), failure);
    assert_ok(gpu_table_run(t, s, 0, 1, 0, 0, &failure), failure);
    assert_true(fake_cuda_wait_kernel_held(1));
    assert_ok(gpu_stream_before(s, &callers, &failure), failure);
    put_on(&callers, from, 2);
    assert_true(holds(from, 1));
    fake_cuda_release(1);
    assert_true(fake_cuda_wait_idle(device));
    assert_ok(gpu_stream_wait(s, SOON, &failure), failure);
    assert_true(holds(to, 1) && holds(from, 2));
    gpu_table_destroy(&t);
    gpu_stream_destroy(&s);
    drop_stream(&callers);
    gpu_free(g, device, from);
    gpu_free(g, 1, to);
}

CASE(test_order_with_callers_streams)
{
    for (int device = 0; device < 2; device++)
        for (uintptr_t number = 0; number <= 2; number++) {
            check_after(device, number);
            check_before(device, number);
        }
}

/* ------------------------------------------------------------------- callbacks */

typedef struct reached {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    int times;
    bool failed;
} reached;

static void on_reached(void *cookie, bool failed)
{
    reached *r = cookie;
    pthread_mutex_lock(&r->lock);
    r->times++;
    r->failed = failed;
    pthread_cond_signal(&r->changed);
    pthread_mutex_unlock(&r->lock);
}

static void assert_reached(reached *r, bool failed)
{
    pthread_mutex_lock(&r->lock);
    while (r->times == 0)
        pthread_cond_wait(&r->changed, &r->lock);
    assert_int_equal(r->times, 1);
    assert_int_equal(r->failed, failed);
    pthread_mutex_unlock(&r->lock);
}

CASE(test_notification)
{
    for (uintptr_t number = 0; number <= 3; number++) {
        reached r = {PTHREAD_MUTEX_INITIALIZER, PTHREAD_COND_INITIALIZER, 0, false};
        gpu_stream *s = stream_on(1);
        fanin_stream callers = callers_stream(1, number % 3);
        fake_cuda_hold(1);
        if (number == 3)
            assert_ok(gpu_stream_notify(s, on_reached, &r, &failure), failure);
        else
            assert_ok(gpu_notify(g, &callers, on_reached, &r, &failure), failure);
        assert_true(fake_cuda_wait_queued(1, 1));
        pthread_mutex_lock(&r.lock);
        assert_int_equal(r.times, 0);
        pthread_mutex_unlock(&r.lock);
        fake_cuda_release(1);
        assert_reached(&r, false);
        assert_true(fake_cuda_wait_idle(1));
        assert_int_equal(r.times, 1);
        drop_stream(&callers);
        gpu_stream_destroy(&s);
    }
}

/* What cannot be queued is an error, and nobody is called. */
CASE(test_notification_refused)
{
    reached r = {PTHREAD_MUTEX_INITIALIZER, PTHREAD_COND_INITIALIZER, 0, false};
    gpu_stream *s = stream_on(0);
    fake_cuda_fail("cuStreamAddCallback", CUDA_ERROR_UNKNOWN, 0, 1);
    assert_told(gpu_stream_notify(s, on_reached, &r, &failure), FANIN_ERR_TRANSPORT,
                "CUDA_ERROR_UNKNOWN");
    assert_ok(gpu_stream_wait(s, SOON, &failure), failure);
    int no_stream;
    fanin_stream callers = {.handle = &no_stream, .device = 0};
    assert_told(gpu_notify(g, &callers, on_reached, &r, &failure), FANIN_ERR_TRANSPORT,
                "CUDA_ERROR_INVALID_HANDLE");
    assert_int_equal(r.times, 0);
    gpu_stream_destroy(&s);
}

/* --------------------------------------------------------------- failed device */

/* --------------------------------------------------------------------- threads */

static void *work(void *cookie)
{
    int device = *(int *)cookie;
    for (int i = 0; i < 50; i++) {
        gpu_stream *s;
        void *a, *b;
        gpu_range r;
        bool good = gpu_stream_create(g, device, &s, NULL) == FANIN_OK &&
                    gpu_alloc(g, device, SIZE, &a, NULL) == FANIN_OK &&
                    gpu_alloc(g, 1 - device, SIZE, &b, NULL) == FANIN_OK;
        good = good && gpu_range_of(g, b, &r, NULL) == FANIN_OK &&
               r.memory.device == 1 - device &&
               gpu_copy(s, a, b, SIZE, NULL) == FANIN_OK &&
               gpu_stream_wait(s, SOON, NULL) == FANIN_OK;
        if (!good)
            return cookie;
        gpu_free(g, device, a);
        gpu_free(g, 1 - device, b);
        gpu_stream_destroy(&s);
    }
    return NULL;
}

CASE(test_threads)
{
    pthread_t threads[4];
    int devices[4] = {0, 1, 0, 1};
    for (int i = 0; i < 4; i++)
        assert_int_equal(pthread_create(&threads[i], NULL, work, &devices[i]), 0);
    for (int i = 0; i < 4; i++) {
        void *wrong;
        assert_int_equal(pthread_join(threads[i], &wrong), 0);
        assert_null(wrong);
    }
}

/* The last test: the device is repaired, but what was on it is lost. */
CASE(test_failed_device)
{
    reached queued = {PTHREAD_MUTEX_INITIALIZER, PTHREAD_COND_INITIALIZER, 0, false};
    reached late = queued;
    gpu_stream *s = stream_on(1);
    uint8_t *a = memory_on(1);
    void *more;
    fake_cuda_hold(1);
    assert_ok(gpu_copy(s, a, a + 1, 1, &failure), failure);
    assert_ok(gpu_stream_notify(s, on_reached, &queued, &failure), failure);
    fake_cuda_break(1);
    assert_reached(&queued, true);
    assert_told(gpu_stream_wait(s, SOON, &failure), FANIN_ERR_TRANSPORT,
                "CUDA_ERROR_LAUNCH_FAILED");
    assert_told(gpu_copy(s, a, a + 1, 1, &failure), FANIN_ERR_TRANSPORT,
                "CUDA_ERROR_LAUNCH_FAILED");
    assert_told(gpu_alloc(g, 1, 1, &more, &failure), FANIN_ERR_TRANSPORT,
                "CUDA_ERROR_LAUNCH_FAILED");
    assert_told(gpu_stream_notify(s, on_reached, &late, &failure), FANIN_ERR_TRANSPORT,
                "CUDA_ERROR_LAUNCH_FAILED");
    assert_int_equal(late.times, 0);
    /* The other one works. */
    gpu_stream *other = stream_on(0);
    assert_ok(gpu_stream_wait(other, SOON, &failure), failure);
    gpu_stream_destroy(&other);
    fake_cuda_repair(1);
    fake_cuda_release(1);
    assert_int_equal(queued.times, 1);
    gpu_stream_destroy(&s);
    gpu_free(g, 1, a);
}

TESTS_BETWEEN(set_up_all, NULL)
