/* SPDX-License-Identifier: Apache-2.0 */
/** @file What is told of a pull: its result, and the log. */
#ifndef RESULT_H
#define RESULT_H

#include "pull/states.h"

fanin_result *result_create(size_t n_peers); /**< NULL: out of memory */
/** Makes of @p r, or of nothing (NULL), the result of a pull of which others brought a part: @p
    whole has what is of all, @p how says who they were. Takes @p r. NULL: no memory. */
fanin_result *result_of_several(fanin_result *r, const fanin_result_info *whole,
                                const char *how);
/** What guarded the bytes that served[] counts. */
fanin_checksums result_guard(const fanin_result *r, const fanin_client *client,
                             const publication *p);
/** Fills ranks_json, path and its reason, bytes and reads from served[]. */
fanin_status result_finish(fanin_result *r, const fanin_client *client,
                           const publication *p, fanin_error *error);

/** A part of an attempt that took @p ns (debug, event "phase"). */
void pull_log_part(const pull *p, trace_name name, fanin_status status, uint64_t ns);
/** One line of the whole (information, event "pull"), at most ten a second; of those left out the
    number.
    @p error may be NULL. */
void pull_log_whole(pull *p, fanin_status status, const fanin_error *error);

#endif
