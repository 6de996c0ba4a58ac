/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file
 * One attempt of a pull: everything made ready without a lease, leases, reads, their end. A pull of
 * one call reads once and attempts again when it may; a session attempts until it has leases, and
 * reads as often as it is told to.
 */
#ifndef ATTEMPT_H
#define ATTEMPT_H

#include "pull/agree.h"
#include "pull/read_phase.h"

typedef struct pull {
    fanin_client *client;
    const fanin_pull_options *options;
    destination *destination;
    deadline at;
    uint64_t started_ns;
    publication *publication;
    plan_cache *cache;
    announcement *announced;
    bool *use, *needed;
    uint64_t
        *versions; /* one a peer: what leases are asked for with the announcements */
    reader_lease *leases;
    fanin_result *result;
    early_begin early; /* of the attempt's agreement */
    adapter_identity identity;
    uint8_t *base;
    path_goal goal;       /* its ranges: the destination's */
    path_foresight known; /* of the attempt's agreement */
    read_progress progress;
    uint64_t bytes, tensors; /* read */
    bool open_only;          /* the attempt is good when it has its leases */
    bool final;              /* the attempt ended by what no other one would mend */
    bool refused;            /* the attempt ended before anything was read: not stale */
    bool missing;            /* it ended for want of ranks that cannot be connected */
    bool
        coming; /* it ended for want of ranks that are being connected, and were not waited for */
    bool patient; /* ranks that did not answer the last time are waited for again */
    uint64_t leased_ns,
        held_ns;       /* when leases were granted; how long they were needed */
    uint32_t lease_ms; /* how long they last: the longest */
    unsigned transport_failures;
    uint32_t
        pause_ms; /* the widest before the last restart that no update has caused; 0: none yet */
    fanin_error stale; /* the last reason to restart */
    fanin_error lost;  /* the last lost rank or path that was a reason to restart */
} pull;

/** Nanoseconds since @p since, which becomes now. */
uint64_t lap(uint64_t *since);

/**
 * Until the leases are held, on which attempt_read() reads; *skip_out: the destination is there
 * already, and none are. What is granted when it fails is to be given back.
 */
fanin_status attempt_begin(pull *p, bool *skip_out, fanin_error *error);
/** The part, under the leases: what has landed counts if attempt_end() succeeds. Errors as of
    read_phase_run() and verify_run(). */
fanin_status attempt_read(pull *p, plan_part *part, fanin_error *error);
/** Ends the leases. FANIN_ERR_STALE: nothing that was read counts. */
fanin_status attempt_end(pull *p, fanin_error *error);

/** What a pull needs besides; @p p has client, options and destination. */
fanin_status pull_open(pull *p, fanin_error *error);
/** Attempts until one is good or no other one would be. */
fanin_status pull_until_good(pull *p, fanin_error *error);
/** Of a pull or a session that ended with @p why, FANIN_ERR_STALE: the same, with what helps if
    reading takes longer than a lease lasts, so that trying again would not. */
fanin_status pull_overtaken(pull *p, const fanin_error *why, fanin_error *error);
/** Publishes, and fills the result. */
fanin_status pull_complete(pull *p, fanin_error *error);
/** Tells trace and log of the call, or of a session's begin: from started_ns until now. @p error:
    why it
    failed, may be NULL. */
void pull_ended(pull *p, trace_name name, fanin_status status,
                const fanin_error *error);
void pull_release(pull *p);

#endif
