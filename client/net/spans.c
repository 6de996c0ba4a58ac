/* SPDX-License-Identifier: Apache-2.0 */
#include "net/spans.h"

void span_of_call(const fanin_client *client, trace_name name, uint64_t began,
                  fanin_status outcome, const char *about)
{
    if (!trace_on())
        return;
    trace_span span = trace_span_of(name, began, outcome, about);
    span.place = client->place;
    trace_add(&span);
}

static trace_span of_connection(const connection *c, const trace_place *place,
                                trace_name name, uint64_t began, fanin_status outcome)
{
    trace_span span = trace_span_of(name, began, outcome, c->text);
    span.rank = c->known ? (int32_t)c->peer.rank : trace_unknown_rank(c->text);
    span.place = *place;
    return span;
}

void span_of_rank(const fanin_client *client, size_t peer, trace_name name,
                  uint64_t began, uint64_t ended, uint64_t bytes, fanin_status outcome)
{
    if (!trace_on())
        return;
    trace_span span = of_connection(client->peers[peer].control, &client->place, name,
                                    began, outcome);
    span.ended_ns = ended;
    span.bytes = bytes;
    trace_add(&span);
}

void span_of_connection(const connection *c, const trace_place *place, trace_name name,
                        uint64_t began, fanin_status outcome)
{
    if (!trace_on())
        return;
    trace_span span = of_connection(c, place, name, began, outcome);
    trace_add(&span);
}
