/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file
 * How far a pull is, on stderr: a bar on a terminal (bytes, and rate and time left or the rank that
 * is waited for), a line every two seconds elsewhere; and what a pull waits for.
 */
#ifndef PROGRESS_H
#define PROGRESS_H

#include "fetch/session.h"

#include <fanin/client.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct progress {
    const char *what;
    bool off, bar, color;
    bool shown;
    uint64_t started_ns, printed_ns;
    uint64_t last_done;
} progress;

/** @p quiet: nothing is ever printed. Looks at stderr, TERM and NO_COLOR. */
void progress_start(progress *p, const char *what, bool quiet, bool no_color);

/** @p waits_for: the rank that holds it up, NULL: none. */
void progress_update(progress *p, uint64_t done, uint64_t total,
                     const fanin_rank_progress *waits_for);

/** Takes the bar off the terminal. */
void progress_end(progress *p);

/** How much there is to tell; the later, the more. */
typedef enum progress_parts {
    PROGRESS_SHARE,
    PROGRESS_AMOUNT,
    PROGRESS_RATE,
    PROGRESS_LEFT,
} progress_parts;

typedef struct progress_state {
    uint64_t done, total, spent_ns;
    const fanin_rank_progress *waits_for; /**< NULL: nobody */
} progress_state;

enum { PROGRESS_TEXT = 1024 };

/** A line for a terminal of @p columns, none of which it exceeds: what is pulled, a bar and
    numbers, or as much of them as there is room for. */
void progress_line(const char *what, const progress_state *at, int columns, bool color,
                   char *out, size_t size);

typedef struct waiting waiting;

/** From two seconds on, every two seconds: what the ranks do that have not committed @p step
    (0: any). NULL if no thread can be had: then nothing is told. */
waiting *waiting_start(const session *s, uint64_t step);
/** The waiting is over: the pull reads. Does not block; NULL is fine. */
void waiting_hush(waiting *w);
/** Ends the thread; NULL is fine. */
void waiting_end(waiting **w);

#endif
