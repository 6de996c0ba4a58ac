/* SPDX-License-Identifier: Apache-2.0 */
/** @file The data thread as its server and the control thread see it. */
#ifndef DATA_THREAD_H
#define DATA_THREAD_H

#include "buffer.h"
#include "core/server_state.h"
#include "framing.h"
#include "outgoing.h"

fanin_status stream_create(fanin_server *s, fanin_error *error);
/** Makes the data thread look for closed readers. Any thread, lock held or not. */
void stream_wake(fanin_server *s);
/** Joins; closes all data connections. After it nothing reads the shards' memory. */
void stream_destroy(fanin_server *s);

/** A connection on its way from the control thread to the data thread. */
typedef struct handover {
    int fd;
    reader *reader;      /**< with a reference, and counted in n_data */
    peer_count *counted; /**< as admit() gave it */
    framing in;          /**< with what was received and not taken */
    outgoing out;
    char peer[64];
} handover;

/** Takes everything in @p h over. False: out of memory, nothing was taken. Lock not held. */
bool stream_adopt(fanin_server *s, const handover *h);

#endif
