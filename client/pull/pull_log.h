/* SPDX-License-Identifier: Apache-2.0 */
/** @file What the log is told of a pull. */
#ifndef PULL_LOG_H
#define PULL_LOG_H

#include "pull/states.h"

/** A part of an attempt that took @p ns (debug, event "phase"). */
void pull_log_part(const pull *p, trace_name name, fanin_status status, uint64_t ns);
/** One line of the whole (information, event "pull"), at most ten a second; of those left out the
    number.
    @p error may be NULL. */
void pull_log_whole(pull *p, fanin_status status, const fanin_error *error);

#endif
