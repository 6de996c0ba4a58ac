/* SPDX-License-Identifier: Apache-2.0 */
#include "net/spans.h"

#include "utf8.h"

void span_of_call(const fanin_client *client, trace_name name, uint64_t began,
                  fanin_status outcome, const char *about)
{
    if (!trace_on())
        return;
    trace_span span = {.began_ns = began,
                       .ended_ns = clock_ns(),
                       .name = name,
                       .rank = -1,
                       .place = client->place,
                       .outcome = outcome};
    utf8_copy(span.about, sizeof span.about, about);
    trace_add(&span);
}

static trace_span of_connection(const connection *c, const trace_place *place,
                                trace_name name, uint64_t began)
{
    bool known = connection_known(c);
    trace_span span = {.began_ns = began,
                       .name = name,
                       .rank = known ? (int32_t)connection_peer(c)->rank : -1,
                       .place = *place};
    utf8_copy(span.about, sizeof span.about, connection_text(c));
    return span;
}

void span_of_rank(const fanin_client *client, size_t peer, trace_name name,
                  uint64_t began, uint64_t ended, uint64_t bytes, fanin_status outcome)
{
    if (!trace_on())
        return;
    trace_span span =
        of_connection(client->peers[peer].control, &client->place, name, began);
    span.ended_ns = ended;
    span.bytes = bytes;
    span.outcome = outcome;
    trace_add(&span);
}

void span_of_connection(const connection *c, const trace_place *place, trace_name name,
                        uint64_t began, fanin_status outcome)
{
    if (!trace_on())
        return;
    trace_span span = of_connection(c, place, name, began);
    span.ended_ns = clock_ns();
    span.outcome = outcome;
    trace_add(&span);
}
