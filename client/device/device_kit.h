/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file
 * What a client keeps on CUDA devices between pulls to read by cuda_ipc, because making it takes
 * longer than a small pull: a stream a device, and for host destinations a few chunks of device
 * memory, with pinned host memory behind them where the copy engine cannot write the destination
 * itself. Bounded: GATHER_LANES chunks of GATHER_CHUNK_MAX on either side. One thread.
 */
#ifndef DEVICE_KIT_H
#define DEVICE_KIT_H

#include "gpu.h"

#define GATHER_LANES 3
/** The copy engine needs 0.6 ms for so many bytes: starting it costs nothing beside. */
#define GATHER_CHUNK_MAX ((uint64_t)32 << 20)

#define LANDING_BYTES 8

typedef struct device_kit device_kit;

/** One chunk's way: gathered into device memory, copied to the host, on a stream of its own so
    that one chunk is gathered while another one is copied. */
typedef struct gather_lane {
    gpu_stream *stream;
    uint8_t *device; /**< chunk bytes */
    uint8_t *host;   /**< chunk bytes, pinned; NULL unless asked for */
} gather_lane;

/** NULL: out of memory. */
device_kit *device_kit_create(gpu *g);
/** Waits for what runs on its streams; NULL is fine. */
void device_kit_destroy(device_kit **kit);

/** The kit's stream on @p device; stays the kit's. */
fanin_status device_kit_stream(device_kit *kit, int device, gpu_stream **out,
                               fanin_error *error);
/** Lanes on @p device for chunks of @p chunk bytes; nothing may be under way on those that were
    given out before. @p pinned: with host memory. The kit's. */
fanin_status device_kit_lanes(device_kit *kit, int device, uint64_t chunk, bool pinned,
                              gather_lane lanes[GATHER_LANES], fanin_error *error);
/** LANDING_BYTES of pinned host memory that outlive any copy into them: one into pageable memory
    would block without a deadline. */
fanin_status device_kit_landing(device_kit *kit, void **out, fanin_error *error);

#endif
