/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file
 * Which path each rank's regions are read on, why, and what that path keeps of them. It is made
 * from a connection and a catalog: what was made from others drops itself when it is looked at.
 */
#ifndef PATH_STATE_H
#define PATH_STATE_H

#include "catalog/tables.h"
#include "device/device_memory.h"

#define PATH_REASON 256 /**< bytes of a sentence that says why a path was taken */

struct path_reader;

/** What a path keeps of a rank's regions, remote keys or mappings; embedded at the front. */
typedef struct path_hold {
    void (*drop)(fanin_client *client, size_t peer, struct path_hold *hold);
} path_hold;

/** One rank's path for one publication. */
typedef struct path_state {
    uint64_t serial;                /**< of the rank's paths: that it was made for */
    uint64_t generation, version;   /**< of the connection and the catalog: likewise */
    const struct path_reader *path; /**< NULL: not decided */
    char reason[PATH_REASON];
    region_table *regions; /**< NULL until the choice of a path needs them */
    const struct path_reader *regions_path; /**< whose keys they have; NULL: none */
    path_hold *hold;                        /**< of the regions; NULL: nothing yet */
} path_state;

struct path_states {
    gather_set gather; /**< collect cuda_ipc's bytes for host memory; empty: none yet */
    path_state peers[]; /**< one a peer */
};

/** Makes what the functions below need. FANIN_ERR_MEMORY. */
fanin_status path_states_open(fanin_client *client, publication *p, fanin_error *error);
/** The publication's, before its tables go. */
void path_states_free(fanin_client *client, publication *p);
/** What is of no publication, when none has any: before the paths' ends. */
void path_states_close(fanin_client *client);

/** The peer's state, as far as it still holds. */
path_state *path_state_of(fanin_client *client, publication *p, size_t peer);
/** The same for tables that are not here yet: of the catalog @p version of the present connection.
    */
path_state *path_state_ahead(fanin_client *client, publication *p, size_t peer,
                             uint64_t version);
/** The path that was taken last, and why; never NULL. */
const path_state *path_taken(const publication *p, size_t peer);
/** Lets go of what the path keeps of the regions; the path is to be decided anew. */
void path_state_drop(fanin_client *client, path_state *s, size_t peer);

/** What was decided about this peer's paths, for whichever publication, is void. */
void path_void(fanin_client *client, size_t peer);
/** The same, for the path failed while it was used: stream until the rank is connected anew, unless
    another path is forced. */
void path_avoid(fanin_client *client, size_t peer, const char *why);
/** Why the peer has to be read by stream; NULL: it need not be. */
const char *path_avoided(fanin_client *client, size_t peer);

/** Asks for the peer's regions with the keys of @p path (NULL: none), whose catalog is @p version;
    f->here and its cookie are the caller's. */
void path_regions_request(const publication *p, size_t peer, uint64_t version,
                          const struct path_reader *path, fetch *f);

/** Brings the region tables of peers with want[i] to the keys of @p path. @p refused, one a peer:
    who is there and gives none gets its error there, and the others go on. Errors as of
    tables_sync(). */
fanin_status path_state_regions(fanin_client *client, publication *p, const bool *want,
                                const struct path_reader *path, deadline at,
                                fanin_error *refused, fanin_error *error);

#endif
