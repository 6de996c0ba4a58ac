/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file
 * Two ranks in this process and their trainer, which acts when it is told to. Of the publication
 * FULL each holds one half of "bytes" and of "matrix", which are others at each step; of LORA, an
 * adapter that stays, one half of a pair. All of it lies on the host or on a device. CHANGES is
 * published with FULL, as copies on the host with patches: one half of "slow", of which a few bytes
 * are others. Whatever fails ends the process.
 */
#ifndef TWO_RANKS_H
#define TWO_RANKS_H

#include <fanin/fanin.h>

#define RANKS 2
#define MOST_MS 20000 /**< for what takes milliseconds, on a machine that others use */
#define FULL "full:0"
#define LORA "lora:0"
#define CHANGES "full:1"
#define BYTES 700
#define SLOW 2000
#define ROWS 8
#define COLUMNS 16

typedef struct two_ranks two_ranks;

/** Starts them, for the rest of the process, and publishes the first step. @p secret_file NULL:
    without one.
    Thread: that of all functions but ranks_act(). */
two_ranks *ranks_start(const char *secret_file, bool on_device);
/** Where they listen, RANKS of them. */
const char *const *ranks_addresses(const two_ranks *t);
uint16_t ranks_port(const two_ranks *t, uint32_t rank);

/** Bits 0, 1: which of these two_ranks, none: both; 2 to 4: the next step is published, an update
    is begun, one that has begun is published, a pause and its end, an update is broken off, a step
    is taken back, a shard is removed, put again and published. Blocks for as long as readers may
    delay it. Thread: any, one at a time. */
void ranks_act(void *ranks, uint16_t number);
/** Both hold the same step, which it returns. */
uint64_t ranks_settle(two_ranks *t);

uint8_t ranks_byte(uint64_t step, unsigned at);
uint8_t ranks_slow_byte(uint64_t step, unsigned at);
float ranks_element(uint64_t step, unsigned row, unsigned column);

/** Until nothing of other readers is left with the ranks than at the first call. */
void ranks_check_left(two_ranks *t);

#endif
