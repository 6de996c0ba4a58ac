/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file
 * Which path each rank's regions are read on, why, and what that path keeps of them. It is made
 * from a connection and a catalog: what was made from others drops itself when it is looked at.
 */
#ifndef PATH_H
#define PATH_H

#include "array.h"
#include "catalog/tables.h"
#include "device/devices.h"
#include "gpu.h"
#include "plan/plan.h"

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

struct device_sink;
typedef struct path_reader path_reader;

/* -------------------------------------------------------------- choosing */

/** Zeroed: none. */
typedef struct device_set {
    int device[GPU_MAX_DEVICES];
    size_t n;
} device_set;

/** @p device below 0 is none. */
static inline void device_set_add(device_set *set, int device)
{
    bool known = device < 0;
    for (size_t i = 0; i < set->n && !known; i++)
        known = set->device[i] == device;
    if (!known && set->n < GPU_MAX_DEVICES)
        set->device[set->n++] = device;
}

/** Where the bytes are to go, as far as it is known before there is a plan. */
typedef struct path_outline {
    uint64_t bytes;
    device_set devices;
} path_outline;

/** What is known when ranks have announced a step, and of some no table is here. */
typedef struct path_foresight {
    const announcement *announced; /**< one a peer */
    const bool *use;               /**< likewise: that are to be read */
    /** looks at each tensor; NULL: nothing of the destination is on a device */
    void (*outline)(void *cookie, path_outline *out);
    void *cookie;
} path_foresight;

/** Where the bytes are to go, and what that led to. */
typedef struct path_goal {
    const memory_range *ranges;
    size_t n_ranges;
    uint8_t *base;
    const struct path_plan *plan; /**< what is to be read; NULL: anything */
    gather_set gather; /**< out: that collect what cuda_ipc brings to host memory */
    uint64_t map_ns;   /**< out: spent on mapping other processes' memory */
    uint64_t table_ns; /**< out: spent on tables for kernels */
    /** called once by a path that waits for its driver: what it will probably read those peers by
        may be made meanwhile. FANIN_ERR_CANCELLED ends the pull, other failures are nothing. NULL:
        there is nothing to do */
    fanin_status (*meanwhile)(void *cookie, const path_reader *reader, const bool *mask,
                              fanin_error *error);
    void *cookie;
    void *ahead; /**< what path_begin_ahead() began; NULL: nothing */
} path_goal;

/** One choice of paths, of all ranks at once. */
typedef struct path_round {
    fanin_client *client;
    publication *publication;
    const bool *want;
    path_goal *goal;
    deadline at;
    const path_reader *fallback; /**< that every rank can be read by */
    device_set devices;          /**< that the destination is on */
    bool host;                   /**< some of the destination is host memory */
    bool lacks; /**< a path found that this host lacks what it needs: no rank's fault */
} path_round;

/* -------------------------------------------------------------- planning */

/** A plan, and who its sources are. */
typedef struct path_plan {
    digest id; /**< plans that are alike have one */
    plan *plan;
    plan_source *sources;
    size_t *peer_of;               /**< source -> peer */
    const path_reader **reader_of; /**< of each source; NULL: nothing is read from it */
    size_t n_sources;
    bool once; /**< for one read: what lasts is not made for it */
} path_plan;

typedef struct path_planning {
    fanin_client *client;
    publication *publication;
    const path_plan *plan;
    path_goal *goal;
    work_stop *stop;
} path_planning;

/* --------------------------------------------------------------- reading */

/** A reader's token on one rank. */
typedef struct reader_lease {
    bool held;
    uint8_t token[16];
    uint32_t lease_ms;
    uint32_t first_region; /**< added to the box table's regions */
    uint64_t generation;   /**< of the connection that it was granted on */
    uint64_t
        epoch; /**< of the publication, or the generation of its copy; of early leases
                              only if patches were asked for */
} reader_lease;

/** What one rank served in the attempt that counted. */
typedef struct served {
    uint64_t bytes, reads, read_ns;
    uint32_t connections; /**< data connections; 0: one-sided or nothing */
    bool used;
} served;

/** One attempt's reading, which all paths share; outlives what they make for it. */
typedef struct path_reading {
    fanin_client *client;
    publication *publication;
    const path_plan *plan;
    const reader_lease *leases; /**< one a peer */
    uint8_t *base;
    const memory_range *ranges; /**< of the destination */
    size_t n_ranges;
    need_fn need;     /**< of host memory; may be NULL; its failure is the reading's */
    landed_fn landed; /**< of what lands in host memory; may be NULL */
    digested_fn digested; /**< takes digests that need no reading; may be NULL */
    void *cookie;         /**< of the three */
    bool pinned; /**< CUDA's copy engine may write the destination's host memory */
    const fanin_stream *after; /**< what lands on devices comes after its work */
    struct device_sink *sink;  /**< of what lands in CUDA memory; NULL: nothing */
    uint64_t *done_ns;         /**< out, of each source: when all was in place */
    const served *served;      /**< of each peer: by the reads before */
} path_reading;

