/* SPDX-License-Identifier: Apache-2.0 */
/* By the stand-in for the CUDA driver, which ends a process whose kernels touch anything else. */
#include "memory.h"

#include "fake_cuda.h"
#include <inttypes.h>
#include <stdio.h>

/* What touches is read by one copy, which the stand-in takes for one that leaves its allocation; on a
   device it is none. */
#define APART 64
/* For uploads, one a device; it stays for the process's life. */
#define KEPT_STREAMS 2

void *memory_get(size_t size, unsigned device)
{
    return fake_cuda_alloc((int)(device % 2), size + APART, FAKE_CUDA_MALLOC);
}

void memory_free(void *memory, size_t size)
{
    (void)size;
    fake_cuda_free(memory);
}

void *memory_bytes(void *memory)
{
    return fake_cuda_alias(memory);
}

void *memory_guarded(size_t size, unsigned device)
{
    return memory_get(size, device);
}

bool memory_left(size_t own)
{
    fake_cuda_counts c;
    fake_cuda_count(&c);
    if (c.allocations == own && c.mappings == 0 && c.pinned == 0 && c.events == 0 &&
        c.streams <= KEPT_STREAMS)
        return false;
    fprintf(stderr,
            "left on devices: %" PRIu64 " allocations, %" PRIu64 " mappings, %" PRIu64
            " pinned, %" PRIu64 " events, %" PRIu64 " streams\n",
            c.allocations - own, c.mappings, c.pinned, c.events, c.streams);
    return true;
}
