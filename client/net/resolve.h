/* SPDX-License-Identifier: Apache-2.0 */
/** @file From the addresses that a caller gives to those of sockets. */
#ifndef RESOLVE_H
#define RESOLVE_H

#include "net/client_state.h"

/**
 * @p addresses: "host:port", "[v6]:port"; names are looked up side by side, each once. Fills @p out,
 * as many. FANIN_ERR_ARGUMENT (an address of another form), FANIN_ERR_UNREACHABLE (no such
 * name), FANIN_ERR_TIMEOUT, FANIN_ERR_CANCELLED, FANIN_ERR_LIMIT, FANIN_ERR_MEMORY.
 */
fanin_status resolve_all(fanin_client *client, const char *const *addresses,
                         size_t count, deadline at, socket_address *out,
                         fanin_error *error);

#endif
