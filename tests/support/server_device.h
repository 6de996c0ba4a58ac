/* SPDX-License-Identifier: Apache-2.0 */
/** @file Servers of device memory of the stand-in driver (fake_cuda.h), for their tests. */
#ifndef SERVER_DEVICE_H
#define SERVER_DEVICE_H

#include "fake_cuda.h"
#include "server_peer.h"

#include <stddef.h>

#define MIB ((size_t)1 << 20)

/** As SERVER_TEST(), and what device_alloc() gave is freed behind it. */
#define DEVICE_TEST(name) TEST_WITH(name, NULL, device_tear_down)
int device_tear_down(void **state);
/** Then nothing is left but the driver's modules and contexts. */
#define DEVICE_CLEAN_TEST(name) TEST_WITH(name, NULL, device_tear_down_clean)
int device_tear_down_clean(void **state);

/** Memory of a device with device_byte() of its index in each byte. */
uint8_t *device_alloc(int device, size_t bytes, fake_cuda_kind kind);
void device_free(void *memory); /**< before the test ends */
uint8_t device_byte(size_t i);
const uint8_t *device_bytes(const void *memory); /**< for the CPU */

/** A server of these and a puller over the Unix socket, with a lease. */
puller device_serve(const fanin_tensor *t, size_t count);
puller device_serve_bytes(void *memory, size_t size); /**< one tensor "t" */

#endif
