/* SPDX-License-Identifier: Apache-2.0 */
/** @file Control sessions. Everything here belongs to the control thread. */
#ifndef SESSION_H
#define SESSION_H

#include "guests/admission.h"
#include "core/bucket.h"
#include "guests/peer.h"
#include "framing.h"
#include "socket.h"
#include "tls.h"
#include "publish/lease.h"
#include "publish/patches.h"
#include "publish/publication.h"

/* Caps of one control session (PROTOCOL.md, "Limits"). */
#define SESSION_WAITS 16
#define SESSION_WATCHES 16
#define SESSION_DATA 16

#define CHANGES_MOST 32 /**< publications that are looked at in one go */

/** A publication at a moment. */
typedef struct publication_view {
    char name[PUBLICATION_NAME_SIZE];
    bool is_stable, is_away; /**< ready to be read; paused */
    uint64_t step, catalog_version, stable_ns;
    uint8_t key_digest[DIGEST_SIZE];
    char reason[REASON_SIZE];
    patch_offers patches;
    uint64_t digest_bytes; /**< as of wait_ok */
    uint64_t changes;
    state_change history[HISTORY];
} publication_view;

/** What has become of publications, copied out under the lock in one go, so that the parked waits
    and watches of however many sessions are answered without it: the trainer's calls take the same
    lock. */
typedef struct changes {
    unsigned n;
    publication_view views[CHANGES_MOST];
} changes;

#define HELLO_MS 2000          /**< from accept to hello */
#define OUTPUT_PAUSE (2 << 20) /**< queued bytes beyond which no request is taken */
#define OUTPUT_MOST (8 << 20)  /**< queued bytes beyond which a session is dropped */

typedef enum session_phase {
    SESSION_HELLO, /**< nothing but hello is taken */
    SESSION_OPEN,
    SESSION_CLOSING, /**< only output, then the end */
    SESSION_DEAD,    /**< to be freed when the events at hand are handled */
} session_phase;

typedef struct parked_wait {
    bool used;
    uint64_t request;
    msg_wait wait;
    deadline at;
} parked_wait;

typedef struct watch {
    bool used;
    uint64_t request;
    char publication[PUBLICATION_NAME_SIZE];
    uint64_t seen; /**< changes of the publication that were reported */
} watch;

typedef struct session {
    struct session *previous, *next;
    struct control *control;
    int fd;
    tls *tls;              /**< NULL: there is none, or not yet */
    bool secured;          /**< whether there is to be any is decided, and it is up */
    uint64_t handshake_ns; /**< CPU time that its handshake was charged with */
    bool is_unix, is_local;
    bool admitted;    /**< counted by admit(); false: it is only told why not */
    unsigned differs; /**< in what the peer is none of the server's own (neighbour.h) */
    peer_share *from;
    char peer[64], ucx_version[32];
    char trace[136];   /**< ", trace ID" of its hello, for the log; "": none */
    uint64_t features; /**< that both ends have */
    session_phase phase;
    deadline due; /**< of the phase: hello's, or the end's */
    deadline idle;
    deadline stalled_at; /**< UINT64_MAX: it owes no room for output */
    deadline begun_at;   /**< until then a frame that has begun to come must be whole */
    uint64_t heard_ns;   /**< when bytes last came */
    uint32_t interest;   /**< in the epoll set */
    framing in;          /**< says whether frames of both directions have checksums */
    outgoing out;
    size_t memory;
    bool shut;
    bool wants_deltas; /**< it has asked for patches; counted by the server */
    peer_turn turn;    /**< it rests while it waits for one: rest.h */
    reader *reader;    /**< once open */
    unsigned n_waits, n_watches;
    parked_wait waits[SESSION_WAITS];
    watch watches[SESSION_WATCHES];
    struct relay_part *relays; /**< relays.h; NULL: it never asked for relays */
} session;

typedef struct holder_list holder_list;

/** Where connections come (control.c). */
typedef struct listener {
    int fd;               /**< -1: none */
    bucket accepts;       /**< CPU time of accepting strangers */
    deadline rests_until; /**< nothing is accepted before; UINT64_MAX: it is */
} listener;

