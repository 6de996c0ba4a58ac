/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file
 * Reading by one-sided gets: spans are fetched into registered staging slots, or straight
 * into registered destinations, and scattered from there. The server takes no part.
 */
#ifndef ONE_SIDED_H
#define ONE_SIDED_H

#include "catalog/tables.h"
#include "device/device_sink.h"
#include "array.h"
#include "plan/plan.h"

#define SPAN_MAX ((uint64_t)512 << 10) /**< bytes of one get, and of one staging slot */

#define STAGING_SLOTS 8
#define STAGING_BYTES (STAGING_SLOTS * SPAN_MAX) /**< of fanin_client.staging */

/** One rank's reading in one attempt. */
typedef struct one_sided_work {
    peer *peer;
    uint32_t rank;
    const shard_table *shards;
    const plan_spans *spans;
    /** added to the spans' regions: which of shards' regions and rkeys hold the bytes */
    uint32_t first_region;
    uint64_t next_span, done_spans, bytes; /**< bytes: fetched */
    bool failed; /**< if device_sink_failed() too, no other attempt would mend it */
    fanin_error error;
} one_sided_work;

typedef struct one_sided one_sided;

/**
 * @p works is the caller's array of @p n and must outlive the reader. @p ranges (sorted, may
 * be none) are registered if that works; else everything goes through staging. @p devices takes
 * what lands in CUDA memory, outlives the reader, NULL: nothing does.
 */
fanin_status one_sided_create(fanin_client *client, one_sided_work *works, size_t n,
                              uint8_t *base, const memory_range *ranges,
                              size_t n_ranges, landed_fn landed, void *landed_cookie,
                              device_sink *devices, one_sided **out,
                              fanin_error *error);
/** Posts gets and takes completions; true: something happened. Never blocks. */
bool one_sided_step(one_sided *o);
/** The loop's source that wakes the caller; armed when one_sided_step() returned false. */
bool one_sided_arm(one_sided *o);
uint64_t one_sided_scatter_ns(const one_sided *o);
/**
 * Ends the reading; gets that are still out are drained by closing their endpoints. False:
 * not drained; the destination must not be released (it is then leaked by the caller).
 */
bool one_sided_destroy(one_sided **o);

#endif
