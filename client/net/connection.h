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
    uint64_t
        heard_ns; /**< last byte from the peer, or when it began to owe an answer */
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

#endif
