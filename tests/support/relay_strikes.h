/* SPDX-License-Identifier: Apache-2.0 */
/** @file What happens in the midst of a reader's pull of relay_readers.h. */
#ifndef RELAY_STRIKES_H
#define RELAY_STRIKES_H

#include "relay_readers.h"

/** In the pull that is to follow, when so many batches have been read. 0: they are only counted. */
void strike_after(int batches, void (*strike)(void));
/** Batches until then; below 0: so many came since. */
int strike_left(void);

/** The read of that number, from now on, finds its time over, and nobody to blame. */
void end_time_at_read(int reads);

/** A pull of step 1 which the trainer leaves by @p strike after two batches. Of the one holder
    nothing is heard until the calling thread has seen for a while that the trainer brings no more,
    and then nothing comes of it for as long. */
void expect_pull_without_trainer(reader *r, void (*strike)(void));

/** Relays say that they have this, whatever they have; NULL: the truth. Not within a pull. */
void falsify_landed(const landed_range *range);

/** Answers about the list have the version 1, whatever the rank has said. */
void turn_versions_back(bool all);

/** No thread of this name is to be had; NULL: all are. */
void refuse_threads(const char *name);

void commit_2(void);
void stop_ranks(void);

/** A reader in a process of its own, which has the step and hands it on. */
void start_holder(void);
void stop_holder(void);
void stop_holder_for_a_second(void);
void kill_holder(void);

#endif
