/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file
 * What the control connection to one rank is. connect.c makes it, talk.c asks by it and ends it,
 * trust.c tells whether it leads to the rank.
 */
#ifndef CONNECTION_H
#define CONNECTION_H

#include "framing.h"
#include "log.h"
#include "net/loop.h"
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
 * its `fault`. The body is valid during the call. A handler may ask again.
 */
typedef void (*reply_fn)(void *cookie, connection *c, message_type type, body *b);

/** What all connections of a client share; must outlive them. */
typedef struct connection_shared {
    loop *loop;
    uint8_t client_id[16];
    char trace_id[33]; /**< hexadecimal, for logs of both ends */
    bool no_unix, no_checksums, trust_containers, trust_other_users;
    bool relays; /**< the other ends are to be relays, and no ranks */
    uint32_t connect_ms, lost_ms;
    const char *ucx_version;
    logger log;
    unsigned *told;           /**< differences of neighbour.h that were logged */
    const trace_place *place; /**< the pull that is under way */
    tls_end *tls;             /**< over TCP; NULL: there is no secret */
} connection_shared;

typedef struct pending {
    struct pending *next;
    uint64_t request;
    reply_fn fn;
    void *cookie;
    bool keep;
} pending;

/** Its fields are for the three files to change; others look. */
struct connection {
    loop_source source; /* first: the loop hands it back */
    const connection_shared *shared;
    /** Gets what comes first, in CONNECTION_HELLO. */
    void (*on_greeting)(connection *c, message_type type, body *b);
    socket_address tcp, in_use;
    char text[64]; /**< the address, for messages */
    connection_state state;
    /** Why the rank's Unix socket was left for TCP though it is of this uid; NULL: it was not. */
    const char *stranger;
    bool is_unix;
    bool local; /**< the rank is on this host */
    bool known; /**< it once was READY */
    uid_t uid;  /**< who listens, if it is Unix */
    pid_t pid;
    fanin_error fault;   /**< why it is DOWN */
    msg_hello_ok peer;   /**< the last hello: rank etc. */
    uint64_t generation; /**< grows with every hello */
    uint64_t next_request;
    deadline connect_by;
    uint64_t started_ns; /**< when it began to connect */
    uint64_t heard_ns;   /**< last byte from the peer, or since it owes an answer */
    bool pinged, owing;
    bool silent;      /**< it, or the last attempt to make it, ended in silence */
    uint64_t look_ns; /**< when silence is to be looked at next; 0: nobody waits */
    /** Sealed: frames carry checksums, in both directions; data connections are to do so, too. */
    framing in;
    outgoing out;
    tls *tls; /**< NULL: there is none, or not yet */
    pending *pending;
};

/** What its data connections are to be secured with, as it is; NULL: it is not. */
static inline const tls_end *connection_tls(const connection *c)
{
    return c->tls ? c->shared->tls : NULL;
}

/* Requests with one handler each, the connection's end, and detection of a peer that fell silent
   (talk.c). */

/** Closes it as one whose rank does not answer, see connection_fail(). */
void connection_give_up(connection *c);
/** Closes it; pending handlers run with type 0. @p fault is remembered (copied). */
void connection_fail(connection *c, const fanin_error *fault);

/** "rank 3 at host:port" in @p name, "the rank at host:port" if it never said which. */
#define CONNECTION_NAME 96
const char *connection_name(const connection *c, char name[CONNECTION_NAME]);
/** Fills place fields rank and address. */
struct error_place connection_place(const connection *c, const char *phase);

/** The frame that was encoded into connection_out() under c->next_request goes out; @p fn gets the
    reply (NULL: nobody waits for it). Only when READY. */
buffer *connection_out(connection *c);
void connection_ask(connection *c, reply_fn fn, void *cookie);
/** Forgets the handlers that have this cookie (their replies are dropped). */
void connection_forget(connection *c, const void *cookie);
/** Keeps the handlers that have this cookie for more replies (watch). */
void connection_keep(connection *c, const void *cookie);

/** While true the rank counts as owing an answer even without a pending request: it is
    reading phase, and silence must be noticed. */
void connection_set_owing(connection *c, bool owing);
/** Whether somebody waits for an answer of this rank. */
bool connection_owes(const connection *c);

/** Pings a silent peer, gives it up; returns when to call again. */
deadline connection_tick(connection *c);

/** Turns a MSG_ERROR body, a lost connection (type 0) or an unexpected reply into an error
    with rank and address. Returns its status, never FANIN_OK. */
fanin_status connection_reply_error(connection *c, const char *phase, message_type type,
                                    body *b, fanin_error *error);

/* ------------------------------------------------------------ for connect.c */

/** Closes it because of what it was found to do, or not to be: "rank 3 at host:port @p what".
    EBADMSG is for who decides whether to try again; its words tell nothing. */
void connection_fail_for(connection *c, fanin_status status, int sys_errno,
                         const char *phase, const char *remedy, const char *what);
/** Nobody else's fault. */
void connection_fail_for_memory(connection *c);
/** No handler runs. */
void connection_shut(connection *c);
/** What it has to write. */
void connection_flush(connection *c);
/** What has come, to handlers. */
void connection_read(connection *c);

/* Making a connection: the Unix socket first on this host, TLS, hello (connect.c). */

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
