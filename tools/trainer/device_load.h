/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file
 * Work like a trainer's, in batches of some milliseconds, counted: what publishing costs a trainer
 * is read off how much of it gets done. Of a GPU, or of one core of the host.
 */
#ifndef DEVICE_LOAD_H
#define DEVICE_LOAD_H

#include <fanin/error.h>
#include <stdint.h>

/** What is repeated. */
typedef enum device_load_kind {
    DEVICE_LOAD_NONE,
    DEVICE_LOAD_PRODUCT, /**< of two matrices: of halves, 4096 by 4096, by tensor cores; on the host
                            of floats, 192 by 192, which stay in its caches */
    DEVICE_LOAD_SWEEP, /**< reading and writing memory: 1 GiB in, 0.5 GiB out; on the host an
                            eighth of it */
    DEVICE_LOAD_INTEGER, /**< of the host only: a chain of integer operations in registers, by a
                            thread that stays on one CPU. Its time varies by what takes that CPU,
                            and by little else */
} device_load_kind;

typedef struct device_load device_load;

/** Allocates (1.1 GiB at most) and measures how many units make a batch of about 20 ms (of the
    host: 5 ms). @p device may be DEVICE_HOST. Blocks for that. Errors are device_driver.h's; *out
    is to be freed also then. */
fanin_status device_load_make(int device, device_load_kind kind, device_load **out,
                              fanin_error *error);
/** NULL and *load == NULL are fine. */
void device_load_free(device_load **load);

/** Does a batch and waits for it; *units_out: how many units it had. */
fanin_status device_load_run(device_load *load, uint64_t *units_out,
                             fanin_error *error);

/** Operations (product, integer) or bytes (sweep) of a unit. */
double device_load_size(int device, device_load_kind kind);

#endif
