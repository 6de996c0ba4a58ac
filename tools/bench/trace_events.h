/* SPDX-License-Identifier: Apache-2.0 */
/** @file Traces of one or several processes, read and laid on one clock. */
#ifndef TRACE_EVENTS_H
#define TRACE_EVENTS_H

#include <jansson.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

/** Of a span of a rank that has not said which it is. */
#define TRACE_RANK_UNKNOWN (-2)

/** A span; texts belong to the files that were read. */
typedef struct trace_event {
    const char *name;
    const char *outcome; /**< "FANIN_OK", or why it ended otherwise; "": not told */
    const char *about;   /**< "": nothing */
    double began_us, took_us;
    json_int_t pull; /**< 0: of none */
    json_int_t bytes;
    int rank;     /**< -1: of none; TRACE_RANK_UNKNOWN */
    bool trainer; /**< a call of a trainer's */
    size_t file,
        n; /**< which file; the number of the pull over all files, 0: of none */
} trace_event;

/** Zero before it is read. */
typedef struct trace_events {
    json_t **files;
    double *later_us; /**< of each file: what its clock is behind the first one's */
    size_t n_files;
    trace_event *all;
    size_t count, capacity, pulls;
    json_int_t lost; /**< spans that found no room */
} trace_events;

/** Reads @p count files; 0, or an exit status after a message. */
int trace_events_read(const char *const *paths, size_t count, trace_events *out);
void trace_events_free(trace_events *events);
/** The span "pull" or "open" of that number; 0: the one that took longest; NULL: there is none. */
const trace_event *trace_events_pull(const trace_events *events, size_t n);
/** Writes all as one trace, whose processes have numbers of their own. */
void trace_events_merge(const trace_events *events, FILE *out);

/** A picture of the pull @p whole, or of all if it is NULL, and of what trainers did meanwhile. */
void trace_picture(const trace_events *events, const trace_event *whole, FILE *out);

#endif
