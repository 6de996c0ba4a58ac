/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file
 * A page that all processes of a campaign share: what the ranks have committed, who was stopped
 * when, and whether it is over. campaign.py maps the same numbers in the same order.
 */
#ifndef CAMPAIGN_BOARD_H
#define CAMPAIGN_BOARD_H

#include <stdatomic.h>
#include <stdint.h>

#define BOARD_RANKS 16
#define BOARD_READERS 32

typedef struct board_rank {
    _Atomic uint64_t life, step; /**< committed; 0: nothing yet */
    _Atomic uint64_t
        stops; /**< counted by the campaign before each SIGSTOP and limit */
    _Atomic uint64_t updates, acts;
    _Atomic uint64_t
        wrong; /**< calls that failed although nothing was done to the process */
    _Atomic uint64_t
        late; /**< updates that waited for longer than readers may delay them */
    _Atomic uint64_t longest_ns; /**< such a wait, beyond what was allowed */
} board_rank;

typedef struct board_reader {
    _Atomic uint64_t stops;
    _Atomic uint64_t pulls, acts;
} board_reader;

typedef struct board {
    _Atomic uint64_t over;
    _Atomic uint64_t names_silent; /**< names.h */
    _Atomic uint64_t
        calm_ns; /**< after the step of this time the trainer rests; 0: never */
    board_rank ranks[BOARD_RANKS];
    board_reader readers[BOARD_READERS];
} board;

/** Maps the file at @p path, which has a board's size. Ends the process if it cannot, and from then
    on with the process that has started it. */
board *board_open(const char *path);

/** Nanoseconds of CLOCK_MONOTONIC. */
uint64_t board_now(void);
void board_sleep(uint64_t ns);
/** The next number of a sequence (xorshift64*); @p state is not 0. */
uint64_t board_random(uint64_t *state);

#endif
