/* SPDX-License-Identifier: Apache-2.0 */
/** @file A process of this user in namespaces of its own, as a container's is, at a Unix socket. */
#ifndef DISTANT_H
#define DISTANT_H

#include "socket.h"

typedef struct distant {
    pid_t pid;
    int fd;        /**< its connection; the caller's to close */
    unsigned seen; /**< what neighbour_differs() says there of who listens */
} distant;

/**
 * Starts it in new namespaces (CLONE_NEW..., 0: in this process's) and lets it connect to @p to. It
 * stays until distant_end() or this process ends. False: the kernel gives no such namespace.
 */
bool distant_connect(distant *d, int namespaces, const socket_address *to);
/** Kills it and waits for that; its connection stays. */
void distant_end(distant *d);

#endif
