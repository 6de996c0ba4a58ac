/* SPDX-License-Identifier: Apache-2.0 */
/** @file Whether a connection leads to the rank: as the kernel tells and as TLS proves, and what is
    said of a rank with which no secured connection can be made. */
#ifndef TRUST_H
#define TRUST_H

#include "messages.h"
#include "net/connection.h"

typedef struct secure_fault {
    fanin_status status;
    char what[400]; /**< what the rank does, or is not: "has another secret ..." */
    char remedy[256];
} secure_fault;

/** Why a handshake has failed. */
void secure_explain(const tls *t, secure_fault *out);
/** Whether receiving has failed because the rank refused this end's certificate, and what of that
    is said. Of NULL: no. */
bool secure_refused(const tls *t, secure_fault *out);
/** Whether receiving has failed because of what came, or of what the rank says that came to it, and
    what of that is said; FANIN_ERR_TRANSPORT. So it is if either end lacked memory:
    FANIN_ERR_MEMORY, FANIN_ERR_CLOSED. Of NULL: no. */
bool secure_broken(const tls *t, secure_fault *out);
/** Whether the rank that answers is who it says, as far as there is TLS (NULL: it need not prove
    it). */
bool secure_proven(tls *t, const msg_hello_ok *peer);
/** Why it is not, or is not known. */
void secure_explain_unproven(const tls *t, const msg_hello_ok *peer, secure_fault *out);

/** Whether who listens on its Unix name is a process of this user, and not only of this uid. */
bool trust_listener(connection *c);
/** Whoever took the Unix name of an address need not be who listens there. Over TCP addresses may
    differ lawfully: forwarders, names, NAT. */
bool trust_name(const connection *c, const msg_hello_ok *peer);
/** On loopback whoever came first has the port. Root needs no port to alter what this process
    pulls. False: @p why says why not. */
bool trust_owner(const connection *c, int fd, secure_fault *why);
/** Whether a data connection without TLS, connected by @p fd, leads to who this one leads to, as
    far as the kernel tells: by the Unix name to the same process, from when on it is connected; by
    TCP on loopback to a user that is trusted, from when on it has answered. False: @p why says why
    not; FANIN_ERR_CLOSED: it may do so next time. */
bool connection_trusts(const connection *c, int fd, secure_fault *why);
/** The process that listens on its Unix socket: the number that it has in this process's pid
    namespace, 0 if it has none there. False: it is no Unix socket, or down. */
bool connection_process(const connection *c, pid_t *pid_out);

#endif
