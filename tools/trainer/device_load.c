/* SPDX-License-Identifier: Apache-2.0 */
#include "trainer/device_load.h"
#include "trainer/device_driver.h"
#include "trainer/device_work.h"
#include "fetch/failure.h"
#include "fetch/progress.h"

#include <sched.h>
#include <stdlib.h>

enum {
    SIDE = 4096, /* of the matrices; a multiple of the kernel's tile */
    HOST_SIDE = 192,
    CHAIN = 1 << 19, /* rounds of a unit, of CHAIN_OPS operations each */
    CHAIN_OPS = 4,
    BATCH_NS = 20000000,
    HOST_BATCH_NS = 5000000,
    MOST_UNITS = 1000,
    TRIALS = 3,
};
#define SWEEP_BYTES (UINT64_C(512) << 20)
#define HOST_SWEEP_BYTES (UINT64_C(64) << 20)

struct device_load {
    int device;
    device_load_kind kind;
    uint32_t units; /**< of a batch */
    void *stream, *kernel;
    void *memory[3];
    int cpu; /**< of DEVICE_LOAD_INTEGER */
};

/* ------------------------------------------------------------------------ the host */

static void host_product(const float *a, const float *b, float *c)
{
    for (size_t i = 0; i < HOST_SIDE; i++) {
        float *row = c + i * HOST_SIDE;
        for (size_t j = 0; j < HOST_SIDE; j++) {
            row[j] = 0;
        }
        for (size_t k = 0; k < HOST_SIDE; k++) {
            float factor = a[i * HOST_SIDE + k];
            for (size_t j = 0; j < HOST_SIDE; j++) {
                row[j] += factor * b[k * HOST_SIDE + j];
            }
        }
    }
}

static void host_sweep(const float *a, float *c)
{
    for (size_t i = 0; i < HOST_SWEEP_BYTES / sizeof a[0]; i++) {
        c[i] = c[i] / 2 + a[i];
    }
}

/* Each round waits for the one before it. */
static void host_chain(uint64_t *state)
{
    uint64_t x = *state;
    for (int i = 0; i < CHAIN; i++) {
        x = x * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
        x ^= x >> 29;
    }
    *state = x;
}

static void host_run(const device_load *l, uint32_t units)
{
    for (uint32_t i = 0; i < units; i++) {
        if (l->kind == DEVICE_LOAD_PRODUCT) {
            host_product(l->memory[0], l->memory[1], l->memory[2]);
        } else if (l->kind == DEVICE_LOAD_INTEGER) {
            host_chain(l->memory[0]);
        } else {
            host_sweep(l->memory[0], l->memory[2]);
        }
    }
}

/* Bound while it works only: threads that the caller starts inherit where it may run. */
static void host_run_bound(const device_load *l, uint32_t units)
{
    cpu_set_t before, one;
    CPU_ZERO(&one);
    CPU_SET(l->cpu, &one);
    bool bound = sched_getaffinity(0, sizeof before, &before) == 0 &&
                 sched_setaffinity(0, sizeof one, &one) == 0;
    host_run(l, units);
    if (bound) {
        (void)sched_setaffinity(0, sizeof before, &before);
    }
}

static fanin_status host_make(device_load *l, fanin_error *error)
{
    int cpu = sched_getcpu();
    uint64_t bytes = l->kind == DEVICE_LOAD_SWEEP
                         ? HOST_SWEEP_BYTES
                         : (uint64_t)HOST_SIDE * HOST_SIDE * sizeof(float);
    l->cpu = cpu >= 0 ? cpu : 0;
    for (int i = 0; i < 3; i++) {
        if (posix_memalign(&l->memory[i], 64, bytes) != 0) {
            l->memory[i] = NULL;
            return failure_memory(error, "the trainer's load");
        }
        float *numbers = l->memory[i];
        for (size_t n = 0; n < bytes / sizeof numbers[0]; n++) {
            numbers[n] = (float)(n % 251) / 251;
        }
    }
    return FANIN_OK;
}

/* ---------------------------------------------------------------------- the devices */

static fanin_status allocate(device_load *l, uint64_t operand, uint64_t result,
                             fanin_error *error)
{
    fanin_status status = device_alloc(l->device, operand, &l->memory[0], error);
    if (status == FANIN_OK && l->kind == DEVICE_LOAD_PRODUCT) {
        status = device_alloc(l->device, operand, &l->memory[1], error);
    }
    return status == FANIN_OK ? device_alloc(l->device, result, &l->memory[2], error)
                              : status;
}

/* Numbers that are no zeros: those are computed faster than real ones. */
static fanin_status fill(device_load *l, void *memory, uint64_t bytes,
                         fanin_error *error)
{
    void *kernel;
    const work_parameters parameters = {.c = memory, .count = bytes / 2};
    fanin_status status = device_kernel(l->device, device_load_image(),
                                        DEVICE_HALVES_KERNEL, &kernel, error);
    return status == FANIN_OK
               ? device_launch(l->device, l->stream, kernel,
                               DEVICE_BLOCKS_EACH * device_processors(l->device),
                               DEVICE_WORK_THREADS, &parameters, error)
               : status;
}

