/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file
 * The data connections to one rank: read requests go out, a few at a time on each; bytes come
 * in by readv straight to their destinations.
 */
#ifndef STREAM_LINK_H
#define STREAM_LINK_H

#include "path/reader.h"
#include "device/device_sink.h"
#include "plan/read_list.h"
#include "stream/seal_checks.h"
#include <stdatomic.h>

typedef struct stream_link stream_link;

/** One rank's reading in one attempt. The thread that reads fills it in; others may look at what is
    atomic, and at the error once failed is set. */
typedef struct stream_work {
    const plan *plan;
    const plan_rank *pieces;
    const read_list *list;
    uint8_t token[16];
    uint8_t *base;
    need_fn need;     /**< of host memory; may be NULL; its failure is the work's */
    landed_fn landed; /**< of what lands in host memory; may be NULL */
    void *landed_cookie;
    device_sink *devices; /**< takes what lands in CUDA memory; NULL: nothing does */
    seal_checks
        *checks; /**< of sealed replies; may be NULL. Ends before the work does */
    uint64_t *
        inflight; /**< bytes asked for and not here, of all ranks that this thread reads */
    uint64_t max_inflight;
    /** not NULL: digests are asked for, not bytes, one an entry; gets those of a request, sets failed,
        status and error before it returns false */
    bool (*digested)(void *cookie, uint64_t request, const uint8_t *digests);
    void *digested_cookie;
    uint32_t dtype; /**< of digests: what entries of pieces that are converted become */
    atomic_uint_fast64_t next_request,
        done_requests;          /**< done: its bytes are in place */
    atomic_uint_fast64_t bytes; /**< in place; of the sources */
    atomic_bool failed;
    /** FANIN_ERR_STALE: begin again; else the link is lost, or a device has failed, which
        device_sink_failed() tells and no other attempt would mend */
    fanin_status status;
    fanin_error error;
} stream_work;

/** @p count connections to the rank of @p control, made without waiting. */
fanin_status stream_link_create(fanin_client *client, const connection *control,
                                unsigned count, stream_link **out, fanin_error *error);
void stream_link_destroy(stream_link **link);
unsigned stream_link_count(const stream_link *link);
/** None of its connections has been lost. */
bool stream_link_is_whole(const stream_link *link);
/** The loop that reads it from now on, the client's at first; neither of the two turns. On
    FANIN_ERR_LIMIT or FANIN_ERR_MEMORY connections are lost. */
fanin_status stream_link_move(stream_link *link, loop *to, fanin_error *error);

/** Gives the link its work and sends what the window allows. The loop does the rest. */
void stream_link_start(stream_link *link, stream_work *work);
/** Sends more requests if the shared window has room again. */
void stream_link_pump(stream_link *link);
/** True: the link is idle and can be used again. False: replies are still on their way; it
    must be destroyed. Ends the work in any case: nothing is written after it, unless a device
    does not finish, which device_sink_destroy() tells. */
bool stream_link_stop(stream_link *link);

extern const path_reader stream_reader;

/** The peer's data connections, made without waiting if there are none to its current
    incarnation. @p bulk: bytes are to come, for which several may be needed. */
fanin_status stream_open(fanin_client *client, size_t peer, bool bulk,
                         stream_link **out, fanin_error *error);
/** The reading over them has ended: drops them if replies are still on their way. */
void stream_end_work(fanin_client *client, size_t peer);
/** Closes those of all peers. */
void stream_disconnect(fanin_client *client);

#endif
