/* SPDX-License-Identifier: Apache-2.0 */
/** @file Whose process answers at the other end of a TCP connection within this host. */
#ifndef SOCKET_OWNER_H
#define SOCKET_OWNER_H

#include <stdbool.h>
#include <sys/types.h>

/**
 * The uid of the process that took the other end of the connected TCP socket @p fd, as the kernel
 * tells it to everybody (sock_diag, else /proc/self/net/tcp). False: it does not, as the other end
 * lies in another network namespace or behind a translated address, has not been taken or is
 * closed, or has an owner without a name in this process's user namespace; or this process has no
 * descriptor or memory to ask with, for which errno has a remedy (error_remedy()). Thread: any.
 * Waits for nobody; where sock_diag is forbidden it reads the list of all connections of the host,
 * 8 MiB of it at most.
 */
bool socket_owner(int fd, uid_t *uid_out);

#endif
