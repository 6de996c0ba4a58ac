/* SPDX-License-Identifier: Apache-2.0 */
/** @file Recording what calls did when. */
#ifndef TRACE_H
#define TRACE_H

#include "log.h"
#include <fanin/trace.h>
#include <stdatomic.h>

/** What a span is of; trace_names[] has their names. */
typedef enum trace_name {
    TRACE_PULL,    /**< a whole call */
    TRACE_OPEN,    /**< of a session, until it has its leases */
    TRACE_ATTEMPT, /**< of a pull */
    TRACE_RESOLVE,
    TRACE_CONNECT,
    TRACE_WAIT,
    TRACE_CATALOG,
    TRACE_PLAN,
    TRACE_PATHS, /**< deciding how ranks are read */
    TRACE_MAP,
    TRACE_BEGIN,
    TRACE_READ,
    TRACE_READER, /**< a thread that reads beside the calling one */
    TRACE_DIGEST,
    TRACE_END,
    TRACE_APPLY, /**< patches, to what the destination holds */
    TRACE_BRING, /**< of a relay: units from one source, which has confirmed them */
    TRACE_WRITE,
    TRACE_PUBLISH,
    TRACE_BEGIN_UPDATE,
    TRACE_COMMIT,
    TRACE_NAMES,
} trace_name;

/** Which pull of the process's clients, and which of its attempts; 0: none. */
typedef struct trace_place {
    uint32_t pull, attempt;
} trace_place;

enum { TRACE_ABOUT = 104 };

typedef struct trace_span {
    uint64_t began_ns, ended_ns; /**< clock_ns() */
    uint64_t bytes, step;        /**< 0: not told */
    uint64_t scatter_ns;         /**< of a read: what copying cost, of all threads */
    trace_name name;
    int32_t rank;            /**< -1: of no rank; below: trace_unknown_rank()'s */
    trace_place place;       /**< zero: of no pull */
    fanin_status outcome;    /**< FANIN_OK, or why it ended otherwise */
    char about[TRACE_ABOUT]; /**< publication, address, ...; "": nothing */
} trace_span;

extern atomic_bool trace_recording;

/** "wait"; never NULL. */
const char *trace_name_text(trace_name name);

/** Whether spans are wanted: one load and one branch. */
static inline bool trace_on(void)
{
    return atomic_load_explicit(&trace_recording, memory_order_relaxed);
}

/** A number for a pull, from 1. Thread: any. */
uint32_t trace_next_pull(void);
/** A span from @p began until now, of no rank, pull, step or bytes: those are the caller's to fill
    in. @p about may be NULL. */
trace_span trace_span_of(trace_name name, uint64_t began, fanin_status outcome,
                         const char *about);
/** In the place of a rank that has not said which it is: @p address has a row, too. The span's
    about is @p address. */
int32_t trace_unknown_rank(const char *address);
/** Keeps a copy of @p span as the calling thread's, or counts it if there is no room. Never
    allocates or writes; a lock is held for the copy. Thread: any. */
void trace_add(const trace_span *span);
/** To be called when a call has ended: what there is of one that failed is written now and not
    within a second. Waits for nothing. */
void trace_settle(fanin_status outcome);
/** To be called when a client or server ends: has written what there is, or has waited a second for
    it. */
void trace_flush(void);
/** Starts the trace of FANIN_TRACE, once a process, if there is none; failing is logged. Waits five
    seconds at most. */
void trace_of_environment(const logger *log);

#endif
