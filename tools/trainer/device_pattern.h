/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file
 * The pattern of pattern.h, written by a device into shards that lie there. Read by the kernel's
 * compiler too: nothing but C.
 */
#ifndef DEVICE_PATTERN_H
#define DEVICE_PATTERN_H

#include <stdint.h>

#ifdef __CUDACC__
#define DEVICE_PATTERN_CODE static __device__ inline
#else
#define DEVICE_PATTERN_CODE static inline
#endif

/** Some bytes of a shard: what one block of threads writes. Laid out for the device. */
typedef struct pattern_piece {
    uint64_t to;   /**< where the shard begins; 8-byte aligned */
    uint64_t seed; /**< of its key */
    /* the shard is runs of run bytes; run i lies at first + i * step of the tensor */
    uint64_t first, step, run;
    uint64_t begin; /**< of this piece, in the shard; a multiple of 8 */
    uint64_t bytes;
} pattern_piece;

/** Little-endian word @p index of the tensor. */
DEVICE_PATTERN_CODE uint64_t device_pattern_word(uint64_t start, uint64_t index)
{
    uint64_t x = start + index + 0x9E3779B97F4A7C15ull;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
    return x ^ (x >> 31);
}

/** What byte @p at of the shard is. */
DEVICE_PATTERN_CODE uint8_t device_pattern_byte(const pattern_piece *p, uint64_t start,
                                                uint64_t at)
{
    uint64_t place = p->first + at / p->run * p->step + at % p->run;
    return (uint8_t)(device_pattern_word(start, place / 8) >> (8 * (place % 8)));
}

/** Writes the eight bytes (fewer at the end) from @p at on. */
DEVICE_PATTERN_CODE void device_pattern_write(const pattern_piece *p, uint64_t add,
                                              uint64_t at)
{
    uint64_t start = p->seed + add;
    uint8_t *to = (uint8_t *)(uintptr_t)(p->to + at);
    uint64_t left = p->begin + p->bytes - at;
    uint64_t within = at % p->run;
    uint64_t place = p->first + at / p->run * p->step + within;
    if (left >= 8 && place % 8 == 0 && p->run - within >= 8) {
        *(uint64_t *)(void *)to = device_pattern_word(start, place / 8);
        return;
    }
    for (uint64_t i = 0; i < 8 && i < left; i++) {
        to[i] = device_pattern_byte(p, start, at + i);
    }
}

/** What the kernel is started with. A block takes pieces number blockIdx, blockIdx + gridDim,
    ... */
typedef struct pattern_parameters {
    const pattern_piece *pieces;
    uint64_t count;
    uint64_t add; /**< what the step adds to seeds */
} pattern_parameters;

#define DEVICE_PATTERN_KERNEL "fanin_pattern"
/** The kernel as a fat binary; NULL in a build without CUDA's compiler. */
const void *device_pattern_image(void);
enum { DEVICE_PATTERN_THREADS = 256, DEVICE_PATTERN_PIECE = 16384 };

#endif
