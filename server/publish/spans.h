/* SPDX-License-Identifier: Apache-2.0 */
/** @file What updates tell the trace (trace.h); nothing where there is none. */
#ifndef SERVER_SPANS_H
#define SERVER_SPANS_H

#include "core/server_state.h"
#include "trace.h"

/** A call of the publication @p about, from @p began until now. @p step: 0, not told. */
void span_of_update(const fanin_server *s, trace_name name, uint64_t began,
                    const char *about, uint64_t step, fanin_status outcome);

#endif
