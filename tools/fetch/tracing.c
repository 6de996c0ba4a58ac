/* SPDX-License-Identifier: Apache-2.0 */
#include "fetch/tracing.h"
#include "fetch/failure.h"

#include <fanin/trace.h>
#include <stddef.h>

int tracing_start(const char *file)
{
    fanin_error error = FANIN_ERROR_INIT;
    if (file == NULL || fanin_trace_start(file, &error) == FANIN_OK) {
        return 0;
    }
    return failure_report("cannot trace", &error);
}

int tracing_stop(const char *file, int code)
{
    fanin_error error = FANIN_ERROR_INIT;
    if (file == NULL || fanin_trace_stop(&error) == FANIN_OK || code != 0) {
        return code;
    }
    return failure_report("the trace is not whole", &error);
}
