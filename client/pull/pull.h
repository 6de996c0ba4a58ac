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
#ifndef PULL_H
#define PULL_H

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
    const uint64_t *versions; /**< one a peer: the catalog at hand; 0: no lease */
    reader_lease *leases;     /**< one a peer, out */
    uint64_t since_ns;        /**< out: when the first was granted; 0: none was */
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
    uint32_t pause_ms;       /**< the widest before a restart that no update caused */
    unsigned transport_failures;
    delta *delta;   /**< the attempt's: patches are read; NULL: the whole */
    uint64_t drops; /**< of the destination's base, as this pull left it */
    bool writes;    /**< the destination's base counts it as a writer */
    bool unequal;   /**< patches led to other bytes: no more of them in this call */
    struct verifier *kept; /**< ranks' digests, to be compared after the end */
    fanin_error stale;     /**< the last reason to restart */
    fanin_error lost; /**< the last lost rank or path that was a reason to restart */
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

/* --------------------------------------------------------------------- pull.c */

/** Checks struct_size, publication's form, rule, timeout; copies over defaults. */
fanin_status pull_options_read(const fanin_pull_options *in, fanin_pull_options *out,
                               fanin_error *error);
/** The client, and then these. */
fanin_status pull_check(const fanin_client *client, const fanin_pull_options *in,
                        fanin_pull_options *out, fanin_error *error);

/** From its options to its result. */
fanin_status pull_run(fanin_client *client, const fanin_pull_options *options,
                      destination *d, fanin_result **result_out, fanin_error *error);

/** The key table of a publication that was fetched last, valid until the client fetches another
    one; NULL: none. */
const key_table *pull_known_keys(fanin_client *client, const char *name);

/* For sessions. */

/** What a pull needs besides; @p p has client, options and destination. */
fanin_status pull_open(pull *p, fanin_error *error);
/** Steps until it is in @p until, FANIN_OK, or PULL_FAILED. */
fanin_status pull_go(pull *p, pull_state until, fanin_error *error);
/** Of a session that had its leases and ended with @p why: the same, with what helps if reading
    takes longer than a lease lasts, so that trying again would not. */
fanin_status pull_overtaken(pull *p, const fanin_error *why, fanin_error *error);
/** Tells trace and log of the call, or of a session's begin: from started_ns until now. @p error:
    why it failed, may be NULL. */
void pull_ended(pull *p, trace_name name, fanin_status status,
                const fanin_error *error);
/** Gives leases back that are still held. */
void pull_release(pull *p);

/* -------------------------------------------------------------------- agree.c */

/* Agreeing on a step: waiting, without any lease, until ranks announce a common one. */

/** What the caller is going to read. */
typedef struct agree_need {
    /** *@p vain: the ranks with @p use[i] can't serve it for want of one that is gone; returned is
        that rank's error. Their tables are at hand. */
    fanin_status (*without)(void *cookie, const bool *use, bool *vain,
                            fanin_error *error);
    void *cookie;
    bool deltas; /**< ranks are to tell which patches they have */
} agree_need;

/**
 * Asks all READY ranks to announce a stable step by the options' rule and waits until all of
 * them, or a sufficient set of them (replicas), announce one. announced[i] and use[i]
 * (one a peer) say who did; the step is announced[i].step of any with use[i].
 *
 * @p early (NULL: none are asked for): the leases of ranks that are used may be held then, at that
 * step and of those catalogs, as if they had been begun; all are given back if no agreement comes
 * within EARLY_MS of the first: a trainer whose ranks wait for each other is not held up by a
 * reader that waits.
 *
 * FANIN_ERR_SUPERSEDED, FANIN_ERR_NOT_FOUND (no such run), FANIN_ERR_PAUSED (by a rank without
 * which the others, as soon as they have answered, do not suffice), FANIN_ERR_TIMEOUT (names the
 * ranks that are gone, silent or behind, and their steps), FANIN_ERR_CANCELLED, connection errors
 * if no rank is left, or one is gone without which @p need (NULL: not asked) can't be met.
 */
fanin_status agree(fanin_client *client, publication *p,
                   const fanin_pull_options *options, const agree_need *need,
                   early_begin *early, deadline at, announcement *announced, bool *use,
                   fanin_error *error);

/** The rank to blame for what the ranks with @p use[i], whose tables are at hand, do not hold: one
    that is gone and without which the others do not suffice, as far as the tables of those that are
    gone are known. n_peers: none is gone. */
size_t agree_culprit(fanin_client *client, const publication *p, const bool *use,
                     deadline at);

/** *@p enough: the ranks with @p use[i] hold the whole publication. Their tables are at hand.
    False if it is not known by @p at. */
