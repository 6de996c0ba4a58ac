/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file
 * A link that alters one bit: stands for one rank over TCP, passes everything on, and flips a bit
 * of one byte of one direction of one connection, counted in the order in which they come.
 */
#ifndef FLIP_PROXY_H
#define FLIP_PROXY_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>

#define FLIP_CONNECTIONS 16 /* whose bytes are counted */

typedef enum flip_way { FLIP_TO_RANK, FLIP_TO_CLIENT } flip_way;

typedef struct flip_proxy {
    char address[32]; /**< to be given to clients instead of the rank's */
    uint16_t target;
    unsigned connection; /**< which one is altered */
    flip_way way;
    uint64_t at; /**< the byte; UINT64_MAX: none */
    unsigned bit;
    atomic_bool flipped;
    _Atomic uint64_t passed[FLIP_CONNECTIONS][2]; /**< bytes, by connection and way */
    int listener, wake;
    pthread_t thread;
} flip_proxy;

/** Stands for 127.0.0.1:@p target. What it alters is set before. Fails the test. */
void flip_proxy_start(flip_proxy *p, uint16_t target);
void flip_proxy_stop(flip_proxy *p);

#endif
