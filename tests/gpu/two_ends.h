/* SPDX-License-Identifier: Apache-2.0 */
/** @file Programs of two processes, one of which publishes what the other pulls. They print TAP. */
#ifndef TWO_ENDS_H
#define TWO_ENDS_H

#include "trainer/device_shards.h"
#include <fanin/fanin.h>
#include <sys/types.h>

#define SKIPPED 77 /**< exit status: no GPU */

extern gpu *cuda; /**< the driver, from device_open() on */

/** Makes the device's context this thread's for good, and a stream there, unless @p stream is NULL.
    */
fanin_status device_open(int device, gpu_stream **stream, fanin_error *error);
/** The driver's function, for what gpu.h has not; NULL: there is none. */
void *driver_symbol(const char *name);

/** The process that publishes, as the other one has it. */
typedef struct publisher {
    pid_t pid;
    int down, up; /**< pipes to it and from it */
} publisher;

/** Prints a line of TAP. */
void result(bool good, const char *what, const char *detail);
/** To or from memory of @p device, or within the host's; it is there when this returns. */
bool copy(int device, gpu_stream *stream, void *to, const void *from, size_t bytes,
          fanin_error *error);

/** Forks @p serve(), which writes the @p size bytes that come to @p greeting, and whose result is
    its exit status. 0, or the exit status of this program. */
int publisher_start(publisher *p, int (*serve)(int in, int out), void *greeting,
                    size_t size);
/** It ends as its pipe does. Exit status of this program. */
int publisher_end(publisher *p);
/** In its process: a server with these properties and a GPU with a stream. NULL: *@p status is the
    exit status. */
fanin_server *publisher_server(fanin_log_fn log, gpu_stream **stream, int *status);

#endif