fanin_status agree_sufficient(fanin_client *client, const publication *p,
                              const bool *use, deadline at, bool *enough,
                              fanin_error *error);
/** Whether they do, and it is known by @p at. */
bool agree_suffice(fanin_client *client, const publication *p, const bool *use,
                   deadline at);

/* -------------------------------------------------------------------- ready.c */

/* All that comes before there are leases, under which nothing slow may happen: from the ranks that
   are there to a plan, and from a plan to all that its reads need. */

fanin_status pull_connect(pull *p, fanin_error *error); /**< PULL_CONNECT */
fanin_status pull_agree(pull *p, fanin_error *error);   /**< PULL_AGREE */
fanin_status pull_tables(pull *p, fanin_error *error);  /**< PULL_TABLES */
fanin_status pull_plan(pull *p, fanin_error *error);    /**< PULL_PLAN */
fanin_status pull_settle(pull *p, fanin_error *error);  /**< PULL_SETTLE */
fanin_status pull_ranges(pull *p, fanin_error *error);  /**< PULL_RANGES */
fanin_status pull_paths(pull *p, fanin_error *error);   /**< PULL_PATHS */
fanin_status pull_room(pull *p, fanin_error *error);    /**< PULL_ROOM */
fanin_status pull_detail(pull *p, fanin_error *error);  /**< PULL_DETAIL */
fanin_status pull_streams(pull *p, fanin_error *error); /**< PULL_STREAMS */

/* ------------------------------------------------------------------ patches.c */

/* A pull that reads patches instead of the whole (delta/delta.h), and what it may build upon. The
   destination is written when all ranks have ended well, and not before: an attempt that fails
   leaves the step that it holds. */

/** Whether it asks for patches. */
static inline bool pull_wants_patches(const pull *p)
{
    return p->options->deltas && p->destination->base && !p->session;
}

/** PULL_CHOOSE. Errors as of delta_choose(). */
fanin_status pull_choose(pull *p, fanin_error *error);
/** PULL_RECALL. Errors as of the destination's recall. */
fanin_status pull_recall(pull *p, fanin_error *error);
/** Leases are there: of the announced copies, or the whole is read. */
void pull_patches_begun(pull *p);
/** PULL_PATCHES. Errors as of pull_read(), and FANIN_ERR_PROTOCOL, which names the rank. */
fanin_status pull_patches(pull *p, fanin_error *error);
/** PULL_APPLY. FANIN_ERR_MEMORY: what is host memory may have been written; and errors as of
    delta_apply_devices(). */
fanin_status pull_apply(pull *p, fanin_error *error);
/** PULL_COMPARE. FANIN_OK: what the destination holds is what the ranks had digested, or the whole
    is read in another attempt. FANIN_ERR_MEMORY. */
fanin_status pull_compare(pull *p, fanin_error *error);
/** What an attempt has read of patches and digests. */
void pull_patches_forget(pull *p);

/* -------------------------------------------------------------------- lease.c */

/* Leases, begun and ended on all ranks at once. Some come with the announcements, so that a pull
   which has everything at hand asks its ranks once before it reads. What follows the agreement may
   then take no time: who would fetch tables, plan or try paths under a lease would hold up the
   trainer for nothing. */

/** What to ask of the ranks that the cached plan reads from; NULL: something is not at hand. */
early_begin *early_lease_ask(pull *p);
/** After the agreement: gives the leases back if the plan does not fit what was agreed upon. */
void early_lease_keep(pull *p);

fanin_status pull_begin(pull *p, fanin_error *error); /**< PULL_BEGIN */
fanin_status pull_end(pull *p, fanin_error *error);   /**< PULL_END */

/**
 * Conditional begins (step, catalog version) on all peers that are needed and whose lease is not
 * held yet; one that is held of another peer is given back. FANIN_OK: all granted.
 * FANIN_ERR_STALE: a rank has moved on (says which; not a stale read); what was granted stays
 * and must be given back with lease_round_abandon().
 */
fanin_status lease_round_begin(pull *p, fanin_error *error);

/** Ends all held leases, and tells each rank what of the bytes it did not see. FANIN_ERR_STALE: a
    rank's epoch has gone, the bytes must not be used. */
fanin_status lease_round_end(pull *p, fanin_error *error);

/** Asks those that have served whether all that was read so far is of the step for good; the leases
    stay. Errors as of the end, and FANIN_ERR_UNSUPPORTED: a rank of an older release. */
fanin_status lease_round_confirm(pull *p, fanin_error *error);

