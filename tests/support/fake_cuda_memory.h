/* SPDX-License-Identifier: Apache-2.0 */
/** @file Memory of the stand-in for the CUDA driver. All is called with the lock held. */
#ifndef FAKE_CUDA_MEMORY_H
#define FAKE_CUDA_MEMORY_H

#include "fake_cuda_internal.h"

#define FAKE_PAGE 4096

/** The page before an allocation's bytes in the file; zeros once it is freed. */
typedef struct fake_header {
    uint64_t nonce, length;
    _Atomic uint32_t mappings; /**< by other processes' contexts */
} fake_header;

static inline fake_header *fake_header_of(const fake_range *range)
{
    return (fake_header *)(void *)(range->alias - FAKE_PAGE);
}

int fake_memory_file(void);
/** The range that starts exactly there, NULL: none. */
fake_range *fake_range_starting(uint64_t address);
/** The mapping that the context has of that allocation of another process, NULL: none. */
fake_range *fake_range_find_mapping(const struct CUctx_st *context, uint64_t nonce);
/** Whether a mapping of the context has some of those addresses of another process. */
bool fake_range_overlaps_mapping(const struct CUctx_st *context, pid_t owner,
                                 uint64_t start, uint64_t length);
/** Knows a range like @p like from now on; gives it addresses unless it is host memory. */
fake_range *fake_range_add(fake_range like);
/** Forgets and frees it; aborts if an operation uses it. */
void fake_range_remove(fake_range *range);

#endif
