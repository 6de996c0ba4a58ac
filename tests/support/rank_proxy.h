/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file
 * A man in the middle: stands for one rank on a port of its own (TCP and the Unix name that
 * belongs to it), passes everything on, and calls a function just before the first request
 * of one type goes through. On the Unix name it says its own address instead of the rank's, as
 * whoever really listened there would.
 */
#ifndef RANK_PROXY_H
#define RANK_PROXY_H

#include "frame.h"
#include <pthread.h>
#include <stdatomic.h>

typedef struct rank_proxy {
    char address[32]; /**< to be given to clients instead of the rank's */
    uint16_t target;
    message_type when;
    void (*trigger)(void *cookie);
    void *cookie;
    atomic_bool triggered;
    atomic_bool keeps_address; /**< the rank's address is said on the Unix name, too */
    atomic_uint accepted[2];   /**< connections over TCP, over the Unix name */
    int listeners[2], wake;
    pthread_t thread;
} rank_proxy;

/** Stands for 127.0.0.1:@p target. @p trigger runs in the proxy's thread. Fails the test. */
void rank_proxy_start(rank_proxy *p, uint16_t target, message_type when,
                      void (*trigger)(void *), void *cookie);
void rank_proxy_stop(rank_proxy *p);

#endif
