/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file
 * How far a pull is, on stderr: a bar on a terminal (bytes, rate, time left), a line every
 * two seconds elsewhere.
 */
#ifndef PROGRESS_H
#define PROGRESS_H

#include <stdbool.h>
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

/** A fanin_progress_fn; @p cookie is the progress. */
void progress_update(void *cookie, uint64_t done, uint64_t total);

/** Takes the bar off the terminal. */
void progress_end(progress *p);

/** CLOCK_MONOTONIC. */
uint64_t progress_now_ns(void);

#endif
