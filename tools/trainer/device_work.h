/* SPDX-License-Identifier: Apache-2.0 */
/** @file What the kernels of device_load.cu are started with. Read by their compiler too. */
#ifndef DEVICE_WORK_H
#define DEVICE_WORK_H

#include <stdint.h>

typedef struct work_parameters {
    void *a, *b, *c; /**< of one device */
    uint64_t count;
} work_parameters;

/** c = a * b^T: count by count numbers, halves a and b, floats c; count is a multiple of
    DEVICE_PRODUCT_TILE, of whose squares each block makes one. */
#define DEVICE_PRODUCT_KERNEL "fanin_product"
/** c = c / 2 + a: count groups of four floats. */
#define DEVICE_SWEEP_KERNEL "fanin_sweep"
/** c = numbers between -1 and 1: count halves. */
#define DEVICE_HALVES_KERNEL "fanin_halves"
/** The kernels as fat binaries; NULL in a build without CUDA's compiler. */
const void *device_load_image(void);
enum { DEVICE_WORK_THREADS = 256, DEVICE_PRODUCT_TILE = 128 };

#endif
