/* SPDX-License-Identifier: Apache-2.0 */
/** @file Data connections and what one turn of them does. All of one belongs to one data thread. */
#ifndef DATA_CONNECTION_H
#define DATA_CONNECTION_H

#include "digest.h"
#include "guests/peer.h"
#include "stream/stage.h"
#include "stream/stream.h"
#include "stream/read_job.h"
#include <sys/queue.h>

/** PROGRESS_MORE: it can go on at once, PROGRESS_FIRST: before others; PROGRESS_WAIT: not before
    epoll speaks of it. */
typedef enum progress {
    PROGRESS_MORE,
    PROGRESS_FIRST,
    PROGRESS_WAIT,
    PROGRESS_CLOSE,
} progress;

/** What the connections of a data thread share. */
typedef struct stream_tools {
    fanin_server *server;
    kept_digests *kept;  /**< of all data threads */
    read_entry *entries; /**< LIMIT_READ_ENTRIES */
    gather gather;
    stage *stage;     /**< NULL until device memory is asked for */
    deadline tell_at; /**< when the log may hear again of memory that cannot be read */
    deadline rest_until; /**< when to look at those that rest; UINT64_MAX: none does */
    bool crowded[2]; /**< some rest since all strangers have had their share: of what
                          requests take, [true] of what tensors that are sent do */
    /** Makes it. */
    fanin_status (*need_stage)(struct stream_tools *t, fanin_error *error);
} stream_tools;

typedef struct connection {
    int fd;
    tls *tls; /**< NULL: plain */
    reader *reader;
    peer_share *from;
    char peer[64];
    bool can_read, can_write;
    bool deaf; /**< epoll tells nothing of it, for it rests */
    bool
        resting; /**< it waits, with room in its socket: its peer has had its share of CPU
                      time (guests/peer.h), or all have had theirs of the network (stream.h) */
    bool ended;     /**< its session is over: it has no other turn than to be closed */
    peer_turn turn; /**< of those that rest */
    bool waiting;   /**< its socket is full: counted in sends_waiting */
    bool
        copies; /**< what is sent is copied first: this process reads it, or the kernel could not */
    bool closing; /**< an error is on its way; nothing is read any more */
    bool shut;    /**< ... and it has left */
    framing in;   /**< says whether frames of both directions have checksums */
    outgoing out;
    checksum *sum;       /**< sealed: of the read reply that is being sent */
    size_t memory;       /**< counted */
    size_t burst;        /**< what the socket is likely to take at once */
    deadline stalled_at; /**< when to give the peer up; UINT64_MAX: it owes nothing */
    deadline begun_at;   /**< until then a frame that has begun to come must be whole */
    job job;
    staged staged;
    digester digester;           /**< used while the job is to be digested, not sent */
    LIST_ENTRY(connection) link; /**< of its thread's */
    TAILQ_ENTRY(connection) queued; /**< of those that can go on */
    bool is_queued;
} connection;

/** Made by the control thread. NULL: no memory, and nothing was taken. */
connection *connection_make(const handover *h);
/** The connection is in no list any more. It must have left the epoll set. */
void connection_free(stream_tools *t, connection *c);
/** False: the connections have all the memory they may. */
bool connection_account(fanin_server *s, connection *c);
/** Gives back the chunks of a connection whose socket is full: what is in them is gathered again
    later. For others that wait for chunks. */
void connection_return_chunks(stream_tools *t, connection *c);
/** Whether its peer's shares and the limit leave it something, whoever else waits. */
bool connection_may_go_on(const stream_tools *t, const connection *c);
/** Takes one frame, or sends once: at most 1 MiB. Never blocks. */
progress connection_progress(stream_tools *t, connection *c);

#endif
