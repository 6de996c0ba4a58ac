/* SPDX-License-Identifier: Apache-2.0 */
/** @file The path rdma, which UCX carries: the client's end of it. */
#ifndef UCX_END_H
#define UCX_END_H

#include "path/path.h"
#include "ucx.h"

#define SPAN_MAX ((uint64_t)512 << 10) /**< bytes of one get, and of one staging slot */

#define STAGING_SLOTS 8
#define STAGING_BYTES (STAGING_SLOTS * SPAN_MAX) /**< of ucx_end.staging */

/** An endpoint to one rank. */
typedef struct ucx_peer {
    ucx_endpoint *endpoint; /**< NULL: none */
    uint64_t generation;    /**< of the connection that it was made over */
    uint64_t serial;        /**< of the endpoint: its remote keys go with it */
} ucx_peer;

typedef struct ucx_end {
    ucx *ucx;          /**< NULL: none */
    char missing[256]; /**< why there is none */
    ucx_client *client;
    ucx_peer *peers; /**< one a peer; NULL: no endpoint yet */
    uint64_t serials;
    uint8_t *staging;         /**< where staged gets land; kept between pulls */
    ucx_local *staging_local; /**< its registration with client */
} ucx_end;

/** Fills client->one_sided; loads UCX if a path may need it. FANIN_ERR_MEMORY. */
fanin_status ucx_end_create(fanin_client *client, fanin_error *error);
/** Closes it before @p at: what was decided by it is void. False: reads could not be drained
    (see ucx_endpoint_close()). */
bool ucx_end_drop(fanin_client *client, size_t peer, deadline at);
/** How long reads that cannot be recalled may take to call back. */
deadline ucx_end_drain_by(void);
/** Closes all endpoints and the client; waits for reads that cannot be recalled, 10 s at most.
    False: they could not be recalled even so; what they land in must never be freed. */
bool ucx_end_close(fanin_client *client);
/** After that. */
void ucx_end_free(fanin_client *client);

extern const path_reader ucx_reader;

/** See path_reader. */
fanin_status ucx_probe(path_round *r, bool *open, fanin_error *error);

/** The keys of the state's regions, which is rdma. */
ucx_rkey *const *ucx_keys_of(const path_state *s);

#endif
