/* SPDX-License-Identifier: Apache-2.0 */
/** @file What each rank has of one publication: who is gone, who is behind, in words. */
#ifndef RANK_STATUS_H
#define RANK_STATUS_H

#include "net/client_state.h"

typedef struct rank_status {
    bool answered;    /**< the rest is known */
    bool present;     /**< the rank publishes it */
    int32_t state;    /**< FANIN_PUBLICATION_... */
    uint64_t age_ms;  /**< since it has this state; 0: not known */
    uint64_t step;    /**< last committed, 0: none */
    uint64_t version; /**< of the catalog; 0: none yet */
    uint8_t keys[16]; /**< digest of the key table */
} rank_status;

/**
 * Asks every rank that is there, until @p at; out[i] is peer i's. Who does not answer has answered
 * false. FANIN_ERR_CANCELLED, FANIN_ERR_MEMORY.
 */
fanin_status rank_status_ask(fanin_client *client, const char *publication, deadline at,
                             rank_status *out, fanin_error *error);

/**
 * Writes who can't be read at @p step: first the ranks that are gone, then those that do not
 * answer, then those that are furthest behind, then those that are in an update. Returns the first
 * peer that it names, n_peers if there is none.
 */
size_t rank_status_text(const fanin_client *client, const rank_status *all,
                        uint64_t step, char *text, size_t size);

#endif
