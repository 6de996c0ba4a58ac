/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file
 * A destination that is described once. It knows nothing of clients, catalogs and plans: those are
 * kept by what they were made from, of which it gives the digest. What it has derived itself is
 * checked whenever it is used, so that nobody has to tell it anything.
 */
#ifndef PREPARED_H
#define PREPARED_H

#include "pull/described.h"
#include <fanin/client.h>

/**
 * The tensors, and where they are now: found again, by @p f, if an allocation has changed. Valid
 * until prepared_give(); several calls may have them at once. Thread: any. Errors of places_find().
 */
fanin_status prepared_take(fanin_destination *d, gpu_finder *f, const described **all,
                           const places **where, fanin_error *error);
/** @p where may be NULL. */
void prepared_give(fanin_destination *d, const places *where);

#endif
