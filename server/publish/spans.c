/* SPDX-License-Identifier: Apache-2.0 */
#include "publish/spans.h"

#include "clock.h"
#include "utf8.h"

void span_of_update(const fanin_server *s, trace_name name, uint64_t began,
                    const char *about, uint64_t step, fanin_status outcome)
{
    if (!trace_on())
        return;
    trace_span span = {.began_ns = began,
                       .ended_ns = clock_ns(),
                       .step = step,
                       .name = name,
                       .rank = (int32_t)s->rank,
                       .outcome = outcome};
    utf8_copy(span.about, sizeof span.about, about);
    trace_add(&span);
    trace_settle(false);
}
