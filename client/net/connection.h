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
 * connection_fault(). The body is valid during the call. A handler may ask again.
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

/** Its fields are for the three files; others ask below. */
struct connection {
    loop_source source; /**< first: the loop hands it back */
    const connection_shared *shared;
    /** Gets what comes first, in CONNECTION_HELLO. */
    void (*on_greeting)(connection *c, message_type type, body *b);
    socket_address tcp, in_use;
    char text[64];
    connection_state state;
    const char *stranger; /**< why its Unix socket is not used, NULL: nobody's is */
    bool is_unix, local, known;
    uid_t uid; /**< who listens, if it is Unix */
    pid_t pid;
    fanin_error fault;
    msg_hello_ok peer;
    uint64_t generation, next_request;
    deadline connect_by;
    uint64_t started_ns; /**< when it began to connect */
    uint64_t
        heard_ns; /**< last byte from the peer, or when it began to owe an answer */
    bool pinged, owing, silent;
    uint64_t look_ns; /**< when silence is to be looked at next; 0: nobody waits */
    framing in;
    outgoing out;
    tls *tls; /**< NULL: there is none, or not yet */
    pending *pending;
};

static inline connection_state connection_get_state(const connection *c)
{
    return c->state;
}
/** Why it is DOWN. */
static inline const fanin_error *connection_fault(const connection *c)
{
    return &c->fault;
}
/** The last hello: rank etc. */
static inline const msg_hello_ok *connection_peer(const connection *c)
{
    return &c->peer;
}
/** It once was READY. */
static inline bool connection_known(const connection *c)
{
    return c->known;
}
/** The address for messages. */
static inline const char *connection_text(const connection *c)
{
    return c->text;
}
/** The one in use. */
static inline const socket_address *connection_address(const connection *c)
{
    return &c->in_use;
}
static inline bool connection_is_unix(const connection *c)
{
    return c->is_unix;
}
/** Why the rank's Unix socket was left for TCP though it is of this uid; NULL: it was not. */
static inline const char *connection_stranger(const connection *c)
{
    return c->stranger;
}
/** Whether frames carry checksums, in both directions; data connections are to do as it does. */
static inline bool connection_is_sealed(const connection *c)
{
    return c->in.sealed;
}
/** What its data connections are to be secured with, as it is; NULL: it is not. */
static inline const tls_end *connection_tls(const connection *c)
{
    return c->tls ? c->shared->tls : NULL;
}
/** The rank is on this host. */
static inline bool connection_is_local(const connection *c)
{
    return c->local;
}
/** Grows with every hello. */
static inline uint64_t connection_generation(const connection *c)
{
    return c->generation;
}
/** When the last byte came, or when the rank began to owe an answer; clock_ns(). */
static inline uint64_t connection_heard_ns(const connection *c)
{
    return c->heard_ns;
}
/** It, or the last attempt to make it, ended in silence. */
static inline bool connection_was_silent(const connection *c)
{
    return c->silent;
}
/** The time in which it was to be made has passed. */
static inline bool connection_is_late(const connection *c)
{
    return deadline_passed(c->connect_by);
}

#endif