static fanin_status queue(device_load *l, uint32_t units, fanin_error *error)
{
    bool product = l->kind == DEVICE_LOAD_PRODUCT;
    const work_parameters parameters = {
        .a = l->memory[0],
        .b = l->memory[1],
        .c = l->memory[2],
        .count = product ? SIDE : SWEEP_BYTES / 16,
    };
    uint32_t tiles = SIDE / DEVICE_PRODUCT_TILE;
    uint32_t blocks =
        product ? tiles * tiles : DEVICE_BLOCKS_EACH * device_processors(l->device);
    for (uint32_t i = 0; i < units; i++) {
        fanin_status status = device_launch(l->device, l->stream, l->kernel, blocks,
                                            DEVICE_WORK_THREADS, &parameters, error);
        if (status != FANIN_OK) {
            return status;
        }
    }
    return FANIN_OK;
}

static fanin_status run_units(device_load *l, uint32_t units, fanin_error *error)
{
    if (l->device == DEVICE_HOST) {
        if (l->kind == DEVICE_LOAD_INTEGER) {
            host_run_bound(l, units);
        } else {
            host_run(l, units);
        }
        return FANIN_OK;
    }
    fanin_status status = queue(l, units, error);
    return status == FANIN_OK ? device_wait(l->device, l->stream, error) : status;
}

/* Finds the size of a batch. */
static fanin_status calibrate(device_load *l, fanin_error *error)
{
    uint64_t least = UINT64_MAX;
    for (int i = 0; i < TRIALS; i++) {
        uint64_t start = progress_now_ns();
        fanin_status status = run_units(l, 1, error);
        if (status != FANIN_OK) {
            return status;
        }
        uint64_t took = progress_now_ns() - start;
        least = took < least ? took : least;
    }
    uint64_t batch = l->device == DEVICE_HOST ? HOST_BATCH_NS : BATCH_NS;
    uint64_t units = batch / (least > 0 ? least : 1);
    l->units = units < 1 ? 1 : units > MOST_UNITS ? MOST_UNITS : (uint32_t)units;
    return FANIN_OK;
}

static fanin_status make(device_load *l, fanin_error *error)
{
    bool product = l->kind == DEVICE_LOAD_PRODUCT;
    uint64_t operand = product ? (uint64_t)SIDE * SIDE * 2 : SWEEP_BYTES;
    uint64_t result = product ? (uint64_t)SIDE * SIDE * 4 : SWEEP_BYTES;
    fanin_status status = device_open(l->device, error);
    status = status != FANIN_OK ? status : device_stream(l->device, &l->stream, error);
    if (status == FANIN_OK) {
        status = device_kernel(l->device, device_load_image(),
                               product ? DEVICE_PRODUCT_KERNEL : DEVICE_SWEEP_KERNEL,
                               &l->kernel, error);
    }
    status = status != FANIN_OK ? status : allocate(l, operand, result, error);
    for (int i = 0; status == FANIN_OK && i < 3; i++) {
        if (l->memory[i] != NULL) {
            status = fill(l, l->memory[i], i == 2 ? result : operand, error);
        }
    }
    return status;
}

fanin_status device_load_make(int device, device_load_kind kind, device_load **out,
                              fanin_error *error)
{
    device_load *l = calloc(1, sizeof *l);
    *out = l;
    if (l == NULL) {
        return failure_memory(error, "the trainer's load");
    }
    l->device = device;
    l->kind = kind;
    fanin_status status = device == DEVICE_HOST ? host_make(l, error) : make(l, error);
    return status == FANIN_OK ? calibrate(l, error) : status;
}

void device_load_free(device_load **load)
{
    device_load *l = load != NULL ? *load : NULL;
    fanin_error ignored = FANIN_ERROR_INIT;
    if (l == NULL) {
        return;
    }
    if (l->stream != NULL) {
        (void)device_wait(l->device, l->stream, &ignored);
        device_stream_free(l->device, l->stream);
    }
    for (int i = 0; i < 3; i++) {
        if (l->device == DEVICE_HOST) {
            free(l->memory[i]);
        } else {
            device_free(l->device, l->memory[i]);
        }
    }
    free(l);
    *load = NULL;
}

fanin_status device_load_run(device_load *load, uint64_t *units_out, fanin_error *error)
{
    *units_out = load->units;
    return run_units(load, load->units, error);
}

double device_load_size(int device, device_load_kind kind)
{
    double side = device == DEVICE_HOST ? HOST_SIDE : SIDE;
    double bytes = (double)(device == DEVICE_HOST ? HOST_SWEEP_BYTES : SWEEP_BYTES);
    if (kind == DEVICE_LOAD_INTEGER) {
        return (double)CHAIN * CHAIN_OPS;
    }
    return kind == DEVICE_LOAD_PRODUCT ? 2 * side * side * side : 3 * bytes;
}
