/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file
 * A man in the middle: stands for one rank on a port of its own (TCP and the Unix name that
 * belongs to it), passes everything on, and calls a function just before the first request
 * of one type goes through. On the Unix name it says its own address instead of the rank's, as
 * whoever really listened there would. Or a link that alters one bit: over TCP alone, it passes
 * everything on and flips a bit of one byte of one direction of one connection, counted in the
 * order in which they come. Both can keep new connections waiting, and cut one.
 */
#ifndef RANK_PROXY_H
#define RANK_PROXY_H

#include "frame.h"
#include <pthread.h>
#include <limits.h>
#include <stdatomic.h>
#include <stdint.h>

#define FLIP_CONNECTIONS 16 /* whose bytes are counted */
#define FLIP_EACH UINT_MAX

typedef enum flip_way { FLIP_TO_RANK, FLIP_TO_CLIENT } flip_way;

typedef struct flip {
    unsigned connection; /**< which one is altered; FLIP_EACH: each */
    flip_way way;
    _Atomic uint64_t at; /**< the byte; UINT64_MAX: none */
    unsigned bit;
    atomic_bool flipped;
    _Atomic uint64_t passed[FLIP_CONNECTIONS][2]; /**< bytes, by connection and way */
} flip;

typedef struct rank_proxy {
    char address[32]; /**< to be given to clients instead of the rank's */
    uint16_t target;
    message_type when;
    void (*trigger)(void *cookie);
    void *cookie;
    flip *flip; /**< NULL: nothing is altered */
    atomic_bool triggered;
    atomic_bool drops;         /**< requests of that type are not passed on */
    atomic_bool keeps_address; /**< the rank's address is said on the Unix name, too */
    atomic_uint accepted[2];   /**< connections over TCP, over the Unix name */
    atomic_bool holds;
    atomic_uint cut; /**< one more than the connection's number; 0: none */
    atomic_bool ends;
    int listeners[2], wake;
    pthread_t thread;
} rank_proxy;

/** Stands for 127.0.0.1:@p target. @p trigger runs in the proxy's thread. Fails the test. */
void rank_proxy_start(rank_proxy *p, uint16_t target, message_type when,
                      void (*trigger)(void *), void *cookie);
/** The link that alters what @p f, which outlives it, says. */
void rank_proxy_start_flip(rank_proxy *p, uint16_t target, flip *f);
/** Lets @p call connect by such a link again and again: once with nothing altered, and then with a
    bit of each of some bytes of both ways of the first two connections, of as many as there were
    the first time. */
void rank_proxy_flip_all(uint16_t target,
                         void (*call)(const char *address, bool altered));
/** Connections that come from now on wait until rank_proxy_let_go(): their clients have them, and
    nobody hears what they say. */
void rank_proxy_hold(rank_proxy *p);
void rank_proxy_let_go(rank_proxy *p);
/** Closes the connection over TCP that has come as number @p connection, from 0, soon. */
void rank_proxy_cut(rank_proxy *p, unsigned connection);
void rank_proxy_stop(rank_proxy *p);

#endif
