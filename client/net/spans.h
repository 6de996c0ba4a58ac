/* SPDX-License-Identifier: Apache-2.0 */
/** @file What a client's calls tell the trace (trace.h); nothing where there is none. */
#ifndef SPANS_H
#define SPANS_H

#include "net/client_state.h"
#include "trace.h"

/** A part of a call, from @p began until now. @p about may be NULL. */
void span_of_call(const fanin_client *client, trace_name name, uint64_t began,
                  fanin_status outcome, const char *about);
/** One rank's part of it, until @p ended. */
void span_of_rank(const fanin_client *client, size_t peer, trace_name name,
                  uint64_t began, uint64_t ended, uint64_t bytes, fanin_status outcome);
/** The same of a connection, whose client's place @p place is, until now. */
void span_of_connection(const connection *c, const trace_place *place, trace_name name,
                        uint64_t began, fanin_status outcome);

#endif
