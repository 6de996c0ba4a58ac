/* SPDX-License-Identifier: Apache-2.0 */
/** @file Making a connection: the Unix socket first on this host, TLS, hello. */
#ifndef CONNECT_H
#define CONNECT_H

#include "net/connection.h"

/** @p address: as the caller gave it, for messages; @p tcp: resolved. FANIN_ERR_MEMORY. */
fanin_status connection_create(const connection_shared *shared, const char *address,
                               const socket_address *tcp, connection **out,
                               fanin_error *error);
void connection_destroy(connection **c);

/** Starts connecting if it is down; the loop carries it on to READY or back to DOWN. One that is
    under way and late gets its time again: it may have been the caller who was away. */
void connection_start(connection *c);

/** Hello of a data connection: appended to @p out, which is empty; @p in, which was started,
    expects its answer. */
void connection_encode_data_hello(const connection *c, buffer *out, framing *in);

#endif
