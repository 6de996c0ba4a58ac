/* SPDX-License-Identifier: Apache-2.0 */
/** @file Fetching blobs (key, box and region tables) page by page, many ranks at once. */
#ifndef FETCH_H
#define FETCH_H

#include "net/client_state.h"

/** The caller sets peer, type and request; the rest is the fetch's. */
typedef struct fetch {
    size_t peer;
    message_type type; /**< MSG_KEYS, MSG_BOXES, MSG_REGIONS */
    msg_blob_request request;
    buffer data; /**< the blob; freed by fetch_free() */
    fanin_client *client;
    size_t *left;
    fanin_status status;
    fanin_error error;
} fetch;

/** All at once; the first error in their order. Bounded by the client's max_catalog. */
fanin_status fetch_all(fanin_client *client, fetch *fetches, size_t n, deadline at,
                       fanin_error *error);
void fetch_free(fetch *fetches, size_t n);

#endif
