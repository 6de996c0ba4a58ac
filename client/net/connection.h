/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file
 * The control connection to one rank: connect (Unix socket first on this host), hello,
 * requests with one handler each, and detection of a peer that fell silent.
 */
#ifndef CONNECTION_H
#define CONNECTION_H

#include "framing.h"
#include "log.h"
#include "net/loop.h"
#include "net/secure.h"
#include "socket.h"
#include "tls.h"
#include "trace.h"

/** Where a rank has closed a connection, and where it is not reached. */
#define CLOSED_REMEDY                                                                  \
    "is the trainer process still alive? if so, its log tells whom it turns away"
#define STOPPED_REMEDY                                                                 \
    "is the trainer process stopped, out of descriptors (its log says so), or a "      \
    "firewall in between?"

typedef struct connection connection;

typedef enum connection_state {
    CONNECTION_DOWN,
    CONNECTION_CONNECTING,
    CONNECTION_HELLO,
    CONNECTION_READY,
} connection_state;

/**
 * Gets the reply to one request. @p type 0: the connection was lost first; why is in
 * connection_fault(). The body is valid during the call. A handler may ask again.
 */
typedef void (*reply_fn)(void *cookie, connection *c, message_type type, body *b);

/** What all connections of a client share; must outlive them. */
typedef struct connection_shared {
    loop *loop;
    uint8_t client_id[16];
    char trace_id[33]; /**< hexadecimal, for logs of both ends */
    bool no_unix, no_checksums, trust_containers, trust_other_users;
    uint32_t connect_ms, lost_ms;
    const char *ucx_version;
    logger log;
    unsigned *told;           /**< differences of neighbour.h that were logged */
    const trace_place *place; /**< the pull that is under way */
    tls_end *tls;             /**< over TCP; NULL: there is no secret */
} connection_shared;

/** @p address: as the caller gave it, for messages; @p tcp: resolved. FANIN_ERR_MEMORY. */
fanin_status connection_create(const connection_shared *shared, const char *address,
                               const socket_address *tcp, connection **out,
                               fanin_error *error);
void connection_destroy(connection **c);

/** Starts connecting if it is down; the loop carries it on to READY or back to DOWN. One that is
    under way and late gets its time again: it may have been the caller who was away. */
void connection_start(connection *c);
/** Closes it as one whose rank does not answer, see connection_fail(). */
void connection_give_up(connection *c);
/** Closes it; pending handlers run with type 0. @p fault is remembered (copied). */
void connection_fail(connection *c, const fanin_error *fault);

connection_state connection_get_state(const connection *c);
const fanin_error *connection_fault(const connection *c); /**< why it is DOWN */
const msg_hello_ok *connection_peer(const connection *c); /**< last hello; rank etc. */
bool connection_known(const connection *c);               /**< it once was READY */
const char *connection_text(const connection *c);         /**< address for messages */
/** "rank 3 at host:port" in @p name, "the rank at host:port" if it never said which. */
#define CONNECTION_NAME 96
const char *connection_name(const connection *c, char name[CONNECTION_NAME]);
const socket_address *connection_address(const connection *c); /**< the one in use */
bool connection_is_unix(const connection *c);
/** Why the rank's Unix socket was left for TCP though it is of this uid; NULL: it was not. */
const char *connection_stranger(const connection *c);
/** The process that listens on its Unix socket: the number that it has in this process's pid
    namespace, 0 if it has none there. False: it is no Unix socket, or down. */
bool connection_process(const connection *c, pid_t *pid_out);
/** Whether frames carry checksums, in both directions; data connections are to do as it does. */
bool connection_is_sealed(const connection *c);
/** What its data connections are to be secured with, as it is; NULL: it is not. */
const tls_end *connection_tls(const connection *c);
bool connection_is_local(const connection *c);       /**< the rank is on this host */
uint64_t connection_generation(const connection *c); /**< grows with every hello */

/** Id for the next request. */
uint64_t connection_next_request(connection *c);
/** The frame that was encoded into connection_out() under @p request goes out; @p fn gets the
    reply (NULL: nobody waits for it). Only when READY. */
buffer *connection_out(connection *c);
void connection_ask(connection *c, uint64_t request, reply_fn fn, void *cookie);
/** Forgets the handlers that have this cookie (their replies are dropped). */
void connection_forget(connection *c, const void *cookie);
/** Keeps the handler of @p request for more replies (watch). */
void connection_keep(connection *c, uint64_t request);

/** While true the rank counts as owing an answer even without a pending request: it is
    reading phase, and silence must be noticed. */
void connection_set_owing(connection *c, bool owing);

/** When the last byte came, or when the rank began to owe an answer; clock_ns(). */
uint64_t connection_heard_ns(const connection *c);
/** It, or the last attempt to make it, ended in silence. */
bool connection_was_silent(const connection *c);
/** The time in which it was to be made has passed. */
bool connection_is_late(const connection *c);
/** Whether somebody waits for an answer of this rank. */
bool connection_owes(const connection *c);

/** Pings a silent peer, gives it up; returns when to call again. */
deadline connection_tick(connection *c);

/** Turns a MSG_ERROR body, a lost connection (type 0) or an unexpected reply into an error
    with rank and address. Returns its status, never FANIN_OK. */
fanin_status connection_reply_error(connection *c, const char *phase, message_type type,
                                    body *b, fanin_error *error);
/** Fills place fields rank and address. */
struct error_place connection_place(const connection *c, const char *phase);

/** Hello of a data connection: appended to @p out, which is empty; @p in, which was started,
    expects its answer. */
void connection_encode_data_hello(const connection *c, buffer *out, framing *in);

/** Whether a data connection without TLS, connected by @p fd, leads to who this one leads to, as
    far as the kernel tells: by the Unix name to the same process, from when on it is connected; by
    TCP on loopback to a user that is trusted, from when on it has answered. False: @p why says why
    not; FANIN_ERR_CLOSED: it may do so next time. */
bool connection_trusts(const connection *c, int fd, secure_fault *why);

#endif
