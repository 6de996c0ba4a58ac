/* SPDX-License-Identifier: Apache-2.0 */
/** @file Sets of ranks as words for messages. */
#ifndef RANK_LIST_H
#define RANK_LIST_H

#include "net/client_state.h"

/**
 * Writes "rank 3 at host:port", or "ranks 0-2, 7", of the peers with @p mask; those that never said
 * who they are by address. What does not fit is counted ("and 12 more"), never cut.
 */
void rank_list_text(const fanin_client *client, const bool *mask, char *text,
                    size_t size);

#endif
