/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file
 * A pull is a machine: it is in one state, pull_step() of pull.c runs that state's function, and
 * the function moves it to the next one. One that fails leaves the state as it is, and pull.c
 * judges by the error; or it moves the pull to PULL_PAUSE or PULL_FAILED, where it knows better.
 *
 * A pull of one call runs from PULL_START to PULL_DONE. A session's runs to PULL_HELD, from
 * PULL_DETAIL back to PULL_HELD for each read, and from PULL_END to PULL_DONE.
 */
#ifndef STATES_H
#define STATES_H

#include "delta/delta.h"
#include "pull/plan_cache.h"

typedef enum pull_state {
    PULL_START, /**< an attempt begins */
    PULL_PAUSE, /**< the last one failed, and another one follows */
    /* ready.c: without leases, and without writing anything */
    PULL_CONNECT, /**< to the ranks */
    PULL_AGREE,   /**< on a step that they announce */
    PULL_TABLES,  /**< of that step are brought here */
    PULL_PLAN,    /**< which bytes come from which rank */
    /* ready.c: all that is slow, before there are leases */
    PULL_SETTLE, /**< the destination learns the step; it may be there already */
    PULL_RANGES, /**< of memory that is filled */
    PULL_PATHS,  /**< that ranks are read by */
    /* patches.c */
    PULL_CHOOSE, /**< whether patches are read, or the whole */
    PULL_RECALL, /**< the destination gets what they are applied to */
    /* ready.c */
    PULL_ROOM,    /**< where the bytes land */
    PULL_DETAIL,  /**< what the paths read by */
    PULL_STREAMS, /**< data connections */
    /* lease.c */
    PULL_BEGIN, /**< leases are taken */
    PULL_HELD,  /**< a session between two calls */
    /* patches.c */
    PULL_PATCHES, /**< are read instead of the whole */
    /* read.c, verify.c */
    PULL_READ,
    PULL_VERIFY,
    /* lease.c */
    PULL_END, /**< leases end: whether what was read counts */
    /* patches.c, verify.c */
    PULL_APPLY, /**< patches, to what the destination holds */
    PULL_COMPARE,
    /* pull.c */
    PULL_PUBLISH,
    PULL_DONE,
    PULL_FAILED, /**< pull.why says why */
} pull_state;

/** What a pull did, gathered while it runs. */
struct fanin_result {
    fanin_result_info info;
    char reason[PATH_REASON];
    char *ranks_json;
    served *served; /**< one a peer */
    size_t n_peers;
};

/** How far an attempt is, over all its reads. */
typedef struct read_progress {
    const path_plan *whole; /**< that the reads are parts of */
    uint64_t done, total;   /**< bytes; done: by the reads that have ended */
    uint64_t told_ns;       /**< when the caller was told last */
} read_progress;

/** How long leases that came with announcements are kept for what is still missing. */
#define EARLY_MS 2

/** Leases that ranks are to grant together with their announcements, if they can announce at once.
    */
typedef struct early_begin {
    const uint64_t
        *versions;        /**< one a peer: the catalog that is at hand; 0: no lease */
    reader_lease *leases; /**< one a peer, out */
    uint64_t since_ns;    /**< out: when the first was granted; 0: none was */
} early_begin;

typedef struct pull {
    pull_state state;
    bool session;     /**< its leases are held between calls */
    bool only_verify; /**< a session's part is here already, by whomever */
    bool patient; /**< ranks that did not answer the last time are waited for again */
    fanin_error why;
    fanin_client *client;
    const fanin_pull_options *options;
    destination *destination;
    deadline at;
    uint64_t started_ns, attempt_ns; /**< when the call began, and the attempt */
    publication *publication;
    plan_cache *cache;
    plan_part *part; /**< what a session's read brings; NULL: the whole */
    /* one a peer */
    announcement *announced;
    bool *use, *needed;
    uint64_t *versions;   /**< what leases are asked for with the announcements */
    identity_rank *ranks; /**< of the identity, of a directory */
    reader_lease *leases;
    fanin_result *result;
    size_t there;      /**< ranks that were connected for the attempt */
    early_begin early; /**< of the attempt's agreement */
    adapter_identity identity;
    uint8_t *base;
    path_goal goal;       /**< its ranges: the destination's */
    path_foresight known; /**< of the attempt's agreement */
    read_progress progress;
    uint64_t bytes, tensors; /**< read */
    uint64_t leased_ns;      /**< when the first lease was asked for */
    uint64_t held_ns;        /**< how long they were needed */
    uint32_t lease_ms;       /**< how long they last: the longest */
    uint32_t
        pause_ms; /**< the widest before the last restart that no update has caused */
    unsigned transport_failures;
    delta *delta; /**< the attempt's: patches are read; NULL: the whole */
    uint64_t
        drops; /**< of the destination's base, when this pull looked at it or wrote it */
    bool writes;  /**< the destination's base counts it as a writer */
    bool unequal; /**< patches led to other bytes: no more of them in this call */
    struct verifier
        *kept;         /**< what ranks have digested, to be compared after the end */
    fanin_error stale; /**< the last reason to restart */
    fanin_error lost;  /**< the last lost rank or path that was a reason to restart */
} pull;

static inline plan_part *pull_part(const pull *p)
{
    return p->part ? p->part : &p->cache->whole;
}

/** The destination's that the part reaches. */
static inline const memory_range *pull_ranges_of_part(const pull *p, size_t *n)
{
    *n = p->part ? p->part->n_ranges : p->goal.n_ranges;
    return p->part ? p->part->ranges : p->goal.ranges;
}

#endif
