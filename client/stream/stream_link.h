/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file
 * The data connections to one rank: read requests go out, a few at a time on each; bytes come
 * in by readv straight to their destinations.
 */
#ifndef STREAM_LINK_H
#define STREAM_LINK_H

#include "digest.h"
#include "device/device_sink.h"
#include "frame.h"
#include "net/loop.h"
#include "path/path.h"
#include "plan/plan.h"
#include <stdatomic.h>

/** Connections to one rank. */
#define STREAMS_MOST 16

typedef struct stream_link stream_link;

/** What one thread reads, of all ranks. While it reads nobody else looks at it. */
typedef struct stream_share {
    loop *loop;
    uint64_t inflight; /**< bytes asked for and not here */
    uint64_t max_inflight;
} stream_share;

/** One rank's reading in one attempt, which several threads may share. Others may look at what is
    atomic, and at the error once failed is set. */
typedef struct stream_work {
    const plan *plan;
    const plan_rank *pieces;
    const read_list *list; /**< NULL: the connections are all that is wanted */
    uint8_t token[16];
    uint8_t *base;
    need_fn need;     /**< of host memory; may be NULL; its failure is the work's */
    landed_fn landed; /**< of what lands in host memory; may be NULL */
    void *landed_cookie;
    device_sink *devices; /**< takes what lands in CUDA memory; NULL: nothing does */
    /** not NULL: digests are asked for, not bytes, one an entry; gets those of a request, tells
        stream_work_fail() before it returns false */
    bool (*digested)(void *cookie, uint64_t request, const uint8_t *digests);
    void *digested_cookie;
    uint32_t dtype; /**< of digests: what entries of pieces that are converted become */
    atomic_uint_fast64_t next_request,
        done_requests;           /**< done: its bytes are in place */
    atomic_uint_fast64_t bytes;  /**< in place; of the sources */
    atomic_bool failing, failed; /**< somebody says why; it is said */
    atomic_uint made, given_up;  /**< connections; given up: not made in time */
    /** FANIN_ERR_STALE: begin again; else the link is lost, or a device has failed, which
        device_sink_failed() tells and no other attempt would mend */
    fanin_error error;
} stream_work;

/** In any thread that reads: the work has failed. Who comes first says why. */
void stream_work_fail(stream_work *work, const fanin_error *why);

/** @p count connections to the rank of @p control, at least one, made without waiting. */
fanin_status stream_link_create(fanin_client *client, const connection *control,
                                unsigned count, stream_link **out, fanin_error *error);
void stream_link_destroy(stream_link **link);
/** More of them, until there are @p count; it has no work. On an error those that there are stay.
    */
fanin_status stream_link_widen(stream_link *link, unsigned count, fanin_error *error);
unsigned stream_link_count(const stream_link *link);
/** None of its connections has been lost. */
bool stream_link_is_whole(const stream_link *link);
/** One at least is made, so that reading begins at once. */
bool stream_link_is_made(const stream_link *link);

/** Connection number @p index is for the share's thread in the work that comes next. Neither its
    loop nor the client's turns. On FANIN_ERR_LIMIT or FANIN_ERR_MEMORY the connection is lost. */
fanin_status stream_link_deal(stream_link *link, unsigned index, stream_share *share,
                              fanin_error *error);
/** Gives the link its work and sends what the windows allow; the loops do the rest. @p share: of
    the connections that were not dealt, in the client's loop. */
void stream_link_start(stream_link *link, stream_work *work, stream_share *share);
/** Gives up those connections of the share that are not made within the client's
    connect_timeout_ms, which fails the work if there is no other one. *@p wake becomes no later
    than when that may be so of another. */
void stream_link_look(stream_link *link, const stream_share *share, deadline *wake);
/** In the share's thread: sends more requests by its connections if its window has room again. */
void stream_link_pump(stream_link *link, const stream_share *share);
/** No loop turns: the client's reads all connections from now on. What it cannot is lost. */
void stream_link_gather(stream_link *link);
/** True: the link is idle and can be used again. False: replies are still on their way; it
    must be destroyed. Ends the work in any case: nothing is written after it, unless a device
    does not finish, which device_sink_destroy() tells. The client's loop reads it. Without those
    that were given up it goes on. */
bool stream_link_stop(stream_link *link);

extern const path_reader stream_reader;

/** The peer's data connections to its current incarnation: those that there are, and more, made
    without waiting, if these are fewer than @p count. */
fanin_status stream_open(fanin_client *client, size_t peer, unsigned count,
                         stream_link **out, fanin_error *error);
/** Whether there are any of use, and one is made. */
bool stream_at_hand(const fanin_client *client, size_t peer);
/**
 * To all sources with pieces that stream reads, and to the others as well if @p all: data
 * connections, one of which is made when this returns. With nothing at hand it waits for the
 * others, too, as long again as for the first and a moment longer. Errors of lost ranks as of
 * pull_read(). @p r needs no leases, and tells where the bytes go by its ranges.
 */
fanin_status stream_connect(const path_reading *r, bool all, deadline at,
                            fanin_error *error);
/** The reading over them has ended: drops them if replies are still on their way. */
void stream_end_work(fanin_client *client, size_t peer);

#endif
