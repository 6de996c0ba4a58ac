/* SPDX-License-Identifier: Apache-2.0 */
/** @file One look at a run: what every rank says of a publication, asked at once, and what is
    wrong. */
#ifndef LOOK_H
#define LOOK_H

#include "fetch/missing.h"
#include "fetch/output.h"

enum { LOOK_HOLDERS = 16 };

enum { LOOK_RELAYS = 64 };

/** What an engine told that hands on. */
typedef struct look_relay {
    char address[64], place[64];
    fanin_told_relay told; /**< without its pointers */
} look_relay;

typedef struct look_holder {
    char who[64];
    uint64_t age_ms;
} look_holder;

/** What one rank said. */
typedef struct look_rank {
    missing_rank at;            /**< status FANIN_OK: it answered */
    bool there;                 /**< it has the publication */
    fanin_rank_stats stats;     /**< without its pointers */
    fanin_publication_stats is; /**< likewise */
    char reason[256];           /**< of a pause */
    look_holder holders[LOOK_HOLDERS];
    size_t n_holders;
    look_relay *relays; /**< those that have the least first; NULL: none are told */
    size_t n_relays;
} look_rank;

typedef struct look {
    look_rank *ranks;
    uint32_t count, asked; /**< told of, and of the target */
    uint64_t newest;       /**< the furthest rank's step */
} look;

/** Asks all ranks; who says nothing in @p timeout_ms is told as such. Errors are those that make
    the ranks none of one run (WORLD), or of this process; not that nobody answers. look_free() in
    either case. */
fanin_status look_take(const session *s, uint32_t timeout_ms, look *out,
                       fanin_error *error);
void look_free(look *l);
/** Whether the rank answered. */
bool look_answered(const look_rank *r);

/** What is wrong with a rank, or with all. */
typedef struct problem {
    int weight;          /**< the worst have the least */
    int32_t rank;        /**< -1: not one rank's */
    const char *kind;    /**< one word for programs; static */
    fanin_status status; /**< its class of failure; FANIN_OK: only to be told */
    char text[400];
    const char *remedy; /**< what to look at or to do; static */
} problem;

typedef struct problems {
    problem *list;
    size_t count, capacity;
} problems;

/** Finds them, the worst first. @p before: a look that was taken @p ns earlier; NULL: none.
    @p max_age_ms: commits may be as old, whatever the ranks are at; 0: all must publish one step
    now. */
void problems_find(const look *l, const look *before, uint64_t ns, uint64_t max_age_ms,
                   problems *out);
/** Whether only another look tells if a rank is slow. */
bool problems_need_another(const look *l);
void problems_free(problems *p);
/** The worst that is a failure; FANIN_OK: none. */
fanin_status problems_verdict(const problems *p);

/** All of it as an object. */
json_t *look_json(const session *s, const look *l, const problems *p);

/** A look in a sentence. With engines that hand on it says how many do, and how many models have
    left the ranks for all readers together since the last commit, one a site: "full:0: step 7, 8 of
    8 ranks answer, 64 relays in 2 sites, 2.02 models left, nothing is wrong". To be freed. */
char *look_summary(const session *s, const look *l, const problems *p);

/** Bound of waits, in ns, that @p percent of the updates did not pass; 0: there were none. */
uint64_t look_drain_ns(const fanin_rank_stats *s, unsigned percent);

#endif
