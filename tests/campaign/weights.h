/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file
 * What a campaign's trainer publishes, and how it is known again: every 8 bytes say of which
 * launch, step, tensor and place they are, so that a reader needs nothing but its own result to
 * judge. In a campaign of deltas a step changes one word in 128 of them.
 */
#ifndef CAMPAIGN_WEIGHTS_H
#define CAMPAIGN_WEIGHTS_H

#include <fanin/types.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define N_TENSORS 12
#define RUN "lora:0"

/** Whether the campaign is one of deltas: CAMPAIGN_DELTAS in the environment says so. */
bool weights_change_little(void);

typedef struct tensor_shape {
    char name[96];
    uint64_t rows, columns; /* of F32; columns are even */
} tensor_shape;

tensor_shape weights_shape(size_t tensor);
uint64_t weights_bytes(size_t tensor);

/** The first half of a world id, which the campaign draws for each launch: greater than those
    before. */
uint64_t weights_life(const uint8_t world_id[FANIN_WORLD_ID_SIZE]);

/** Rows [first, end) of @p tensor as they are at @p step. @p words: packed. */
void weights_fill(uint64_t life, uint64_t step, size_t tensor, uint64_t first,
                  uint64_t end, uint64_t *words);

/** Whether the whole tensor is that of @p step; else says in @p why where and what it is instead.
    */
bool weights_check(uint64_t life, uint64_t step, size_t tensor, const void *bytes,
                   char why[160]);

/** What no step writes: in memory that the trainer has taken back, and before a pull. */
void weights_scribble(void *bytes, size_t size);
/** Whether nobody has written since. */
bool weights_scribbled(const void *bytes, size_t size);

#endif
