/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file
 * Sets of a key table's keys, as ranges: what a reader wants the boxes of, and what it has of a
 * rank's. Keys stand for their numbers, which is their order in the table.
 */
#ifndef KEY_SET_H
#define KEY_SET_H

#include "array.h"
#include "messages.h"

/** Keys first .. first + count - 1; count > 0. */
typedef struct key_range {
    uint32_t first, count;
} key_range;

/** Ascending ranges with gaps between them. All zero: empty. */
typedef struct key_set {
    key_range *ranges;
    size_t n, capacity;
} key_set;

void key_set_free(key_set *s); /**< and empties it */
/** Adds keys none of which is below any that is there. False: no memory. */
bool key_set_add(key_set *s, uint32_t first, uint32_t count);
/** Those with marks[key], of @p n_keys. False: no memory, and *out is empty. */
bool key_set_of_marks(const bool *marks, uint32_t n_keys, key_set *out);
uint64_t key_set_count(const key_set *s);
bool key_set_has(const key_set *s, uint32_t key); /**< O(log n) */
bool key_set_equal(const key_set *a, const key_set *b);
/** Whether all of @p part is in @p s. */
bool key_set_holds(const key_set *s, const key_set *part);
/** What is in @p a or in @p b. False: no memory, and *out is empty. */
bool key_set_join(const key_set *a, const key_set *b, key_set *out);
/** What is in @p a and not in @p b. As key_set_join(). */
bool key_set_less(const key_set *a, const key_set *b, key_set *out);
/** Fills the narrowest gaps until at most @p most ranges are left; @p most > 0. */
void key_set_coarsen(key_set *s, size_t most);

/** Appends what a request says: for each range the gap before it and its count. */
void key_set_encode(buffer *out, const key_set *s);
/** Untrusted bytes; *out is to be freed in any case. FANIN_ERR_PROTOCOL and *why: not the canonical
    form, keys that are not among @p n_keys, more than LIMIT_KEY_RANGES; FANIN_ERR_MEMORY. */
fanin_status key_set_decode(bytes_view in, uint32_t n_keys, key_set *out,
                            const char **why);

#endif
