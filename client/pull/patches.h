/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file
 * A pull that reads patches instead of the whole (delta/delta.h), and what it may build upon. The
 * destination is written when all ranks have ended well, and not before: an attempt that fails
 * leaves the step that it holds.
 */
#ifndef PULL_PATCHES_H
#define PULL_PATCHES_H

#include "pull/states.h"

/** Whether it asks for patches. */
static inline bool pull_wants_patches(const pull *p)
{
    return p->options->deltas && p->destination->base && !p->session;
}

/** PULL_CHOOSE. Errors as of delta_choose(). */
fanin_status pull_choose(pull *p, fanin_error *error);
/** PULL_RECALL. Errors as of the destination's recall. */
fanin_status pull_recall(pull *p, fanin_error *error);
/** Leases are there: of the announced copies, or the whole is read. */
void pull_patches_begun(pull *p);
/** PULL_PATCHES. Errors as of pull_read(), and FANIN_ERR_PROTOCOL, which names the rank. */
fanin_status pull_patches(pull *p, fanin_error *error);
/** PULL_APPLY. FANIN_ERR_MEMORY: what is host memory may have been written; and errors as of
    delta_apply_devices(). */
fanin_status pull_apply(pull *p, fanin_error *error);
/** PULL_COMPARE. FANIN_OK: what the destination holds is what the ranks had digested, or the whole
    is read in another attempt. FANIN_ERR_MEMORY. */
fanin_status pull_compare(pull *p, fanin_error *error);
/** What an attempt has read of patches and digests. */
void pull_patches_forget(pull *p);

/* What a pull does to the destination's base (base.c). */

/** What the destination will hold (base_name()); the plan's, which keeps it. */
const digest *pull_base_name(const pull *p);

/** It writes the destination, which has a base, from now on. */
void pull_writes(pull *p);
/** It writes it no more. */
void pull_base_leave(pull *p);
/** The destination holds what the pull has brought. */
void pull_base_keep(pull *p);
/** A directory is to hold it: tells its identity what patches may be applied to later. */
void pull_base_tell(pull *p);

#endif
