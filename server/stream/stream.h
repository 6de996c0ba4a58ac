/* SPDX-License-Identifier: Apache-2.0 */
/** @file The data threads as their server and the control thread see them. */
#ifndef STREAM_H
#define STREAM_H

#include "array.h"
#include "core/server_state.h"
#include "framing.h"
#include "socket.h"

#define DATA_THREAD_MEMORY ((uint64_t)8 << 20) /**< the least of max_memory for each */

/** How many data threads a server has at most that nobody has told: others of the host's ranks and
    the trainer itself need CPUs, too. */
unsigned stream_threads_for(unsigned cpus, uint64_t max_memory);

/** Starts the first; others are started when connections come, as many as the server may have. */
fanin_status stream_create(fanin_server *s, fanin_error *error);
/** Makes the data threads look for closed readers. Any thread, lock held or not. */
void stream_wake(fanin_server *s);
/** CPU time that the data threads have taken. Any thread, lock held or not. */
uint64_t stream_cpu_ns(const fanin_server *s);
/** Joins; closes all data connections. After it nothing reads the shards' memory. */
void stream_destroy(fanin_server *s);

/** A connection on its way from the control thread to a data thread. */
typedef struct handover {
    int fd;
    tls *tls;         /**< NULL: none; it is up */
    reader *reader;   /**< with a reference, and counted in n_data */
    peer_share *from; /**< as admit() gave it */
    framing in;       /**< with what was received and not taken */
    outgoing out;
    char peer[64];
} handover;

/** Gives all of @p h to the thread that has the fewest connections; to a new one rather than to one
    that has some. False: out of memory, nothing was
    taken. By the control thread, lock not held. */
bool stream_adopt(fanin_server *s, const handover *h);

/*
 * How many bytes of tensors are streamed a second (max_bytes_per_second). Servers of one process
 * share a host's network, and a cache has a server for each step that it keeps: so all that have a
 * limit share one bucket, and a byte takes the time that its server's limit says. Any thread.
 */

#define LIMIT_WINDOW_NS UINT64_C(50000000) /**< what was not sent may be sent at once */
#define LIMIT_LEAST 1000000 /**< bytes a second: less would stall readers */

extern bucket limit_bucket;

#endif
