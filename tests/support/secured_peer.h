/* SPDX-License-Identifier: Apache-2.0 */
/** @file A peer (server_peer.h) inside TLS: a thread between the peer's socket and the server's. */
#ifndef SECURED_PEER_H
#define SECURED_PEER_H

#include "server_peer.h"
#include "tls.h"

/** TCP and a handshake, no hello yet. @p end lives until secured_peers_end(). Fails the test. */
peer secured_peer(fanin_server *s, const tls_end *end);
/** Waits for the threads of all, whose peers were closed. */
void secured_peers_end(void);

#endif
