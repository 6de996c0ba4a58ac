/* SPDX-License-Identifier: Apache-2.0 */
/** @file Who is at the other end of a socket within this host: of a Unix socket, as one user has
    processes in more than one container, or of TCP. */
#ifndef NEIGHBOUR_H
#define NEIGHBOUR_H

#include <stdbool.h>
#include <sys/types.h>

/** In what a peer differs from this process; several may be true. */
enum {
    NEIGHBOUR_UID = 1,    /**< another user, or no Unix socket */
    NEIGHBOUR_UNSEEN = 2, /**< the kernel does not show its process, or that is gone */
    NEIGHBOUR_USER_SPACE = 4,
    NEIGHBOUR_PID_SPACE = 8,
    NEIGHBOUR_IPC_SPACE = 16,
    NEIGHBOUR_MOUNT_SPACE = 32,
    NEIGHBOUR_NO_DESCRIPTOR = 64, /**< to see it takes one, and this process has none */
    NEIGHBOUR_NO_FILE = 128,      /**< the same of this host's open files */
    /** What makes a stranger: a uid says nothing beyond its user namespace, and who lives in
        another pid namespace was kept apart from this process. Who cannot be seen now may be none,
        but nothing shows it (neighbour_lacks()). */
    NEIGHBOUR_STRANGER = NEIGHBOUR_UID | NEIGHBOUR_UNSEEN | NEIGHBOUR_USER_SPACE |
                         NEIGHBOUR_PID_SPACE | NEIGHBOUR_NO_DESCRIPTOR |
                         NEIGHBOUR_NO_FILE,
};

/**
 * Compares the process that connected, or that listens, with this one, as the kernel shows it: its
 * effective uid (SO_PEERCRED), and the namespaces of /proc/<pid>/ns. Since Linux 6.5 a process that
 * was given the number of one that died is not mistaken for it (SO_PEERPIDFD). 0: this process's
 * own user in its own namespaces. Thread: any. Does not block.
 */
unsigned neighbour_differs(int fd);

/** Keeps a descriptor from now on, so that neighbour_differs() has one when the process may open no
    more. Once for the process, which keeps it. What another thread takes from it for a moment, it
    takes back as soon as there is one. Thread: any. */
void neighbour_prepare(void);

/** What it takes to say who the peer is, and is lacking now: EMFILE, ENFILE. 0: nothing. */
int neighbour_lacks(unsigned differs);

/** The first of the reasons as a sentence about "the peer's process", "" for 0. */
const char *neighbour_why(unsigned differs);

/** What to do so that a stranger of the same uid is none. */
#define NEIGHBOUR_REMEDY                                                               \
    "run both in one container, or let containers that share this network and uid be " \
    "one user: trust_containers, --trust-containers, FANIN_TRUST_CONTAINERS=1"

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
