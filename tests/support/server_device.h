/* SPDX-License-Identifier: Apache-2.0 */
/** @file Servers of device memory of the stand-in driver (fake_cuda.h), for their tests. */
#ifndef SERVER_DEVICE_H
#define SERVER_DEVICE_H

#include "fake_cuda.h"
#include "server_peer.h"

#include <stddef.h>

#define MIB ((size_t)1 << 20)
#define PATIENCE_MS 20000

/** A server of RUN, a control and a data connection, and a lease. */
typedef struct served {
    fanin_server *server;
    peer control, data;
    grant grant;
} served;

/** Says which driver to load. */
int device_set_up(void **state);

/** Memory of a device with device_byte() of its index in each byte. */
uint8_t *device_alloc(int device, size_t bytes, fake_cuda_kind kind);
uint8_t device_byte(size_t i);
const uint8_t *device_bytes(const void *memory); /**< for the CPU */

/** A server whose log is heard. */
fanin_server *device_start(uint32_t lease_ms);
/** Opens l->control and l->data over the Unix socket and takes a lease. */
void device_peers(served *l);
served device_serve(const fanin_tensor *t, size_t count);
served device_serve_bytes(void *memory, size_t size); /**< one tensor "t" */
void device_leave(served *l);
/** Nothing is left of a server but the driver's modules and contexts. */
void device_assert_clean(void);

/** Counts messages of that event from now on. */
void device_listen(const char *event);
unsigned device_heard(void);
extern char device_log_text[1024]; /**< the last of them */
void assert_says(const char *text, const char *words);

#endif
