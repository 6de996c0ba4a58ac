/* SPDX-License-Identifier: Apache-2.0 */
/* What a span is, and whether anybody wants one. */
#include "clock.h"
#include "trace.h"
#include "utf8.h"

atomic_bool trace_recording;

static const char *const names[TRACE_NAMES] = {
    [TRACE_PULL] = "pull",       [TRACE_OPEN] = "open",
    [TRACE_ATTEMPT] = "attempt", [TRACE_RESOLVE] = "resolve",
    [TRACE_CONNECT] = "connect", [TRACE_WAIT] = "wait",
    [TRACE_CATALOG] = "catalog", [TRACE_PLAN] = "plan",
    [TRACE_PATHS] = "paths",     [TRACE_MAP] = "map",
    [TRACE_BEGIN] = "begin",     [TRACE_READ] = "read",
    [TRACE_READER] = "reader",   [TRACE_DIGEST] = "digest",
    [TRACE_END] = "end",         [TRACE_WRITE] = "write",
    [TRACE_PUBLISH] = "publish", [TRACE_BEGIN_UPDATE] = "begin_update",
    [TRACE_COMMIT] = "commit",
};

const char *trace_name_text(trace_name name)
{
    return names[name];
}

trace_span trace_span_of(trace_name name, uint64_t began, fanin_status outcome,
                         const char *about)
{
    trace_span span = {.began_ns = began,
                       .ended_ns = clock_ns(),
                       .name = name,
                       .rank = -1,
                       .outcome = outcome};
    if (about)
        utf8_copy(span.about, sizeof span.about, about);
    return span;
}

/* Two that share one share a row. */
int32_t trace_unknown_rank(const char *address)
{
    uint32_t hash = 2166136261;
    for (; *address; address++)
        hash = (hash ^ (unsigned char)*address) * 16777619;
    return -2 - (int32_t)(hash & 0xffffff);
}
