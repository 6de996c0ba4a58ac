/* SPDX-License-Identifier: Apache-2.0 */
#include "stream/limit.h"

bucket limit_bucket;

bool limit_is_reached(const fanin_server *s)
{
    return s->max_bytes_per_second > 0 &&
           bucket_ready(&limit_bucket, LIMIT_WINDOW_NS) > clock_ns();
}

void limit_charge(const fanin_server *s, uint64_t bytes)
{
    if (s->max_bytes_per_second > 0)
        bucket_take(&limit_bucket, clock_ns(),
                    bytes * UINT64_C(1000000000) / s->max_bytes_per_second);
}
