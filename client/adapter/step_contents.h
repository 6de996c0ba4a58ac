/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file
 * What a client's last directories held, by the digests that are made anyway: a trainer that
 * commits steps and writes nothing is found by those who pull them. One thread.
 */
#ifndef STEP_CONTENTS_H
#define STEP_CONTENTS_H

#include "adapter/adapter_identity.h"

#define STEPS_KEPT                                                                     \
    32 /**< publications, or forms of one, that are remembered; the oldest goes */

/** Zeroed: none. */
struct step_contents {
    struct {
        digest what;    /**< of which publication of which world, and in what form */
        digest content; /**< of all its files of tensors */
        uint64_t first, last; /**< steps that had it */
        unsigned steps;       /**< that were seen; 0: there is none here */
    } list[STEPS_KEPT];
    size_t next;
};

/**
 * Remembers that a step has these files; others than tensors' are not looked at. Steps that had the
 * same bytes, one after another: how many, and the first of them in *@p first_out; 1: none before
 * it had.
 */
unsigned step_contents_note(step_contents *c, const adapter_identity *identity,
                            const identity_file *files, size_t count,
                            uint64_t *first_out);

#endif
