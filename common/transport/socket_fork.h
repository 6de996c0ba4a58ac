/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file
 * Sockets and fork. A child that is forked without exec (a data loader) has copies of all
 * descriptors: they would keep a killed trainer's port taken and its connections open, silent, for
 * as long as the child lives. So every socket of the library is known here, and a child's copies
 * are replaced by /dev/null as soon as it is there; the numbers stay taken, so that nothing else is
 * closed by mistake. Children made by clone() without pthread_atfork()'s handlers keep theirs.
 */
#ifndef SOCKET_FORK_H
#define SOCKET_FORK_H

#include <sys/socket.h>

/** socket() and accept4(), both non-blocking and close-on-exec; -1 with errno. */
int socket_make(int family);
int socket_take(int listener, struct sockaddr *peer, socklen_t *length);

#endif