/** A path. */
struct path_reader {
    const char *name;
    fanin_path number; /**< as on the wire */
    bool is_fallback;  /**< every rank can be read by it: who fails otherwise is */
    bool is_linked;    /**< reads over data connections */
    /** How bytes from the rank are guarded on their way. NULL: they do not leave the host. */
    fanin_checksums (*guard)(const connection *c);
    size_t
        told_at; /**< in a msg_end: the bytes read, which the rank saw nothing of; 0: it saw them
                     */
    bool asks; /**< asks for destination memory part by part, not for all at once */
    bool uses_sink; /**< brings to devices by way of a device_sink */
    /* What it keeps of a client between pulls; each may be NULL. */
    fanin_status (*create)(fanin_client *client, fanin_error *error);
    void (*disconnect)(fanin_client *client); /**< no read is under way */
    void (*destroy)(fanin_client *client);    /**< after that */
    /** Of the peers with open[i], those that are for this path are tried and decided, and not open
        any more; those that are on it get what the round's devices need besides. An error ends the
        pull; what does not work goes to path_give_up(). */
    fanin_status (*probe)(path_round *r, bool *open, fanin_error *error);
    /** Unmaps what it maps of the publication; no reading is under way. NULL: it maps nothing. */
    void (*unmap)(fanin_client *client, publication *p);

    const span_rule *span_rule; /**< of path_make_spans(); NULL: it is not used */
    /** Makes what a source is read by. Several threads may, each of another source: nothing else
        changes. */
    fanin_status (*plan)(const path_planning *how, size_t source, void **detail,
                         fanin_error *error);
    /** Brings what all sources are read by to the current round. May be NULL. */
    fanin_status (*plan_all)(const path_planning *how, void *const *details,
                             void **shared, fanin_error *error);
    /** The plan goes. Both may be called with NULL. */
    void (*forget)(void *detail);
    void (*forget_all)(void *shared); /**< may be NULL */

    /** Begins; on an error *reading may be there nevertheless. It has a source at least.
        @p details: one a source. */
    fanin_status (*start)(const path_reading *r, void *const *details, void *shared,
                          void **reading, fanin_error *error);
    /** Does what can be done now; waits for a moment at most, and not if other paths have work.
        True: something happened. NULL: the loop does all. */
    bool (*step)(void *reading);
    /** *done: all of a source is in place. FANIN_ERR_TRANSPORT: maybe for its path alone. */
    fanin_status (*check)(void *reading, size_t source, bool *done, fanin_error *error);
    /** Before the loop waits: true if it must not; *wake: when to look again. May be NULL. */
    bool (*busy)(void *reading, deadline *wake);
    /** Of a source, so far. *waits: bytes that were asked of it are not here. */
    uint64_t (*bytes)(const void *reading, size_t source, bool *waits);
    uint64_t (*scatter_ns)(const void *reading); /**< spent on copying; may be NULL */
    /** All is in place: bytes, reads, connections. */
    void (*account)(const void *reading, size_t source, served *out);
    /** Ends it. False: something may still write the destination. */
    bool (*finish)(void *reading);
};

/* ------------------------------------------------------- for the paths' files */

/** The peer's path for this publication from now on, and why. */
void path_set(path_round *r, size_t peer, const path_reader *path, const char *reason);
/** path_set(), and the log told. */
void path_choose(path_round *r, size_t peer, const path_reader *path,
                 const char *reason);
/** Whether the configuration lets it be tried: it forces no other one. */
bool path_is_allowed(const fanin_client *client, const path_reader *path);
/** One rank's better path did not come about: the fallback, or an error if it was forced or if the
    rank itself was lost. */
fanin_status path_give_up(path_round *r, size_t peer, const char *why,
                          fanin_error *error);
/** The same of those with mask[i]. */
fanin_status path_give_up_all(path_round *r, const bool *mask, const char *why,
                              fanin_error *error);
/** What a path does with one rank. On an error, which says why, the rank is given up; only
    FANIN_ERR_TIMEOUT and FANIN_ERR_CANCELLED end the pull. */
typedef fanin_status (*path_try_fn)(path_round *r, size_t peer, void *cookie,
                                    fanin_error *why);
/** @p fn with each that has mask[i], which is cleared of those that are given up. */
fanin_status path_try(path_round *r, bool *mask, path_try_fn fn, void *cookie,
                      fanin_error *error);
/** An answer to open_path; else as a path_try_fn. */
typedef fanin_status (*path_opened_fn)(path_round *r, size_t peer,
                                       const msg_open_path *reply, void *cookie,
                                       fanin_error *why);
/** Asks all with mask[i] at once to open a path to them; likewise. */
fanin_status path_open(path_round *r, bool *mask, const msg_open_path *m,
                       path_opened_fn opened, void *cookie, fanin_error *error);
/** Region tables of peers with mask[i] with the keys of @p path (NULL: none); who refuses them is
    given up and its mask cleared. */
fanin_status path_regions(path_round *r, bool *mask, const path_reader *path,
                          fanin_error *error);
/** Whether the rank offers it on this connection, and is on this host. */
bool path_is_offered(const fanin_client *client, size_t peer, const path_reader *path);
/** Why it is not: @p plain, unless more is known. */
const char *path_not_offered(const fanin_client *client, size_t peer,
                             const char *plain);
bool path_is_local(const fanin_client *client, size_t peer);

/** The control connection to a source. */
connection *path_source(const path_reading *r, size_t source);
/** What is added to the regions of a source's spans. FANIN_ERR_PROTOCOL: the rank granted an arena
    that its region table does not hold. */
fanin_status path_arena(const path_reading *r, size_t source, uint32_t *first_region,
                        fanin_error *error);
/** A source's pieces cut by its reader's span_rule: a plan() and its forget(). */
fanin_status path_make_spans(const path_planning *how, size_t source, void **detail,
                             fanin_error *error);
void path_forget_spans(void *detail);

#endif
