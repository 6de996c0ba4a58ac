/* SPDX-License-Identifier: Apache-2.0 */
#include "publish/spans.h"

void span_of_update(const fanin_server *s, trace_name name, uint64_t began,
                    const char *about, uint64_t step, fanin_status outcome)
{
    if (!trace_on())
        return;
    trace_span span = trace_span_of(name, began, outcome, about);
    span.rank = (int32_t)s->rank;
    span.step = step;
    trace_add(&span);
}
