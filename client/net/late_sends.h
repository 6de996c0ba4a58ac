/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file
 * Messages whose sending the caller does not wait for: a thread sends them, also after the call has
 * returned. Whoever has more for a connection takes back first what is left for it, so that what
 * goes over one connection keeps its order, and goes as one if the thread has not come to it. Until
 * its next call a client may be left alone for any time: so nothing is put off, the thread is woken
 * at once.
 */
#ifndef LATE_SENDS_H
#define LATE_SENDS_H

#include <stdatomic.h>
#include <stdbool.h>

/** Embedded in what is sent; zeros at first. */
typedef struct late_send {
    struct late_send *next, *previous;
    /** Sends without blocking; in the thread, or in who destroys. Adds and takes nothing itself. */
    void (*run)(struct late_send *send);
    atomic_bool queued;
} late_send;

typedef struct late_sends late_sends;

/** With its thread, which sleeps. NULL: this process may use one CPU only, or there is no memory,
    or no thread: then the caller sends himself. */
late_sends *late_sends_create(void);
/** Sends what is left and ends the thread. NULL and *sends == NULL are fine. */
void late_sends_destroy(late_sends **sends);

/** @p send is not queued; it stays where it is until it is taken, or sent. */
void late_sends_add(late_sends *sends, late_send *send);
/** Wakes the thread, after one or more were added. */
void late_sends_go(late_sends *sends);
/** After the return the thread has sent it or does not know it any more. Waits while just this one
    is sent. To be called by one thread at a time. */
void late_sends_take(late_sends *sends, late_send *send);

#endif
