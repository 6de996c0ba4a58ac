/* SPDX-License-Identifier: Apache-2.0 */
/** @file Bytes on their way into a non-blocking socket. */
#ifndef OUTGOING_H
#define OUTGOING_H

#include "array.h"
#include "tls.h"

typedef struct outgoing {
    buffer bytes;
    size_t sent; /**< of them */
} outgoing;

bool outgoing_is_empty(const outgoing *o);
size_t outgoing_left(const outgoing *o); /**< bytes that were not sent yet */
void outgoing_clear(outgoing *o); /**< forgets what was not sent, keeps the memory */
void outgoing_free(outgoing *o);

/** Sends what the socket takes now, by @p t unless that is NULL. 0, or the errno of a broken
    connection. */
int outgoing_flush(outgoing *o, tls *t, int fd);
/** So many were sent by somebody else. */
void outgoing_sent(outgoing *o, size_t bytes);
/** Gives memory back: what sent bytes take if they are most of it, of an empty one all that is more
    than @p keep bytes. */
void outgoing_trim(outgoing *o, size_t keep);

#endif
