/* SPDX-License-Identifier: Apache-2.0 */
/** @file What a sink is made of, for its own files. */
#ifndef DEVICE_SINK_INTERNAL_H
#define DEVICE_SINK_INTERNAL_H

#include "copy_list.h"
#include "device/device_sink.h"
#include <pthread.h>

/** Where the driver's threads tell what they saw. Outlives the sink, since the caller's stream may
    reach its point long after. */
typedef struct sink_signal {
    pthread_mutex_t lock;
    int fd; /* eventfd, -1: the sink is gone */
    unsigned references;
    bool reached, failed; /* the caller's stream */
} sink_signal;

typedef struct sink_device {
    int device;
    gpu_stream *stream;
} sink_device;

typedef struct job_list {
    sink_job *first, **end;
} job_list;

struct device_sink {
    gpu *g;
    const memory_range *ranges;
    size_t n_ranges;
    sink_device *devices;
    size_t n_devices, device_capacity;
    sink_signal *signal;
    loop_source source;
    loop *loop; /* NULL: not attached */
    device_memory *pool;
    bool ready, failed, stuck;
    fanin_error error;
    job_list held, active; /* before the caller's stream got there, and after */
    sink_job *spare;
    sink_waiter *waiters;
    copy_list blocks, cut; /* scratch */
};

struct sink_item {
    const uint8_t *from;
    uint8_t *to;
    const strided *view;
    uint64_t length;
    size_t device; /* of sink->devices */
};

/** Copy entries of the items on device @p index, cut so that the whole device is busy, in
    sink->cut; there may be none. False: out of memory. */
bool sink_job_entries(const sink_job *job, size_t index);
/** Frees what a job without a chunk has. */
void sink_job_release(sink_job *job);

#endif
