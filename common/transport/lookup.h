/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file
 * Looking up a host's name. getaddrinfo() takes as long as the name server likes and cannot be
 * ended, so a thread asks, which owns what it needs and may outlive whoever wanted to know.
 * A name may have addresses of which only some lead to the rank: of IPv4 and IPv6, or of several
 * networks. The thread connects to all of them, and takes the first that accepts.
 */
#ifndef LOOKUP_H
#define LOOKUP_H

#include "socket.h"

typedef struct lookup lookup;

/** @p host: shorter than SOCKET_HOST; @p port: where to try several addresses. FANIN_ERR_MEMORY;
    FANIN_ERR_LIMIT: too many are still waiting for an answer. */
fanin_status lookup_start(const char *host, uint16_t port, lookup **out,
                          fanin_error *error);
/** Becomes readable once there is an answer. */
int lookup_fd(const lookup *l);
bool lookup_done(const lookup *l);
/** The address, with that port; of several the first in the resolver's order if within a second
    none accepted. Not done yet: FANIN_ERR_TIMEOUT; not found:
    FANIN_ERR_UNREACHABLE. */
fanin_status lookup_result(const lookup *l, socket_address *out, fanin_error *error);
/** Ends the interest in it, answered or not. NULL is fine. */
void lookup_drop(lookup **l);

#endif
