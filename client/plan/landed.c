/* SPDX-License-Identifier: Apache-2.0 */
#include "plan/landed.h"

#include "convert.h"
#include <stddef.h>

void landed_view(landed_fn landed, void *cookie, const strided *view, uint64_t to)
{
    uint64_t runs = strided_runs(view), pending = 0, start = 0;
    uint64_t run = convert_bytes(view->convert, view->run);
    for (uint64_t i = 0; i < runs; i++) {
        int64_t offset;
        strided_run(view, i, NULL, &offset);
        uint64_t at = to + (uint64_t)offset;
        if (pending > 0 && at == start + pending) {
            pending += run;
            continue;
        }
        if (pending > 0)
            landed(cookie, start, pending);
        start = at;
        pending = run;
    }
    if (pending > 0)
        landed(cookie, start, pending);
}
