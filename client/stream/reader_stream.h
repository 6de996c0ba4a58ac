/* SPDX-License-Identifier: Apache-2.0 */
/** @file The path stream, and the data connections that it and verifying use. */
#ifndef READER_STREAM_H
#define READER_STREAM_H

#include "path/reader.h"
#include "stream/stream_link.h"

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
