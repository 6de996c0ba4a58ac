/* SPDX-License-Identifier: Apache-2.0 */
/** @file What ranks are doing, in words: "rank 2 writing for 64 s; ranks 0-1 stable at step 7". */
#ifndef RANK_STATES_H
#define RANK_STATES_H

#include <fanin/client.h>
#include <jansson.h>

/** "stable"; static. */
const char *rank_state_name(int32_t state);

/** Ranks in the same state at the same step are told together. What does not fit in @p size is
    "...", never a part of a number. */
void rank_states_text(const fanin_rank_state *ranks, size_t count, char *out,
                      size_t size);

/** An array: rank, state, step, state_age_ns. */
json_t *rank_states_json(const fanin_rank_state *ranks, size_t count);

#endif
