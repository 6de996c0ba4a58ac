/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file
 * The interface of a path: how it is tried with ranks, what it makes of a plan, how it reads.
 * pull/choose_path.c lists the paths; nobody else asks which one it is.
 */
#ifndef READER_H
#define READER_H

#include "gpu.h"
#include "array.h"
#include "path/path_state.h"
#include "plan/plan.h"

struct device_sink;

/* -------------------------------------------------------------- choosing */

/** Where the bytes are to go, and what that led to. */
typedef struct path_goal {
    const memory_range *ranges;
    size_t n_ranges;
    uint8_t *base;
    int gather_device; /**< out: that collects what cuda_ipc brings to host memory; -1: none */
    uint64_t map_ns;   /**< out: spent on mapping other processes' memory */
    uint64_t table_ns; /**< out: spent on tables for kernels */
} path_goal;

/** One choice of paths, of all ranks at once. */
typedef struct path_round {
    fanin_client *client;
    publication *publication;
    const bool *want;
    path_goal *goal;
    deadline at;
    int devices[GPU_MAX_DEVICES]; /**< that the destination is on */
    size_t n_devices;
    bool host;  /**< some of the destination is host memory */
    bool lacks; /**< a path found that this host lacks what it needs: no rank's fault */
} path_round;

/* -------------------------------------------------------------- planning */

/** A plan, and the peers that its sources are. */
typedef struct path_plan {
    plan *plan;
    plan_source *sources;
    size_t *peer_of; /**< source -> peer */
    size_t n_sources;
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
    uint32_t
        first_region; /**< added to the box table's regions: where the bytes are now */
} reader_lease;

/** What one rank served in the attempt that counted. */
typedef struct served {
    uint64_t bytes, reads, read_ns;
    uint32_t connections; /**< data connections; 0: one-sided or nothing */
    bool used;
} served;

typedef struct path_reader path_reader;

/** One attempt's reading, which all paths share; outlives what they make for it. */
typedef struct path_reading {
    fanin_client *client;
    publication *publication;
    const path_plan *plan;
    const path_reader **reader_of; /**< of each source; NULL: nothing is read from it */
    const reader_lease *leases;    /**< one a peer */
    uint8_t *base;
    const memory_range *ranges; /**< of the destination */
    size_t n_ranges;
    need_fn need;     /**< of host memory; may be NULL; its failure is the reading's */
    landed_fn landed; /**< of what lands in host memory; may be NULL */
    void *cookie;     /**< of the two */
    bool pinned;      /**< CUDA's copy engine may write the destination's host memory */
    const fanin_stream *after; /**< what lands on devices comes after its work */
    struct device_sink
        *sink; /**< takes what lands in CUDA memory; NULL: nothing does */
    uint64_t
        *done_ns;   /**< out, of each source: when its last byte was found in place */
    served *served; /**< out, of each peer */
} path_reading;

/** A path, or several of one kind. */
struct path_reader {
    uint32_t paths; /**< that it is: 1 << fanin_path each */
    bool asks; /**< asks for destination memory part by part, not for all at once */
    bool uses_sink; /**< brings to devices by way of a device_sink */
    /** Of the peers with open[i], those that are for this path are tried and decided, and not open
        any more; those that are on it get what the round's devices need besides. An error ends the
        pull; what does not work goes to path_give_up(). */
    fanin_status (*probe)(path_round *r, bool *open, fanin_error *error);
    /** Unmaps what it maps of the publication; no reading is under way. NULL: it maps nothing. */
    void (*unmap)(fanin_client *client, publication *p);

    /** Makes what its sources are read by, if that is not in *detail (NULL at first) already. */
    fanin_status (*plan)(const path_planning *how, void **detail, fanin_error *error);
    /** The plan goes. @p detail may be NULL. */
    void (*forget)(void *detail, size_t n_sources);

    /** Begins; on an error *reading may be there nevertheless. It has a source at least. */
    fanin_status (*start)(const path_reading *r, void *detail, void **reading,
                          fanin_error *error);
    /** Does what can be done without waiting; true: there was something. May be NULL. */
    bool (*step)(void *reading);
    /** Whether all is in place; else *done becomes false. @p last: nothing else is left to do, it may
        wait for a moment. */
    fanin_status (*check)(void *reading, bool last, bool *done, fanin_error *error);
    /** Before the loop waits: true if it must not; *wake: when to look again. May be NULL. */
    bool (*busy)(void *reading, deadline *wake);
    uint64_t (*bytes)(const void *reading); /**< so far */
    /** All is in place: fills served[] but read_ns, used. Returns the time spent on copying. */
    uint64_t (*account)(const void *reading);
    /** Ends it. False: something may still write the destination. @p why: a path failed so (see
        path_avoid()); NULL: none did. */
    bool (*finish)(void *reading, const fanin_error *why);
};

/* ------------------------------------------------------- for the paths' files */

/** The peer's path for this publication from now on, and why. */
void path_set(path_round *r, size_t peer, fanin_path path, const char *reason);
/** path_set(), and the log told. */
void path_choose(path_round *r, size_t peer, fanin_path path, const char *reason);
/** One rank's better path did not come about: stream, or an error if it was forced or if the
    rank itself was lost. */
fanin_status path_give_up(path_round *r, size_t peer, const char *why,
                          fanin_error *error);
/** Region tables of peers with mask[i] for @p path; who refuses them is given up and its mask
    cleared. */
fanin_status path_regions(path_round *r, bool *mask, fanin_path path,
                          fanin_error *error);
/** Whether the rank offers it on this connection, and is on this host. */
bool path_is_offered(const fanin_client *client, size_t peer, fanin_path path);
bool path_is_local(const fanin_client *client, size_t peer);

/** The peer that a source of the reading is. */
peer *path_source(const path_reading *r, size_t source);
/** What is added to the regions of a source's spans. FANIN_ERR_PROTOCOL: the rank granted an arena
    that its region table does not hold. */
fanin_status path_arena(const path_reading *r, size_t source, uint32_t *first_region,
                        fanin_error *error);
/** Why a connection is not there, if one to a source of @p reader is not. */
fanin_status path_check_ranks(const path_reading *r, const path_reader *reader,
                              fanin_error *error);
/** The source's last byte has been found in place. */
void path_note_done(const path_reading *r, size_t source);

#endif