/** What connections could not be taken for want of (control.c). */
typedef struct shortage {
    int code;       /**< errno of the last time */
    unsigned times; /**< that were not told of yet */
    deadline due;   /**< when they are; UINT64_MAX: the next one is at once */
} shortage;

struct control {
    fanin_server *server;
    pthread_t thread;
    int epoll;
    listener tcp, local; /**< local: the Unix socket */
    atomic_bool quit, stop_listening;
    bool listening, paused; /**< paused: no descriptors left, until resume_at */
    deadline resume_at;
    shortage lacks;
    bool ucx_again; /**< UCX has more to do before the thread may sleep */
    unsigned n_refused;
    unsigned told;       /**< of those differences the log has spoken */
    deadline due;        /**< no session has one before */
    deadline rest_until; /**< when to look at those that rest; UINT64_MAX: none does */
    uint64_t mark;       /**< CPU time at work_begin() */
    session *sessions, *dead;
    peer_turns resting;    /**< sessions: rest.h */
    bool crowded;          /**< ... and all strangers together have had their share */
    const session *served; /**< whose turn it is of those; NULL: it is over */
    struct holder_roster *rosters; /**< of who holds the same (relays.c) */
    uint64_t lists_version;        /**< the greatest of all lists */
    bool lists_changed;
    deadline
        lists_due; /**< when they are told that wait for lists; UINT64_MAX: none changed */
    buffer spare;    /**< memory for a session's large answers */
    changes changes; /**< what waits and watches are being answered by */
};

/** Takes @p fd. 0, or errno: there is no memory, and the descriptor is closed and dismissed. */
int session_open(struct control *c, int fd, const socket_address *peer,
                 const newcomer *who);
/** Like session_open() for a peer that is only told why it is refused. */
int session_refuse(struct control *c, int fd, const socket_address *peer,
                   peer_share *from, const fanin_error *why);
void session_close(session *s, const char *why); /**< why NULL: not worth a message */
void session_free(session *s);
/** Answers with an error, then closes gently. */
void session_reject(session *s, uint64_t request, fanin_status code,
                    const char *message);
/** Gives the connection to a data thread, with its buffers. */
void session_hand_over(session *s, reader *r);

/** Receives once; false: the peer has closed, or the connection broke. */
bool session_receive(session *s);
/** Before a large answer: it is put together in memory that the sessions share in turns. */
void session_take_spare(session *s);
/** Sends what the socket takes. Closes the session if it may not go on. */
void session_send(session *s);
/** Counts its memory; false: the connections have more than they may. */
bool session_account(session *s);

/* --------------------------------------------------------------- making room */

/* Sessions that nobody uses make room for others when there is none. */

/** A session that has said nothing for so long may go; a pull is never silent so long without a
    lease or a wait, but for work of its own. */
#define EVICT_IDLE_MS 10000

/** Closes the session that has been idle for longest, without lease, wait or watch, and tells it
    why. For one more of @p newcomer: a session of its own, or, if it is not its share that is used
    up, of a network peer that has more of them. False: there is none. By the control thread. */
bool evict_idle(struct control *c, peer_share *newcomer, admission_room room);

/* ------------------------------------------------------------------- replies */

/** What who asks for more is told. */
#define SHUTTING_DOWN "the server is shutting down"

/** Answers with an error; does nothing if there is none. */
void reply_error(session *s, uint64_t request, const fanin_error *error);
void reply_fault(session *s, uint64_t request, fanin_status code, const char *message);

/** Since a clock_ns(); at least 1: 0 is "not known". */
uint64_t age_ms(uint64_t since_ns);

/* All with the lock held. */

/** NULL: not there. */
publication *find_present(const fanin_server *server, const char *name);
/** NOT_FOUND that names what there is. */
void describe_missing(const fanin_server *server, const char *name, fanin_error *error);
/** Why readers of a publication get nothing. */
void describe_paused(const char *name, const char *reason, fanin_error *error);
/** As the session's peer knows it: an older one takes paused for writing. */
int32_t state_for(const session *s, publication_state state);

#endif
