/* SPDX-License-Identifier: Apache-2.0 */
/** @file Ranks that did not answer: rows, JSON and an exit status of their own; ranks' states. */
#ifndef MISSING_H
#define MISSING_H

#include "fetch/session.h"

#include <fanin/client.h>
#include <jansson.h>

enum {
    MISSING_ADDRESS = 272
}; /**< a host's name of 253 bytes, a port and what is around them */

typedef struct missing_text {
    char s[MISSING_ADDRESS + 16];
} missing_text;

typedef struct missing_rank {
    int32_t rank; /**< -1: not known */
    bool silent;  /**< refused nothing, said nothing */
    fanin_status status;
    char address[MISSING_ADDRESS], message[512];
} missing_rank;

typedef struct missing {
    missing_rank *ranks;
    uint32_t count, asked; /**< asked: all ranks of the target */
} missing;

/** The ranks that are not connected now. Memory failures end the program with a message. */
void missing_gather(const session *s, missing *out);
void missing_free(missing *m);

/** The number of the rank at the target's address number @p index; -1: not known. */
int32_t missing_number(const session *s, const fanin_rank_info *info, uint32_t index);
/** Why it is not there. */
const char *missing_why(const fanin_rank_info *info);
/** "rank 2", or "rank at 127.0.0.1:6002" if it is not known which one is there. */
missing_text missing_name(const missing_rank *r);
/** "rank 2 unreachable: why", a line a rank, on stdout. */
void missing_print(const missing *m);
/** Warns on stderr about the ranks that are not connected now. */
void missing_warn(const session *s);
/** An array: rank, address, status, message. */
json_t *missing_json(const missing *m);
/** A message on stderr and its exit status; 0: none is missing. */
int missing_report(const missing *m);

/** "stable"; static. */
const char *rank_state_name(int32_t state);

/** Ranks in the same state at the same step are told together. What does not fit in @p size is
    "...", never a part of a number. */
void rank_states_text(const fanin_rank_state *ranks, size_t count, char *out,
                      size_t size);

/** An array: rank, state, step, state_age_ns. */
json_t *rank_states_json(const fanin_rank_state *ranks, size_t count);

#endif
