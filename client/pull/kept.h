/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file
 * The publications whose catalogs, plans and paths a client keeps between calls: those that were
 * used last. A worker may live for thousands of runs.
 */
#ifndef KEPT_H
#define KEPT_H

#include "catalog/tables.h"

/** When a call begins, while no other runs and no session is open: what is kept of @p name, which
    may be nothing yet. One that was used longer ago than many others goes. NULL: out of memory. */
publication *kept_of(fanin_client *client, const char *name);
/** Keeps nothing, at the end: before the paths' ends. */
void kept_free(fanin_client *client);

#endif
