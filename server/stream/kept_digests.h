/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file
 * Digests that were made, for whoever asks for the same bytes under the same epoch. The epochs of
 * all publications come from one counter that never goes back, and bytes do not change while their
 * epoch stands: what is found is true, and only its epoch is to be looked at before it is told.
 * A table of fixed size, in which newer epochs take the places of older ones.
 */
#ifndef KEPT_DIGESTS_H
#define KEPT_DIGESTS_H

#include "stream/read_job.h"

typedef struct kept_digests kept_digests;

/* Any thread, the server's lock not held. */

kept_digests *kept_digests_create(void); /**< NULL: no memory */
void kept_digests_free(kept_digests *k); /**< NULL is fine */
/** The digests of all ranges of the job, converted by @p convert; false: not all are known. */
bool kept_digests_find(kept_digests *k, const job *j, uint32_t convert, digest *out);
/** All bytes of the job were read while its epoch stood. */
void kept_digests_add(fanin_server *s, kept_digests *k, const job *j, uint32_t convert,
                      const digest *digests);

#endif
