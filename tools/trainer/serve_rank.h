/* SPDX-License-Identifier: Apache-2.0 */
/** @file A rank process, and the memory that a world of them and their parent share. */
#ifndef SERVE_RANK_H
#define SERVE_RANK_H

#include "trainer/ranks.h"

typedef struct rank_board {
    _Atomic uint32_t
        wake; /**< futex; grows with every event that somebody may wait for */
    _Atomic uint32_t stop; /**< all ranks are to end */
    uint32_t world_size;
    rank_slot slots[];
} rank_board;

/** Everybody who waits looks again. Safe in a signal handler. */
void rank_board_wake(rank_board *board);

/** Tells all ranks to end. Safe in a signal handler. */
void rank_board_stop(rank_board *board);

/** A rank's life; returns its process's exit status. @p ready_fd: an eventfd that is told
    when the rank is ready. @p extents: one a tensor to be filled, or NULL. */
int serve_rank(const rank_options *options, rank_board *board, uint32_t rank,
               int ready_fd, rank_extent *extents);

#endif