/** One that is not waited for: @p fn hears of it, in the loop, once. */
typedef void (*confirmed_fn)(void *cookie, fanin_status status, const fanin_error *why);
typedef struct confirmation confirmation;
/** Asks as lease_round_confirm(). Until all have answered it is in *@p list, which must stay.
    After an error @p fn is not called. */
fanin_status lease_confirm_later(pull *p, confirmed_fn fn, void *cookie,
                                 confirmation **list, fanin_error *error);
/** Those of the list are not waited for any more, and their functions not called. */
void lease_confirm_forget(fanin_client *client, confirmation **list);

/** Ends all held leases as lease_round_end(), of bytes that are confirmed: waits for no answer. */
void lease_round_leave(pull *p);
/** Gives leases back without waiting for an answer. */
void lease_round_abandon(fanin_client *client, reader_lease *leases);
/** The same of one peer's, if it is held. */
void lease_give_back(fanin_client *client, size_t peer, reader_lease *lease);
/** The same of one that came too late for the caller. */
void lease_refuse(connection *c, const uint8_t token[16]);
/** The same of what the request may still bring; the connection is READY. */
void lease_refuse_begun(connection *c, uint64_t request);

/* --------------------------------------------------------------------- read.c */

/**
 * PULL_READ. FANIN_OK: the part is in place. FANIN_ERR_STALE: a token was refused.
 * FANIN_ERR_CLOSED, UNREACHABLE, TRANSPORT: a rank's path was lost (it is dropped; try again).
 * Others are final. When it returns nothing writes the destination any more, or
 * destination->leak is set.
 */
fanin_status pull_read(pull *p, fanin_error *error);
/** Reads @p part into other memory than the destination, at @p to. Errors likewise. */
fanin_status pull_read_aside(pull *p, plan_part *part, uint8_t *to, fanin_error *error);
/** All bytes of the part are here: what follows. */
void pull_read_follows(pull *p);
/** The part counts as read: what follows. */
void pull_read_ended(pull *p);

/* What a pull does to the destination's base. */

/** What the destination will hold (base_name()); the plan's, which keeps it. */
const digest *pull_base_name(const pull *p);

/** It writes the destination, which has a base, from now on. */
void pull_writes(pull *p);
/** It writes it no more. */
void pull_base_leave(pull *p);
/** The destination holds what the pull has brought. */
void pull_base_keep(pull *p);
/** A directory is to hold it: tells its identity what patches may be applied to later. */
void pull_base_tell(pull *p);

/* ------------------------------------------------------------------- verify.c */

/* Whether what has landed is what the ranks hold. Ranks are asked under their leases. What they say
   is compared as it comes, or kept until patches are applied. */

/**
 * PULL_VERIFY: every rank digests the boxes that it served, this process what has landed. FANIN_OK:
 * all are equal. FANIN_ERR_STALE: a lease has gone. Errors of a lost rank as of pull_read(). No
 * other attempt mends FANIN_ERR_TRANSPORT (unequal: names rank and key), FANIN_ERR_UNSUPPORTED (a
 * rank that cannot), FANIN_ERR_MEMORY.
 *
 * Where the pull reads patches: the ranks' digests are in p->kept.
 */
fanin_status pull_verify(pull *p, fanin_error *error);

typedef struct verifier verifier;
/** *@p equal: the destination holds what the ranks had digested; else @p why says of which rank and
    key it does not. FANIN_ERR_MEMORY. */
fanin_status verify_kept(verifier *v, bool *equal, fanin_error *why);
/** Of a pull that is over, or begins anew; *@p out NULL is fine. */
void verify_forget(verifier **out);

/* ------------------------------------------------------------------- result.c */

fanin_result *result_create(size_t n_peers); /**< NULL: out of memory */
/** Makes of @p r, or of nothing (NULL), the result of a pull of which others brought a part: @p
    whole has what is of all, @p how says who they were. Takes @p r. NULL: no memory. */
fanin_result *result_of_several(fanin_result *r, const fanin_result_info *whole,
                                const char *how);
/** What guarded the bytes that served[] counts. */
fanin_checksums result_guard(const fanin_result *r, const fanin_client *client,
                             const publication *p);
/** Fills ranks_json, path and its reason, bytes and reads from served[]. */
fanin_status result_finish(fanin_result *r, const fanin_client *client,
                           const publication *p, fanin_error *error);

/** A part of an attempt that took @p ns (debug, event "phase"). */
void pull_log_part(const pull *p, trace_name name, fanin_status status, uint64_t ns);
/** One line of the whole (information, event "pull"), at most ten a second; of those left out the
    number.
    @p error may be NULL. */
void pull_log_whole(pull *p, fanin_status status, const fanin_error *error);

#endif
