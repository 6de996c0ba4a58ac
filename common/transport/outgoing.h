/* SPDX-License-Identifier: Apache-2.0 */
/** @file Bytes on their way into a non-blocking socket. */
#ifndef OUTGOING_H
#define OUTGOING_H

#include "buffer.h"

typedef struct outgoing {
    buffer bytes;
    size_t sent; /**< of them */
} outgoing;

bool outgoing_is_empty(const outgoing *o);
void outgoing_clear(outgoing *o); /**< forgets what was not sent, keeps the memory */
void outgoing_free(outgoing *o);

/** Sends what the socket takes now. 0, or the errno of a broken connection. */
int outgoing_flush(outgoing *o, int fd);

#endif
