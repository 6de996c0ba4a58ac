/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file
 * What peers cause to be logged: a few lines a second of each and of all; how many more there were
 * comes once a second. Nobody else's lines are held back. Any thread.
 */
#ifndef PEER_LOG_H
#define PEER_LOG_H

#include "guests/peer.h"
#include "tls.h"

/** Logs a line that @p from is the cause of, or counts it. Lock not held. */
void peer_log(fanin_server *s, peer_share *from, fanin_log_level level,
              const char *event, const char *format, ...)
    __attribute__((format(printf, 5, 6)));
/** The same of @p peer, an address, with whom the server cannot go on by TLS, if that is so. */
void peer_log_broken(fanin_server *s, peer_share *from, const char *peer, const tls *t);
/** When peer_log_tell() is due; UINT64_MAX: nothing was left out. */
deadline peer_log_due(const fanin_server *s);
/** Logs what was left out since the last time. Takes the lock. */
void peer_log_tell(fanin_server *s);

#endif
