/* SPDX-License-Identifier: Apache-2.0 */
/** @file Telling a destination which bytes are in place. */
#ifndef LANDED_H
#define LANDED_H

#include "block.h"

/** @p to: as in plan pieces, without the base. Called in the pulling thread. */
/** So many bytes at `to` are about to be written; anything but FANIN_OK: they must not be. */
typedef fanin_status (*need_fn)(void *cookie, uint64_t to, uint64_t length,
                                fanin_error *error);
typedef void (*landed_fn)(void *cookie, uint64_t to, uint64_t length);

/** Tells of every byte of a view whose first one is at @p to; neighbouring runs are told as
    one, so that tiny runs cost few calls. */
void landed_view(landed_fn landed, void *cookie, const strided *view, uint64_t to);

#endif
