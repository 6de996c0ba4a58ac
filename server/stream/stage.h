/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file
 * Device memory on its way to data connections: a copy kernel gathers the next bytes of a reply
 * into a chunk of pinned host memory, from which they are sent. For a reply of digests another
 * kernel writes those of pieces into a chunk, if the device has that kernel. A connection has two
 * chunks at most, so that one fills while the other is sent; all connections of a data thread share
 * a bounded pool. While none is free connections wait: those of the own user and all others take
 * turns, and these peer by peer. Those that cannot send what they have give it back and gather it
 * again later: who does not take its bytes keeps nobody waiting.
 *
 * Memory is read only inside a bracket that begin_update waits for (bracket_enter() ..
 * publication_read_leave()): from the launch of a copy until it has completed, failed, or run for
 * longer than STALL_MS.
 *
 * All of it belongs to one data thread, which has a stage of its own; only copies end in threads of
 * CUDA's driver, which tell it by an eventfd. Nothing blocks that thread but what is made once: a
 * stream for each device, and the pinned memory of a chunk (some 100 us each) as long as the pool
 * grows. The kernels are there since the commit.
 */
#ifndef STAGE_H
#define STAGE_H

#include "digest.h"
#include "guests/peer.h"
#include "stream/read_job.h"

#define CHUNK_BYTES ((size_t)1 << 20)
#define CHUNK_ENTRIES 4096 /**< copies that one kernel makes at most */
/** Pieces that one kernel digests at most: half of a request of LIMIT_DIGEST_BYTES, so that the
    host is at one half while the device is at the other. Each entry's last one may be short. */
#define CHUNK_PIECES                                                                   \
    ((uint32_t)(LIMIT_DIGEST_BYTES / 2 / BOX_DIGEST_PIECE + LIMIT_READ_ENTRIES))
#define CHUNK_ROWS (CHUNK_PIECES / 4) /**< of such pieces */
#define CHUNKS_EACH 2                 /**< of one connection */
#define CHUNKS_MOST 32                /**< of all, over all data threads */

struct connection;
typedef struct stage stage;

typedef enum chunk_state { CHUNK_COPYING, CHUNK_READY, CHUNK_FAILED } chunk_state;

/** Bytes of one reply. In a connection's list from stage_fill() until they are sent. */
typedef struct chunk {
    chunk_state state;
    uint8_t *data; /* pinned, as are: */
    copy_entry *entries;
    size_t bytes, sent;
    digest_list
        digests; /**< of pieces: the bytes were digested where they are; it lies in `data` */
    deadline due; /**< when a copy has to be done */
    struct chunk *next;
    /* The stage's own. */
    stage *of_stage;
    struct connection *owner; /**< NULL: it has closed, or given the chunk up */
    publication *of;          /**< whose memory is being read */
    uint64_t epoch;
    bool reading;           /**< in the bracket */
    shard_catalog *catalog; /**< with a reference, while copying */
    int device;
    atomic_bool broken; /**< the driver says that the device has failed */
    struct chunk *next_copying, *next_done;
} chunk;

/** What a connection has of the stage. Zeroed: nothing. */
typedef struct staged {
    chunk *first, *last; /**< in the order of the reply */
    unsigned count;
    chunk *granted; /**< taken out of the pool for it while it waited */
    peer_turn turn; /**< of those that wait */
    deadline wait_due;
} staged;

/** Gives a connection another turn. */
typedef void (*stage_wake_fn)(void *cookie, struct connection *c);

/** For memory of the devices of @p g. FANIN_ERR_MEMORY, FANIN_ERR_IO. */
fanin_status stage_create(fanin_server *s, gpu *g, stage_wake_fn wake, void *cookie,
                          stage **out, fanin_error *error);
/** No connection has chunks any more. Waits for the copies under way; what a device does not
    finish in STALL_MS is left allocated on purpose. NULL is fine. */
void stage_destroy(stage **s);
/** Readable: call stage_reap(). */
int stage_event(const stage *s);
/** Takes notice of copies that have ended. */
void stage_reap(stage *s);
/** Gives up copies, and waits for chunks, that take too long; when to look again. */
deadline stage_expire(stage *s);
/** Whether connections wait for chunks. */
bool stage_is_short(const stage *s);
/** Whether the connection waits for a chunk, or has some. */
static inline bool stage_serves(const staged *of)
{
    return of->turn.waits || of->granted || of->first;
}

/** FILL_WAIT: there is no chunk for it now. If it has none at all it is woken when there is. */
typedef enum fill_result { FILL_DONE, FILL_WAIT, FILL_VOID, FILL_FAILED } fill_result;

/**
 * Starts to gather the next bytes of the reply into a chunk, or to digest them if that is what
 * the connection is to answer and its device can, and adds that to the connection's.
 * FILL_VOID: the epoch has gone. FILL_FAILED: @p error says which device, or what is short.
 */
fill_result stage_fill(stage *s, struct connection *c, job *j, const guarded *through,
                       fanin_error *error);
/** The connection's first chunk is sent: gives it back. */
void stage_drop_first(stage *s, staged *of);
/** Gives all of the connection's chunks back, those under way when they are done, and
    takes it out of the queue. */
void stage_leave(stage *s, struct connection *c);
/** Why the chunk, which is CHUNK_FAILED, is. */
void stage_explain(stage *s, const chunk *c, fanin_error *error);

#endif
