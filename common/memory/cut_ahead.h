/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file
 * The units of a table of copies, cut block by block by threads that are ahead of who uploads them:
 * a large model's
 * are many times what the caller has listed, and cutting takes as long as uploading.
 */
#ifndef CUT_AHEAD_H
#define CUT_AHEAD_H

#include "copy_entry.h"
#include <stdbool.h>

typedef struct cut_ahead cut_ahead;

/** Of @p n entries, the units of entry i being first[i] .. first[i + 1] - 1; both stay the
    caller's, and there until it is closed. Threads only if there is much to cut. NULL: out of
    memory. */
cut_ahead *cut_ahead_open(const copy_entry *entries, const uint32_t *first, uint64_t n);
/** The next block in order, valid until the next call: *count units, maybe none; NULL behind the
    last one. Waits for who cuts it, or does. False: out of memory. */
bool cut_ahead_next(cut_ahead *c, const copy_entry **units, uint32_t *count);
/** Also before the end. *c NULL is fine. */
void cut_ahead_close(cut_ahead **c);

#endif
