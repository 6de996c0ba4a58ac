/* SPDX-License-Identifier: Apache-2.0 */
/** @file Shared memory that UCX left behind in processes that were killed. */
#ifndef UCX_LEFTOVERS_H
#define UCX_LEFTOVERS_H

#include "log.h"

/**
 * Removes from @p directory ("/dev/shm") the files that have the name of UCX's segments
 * ("ucx_shm_posix_<hex>"), belong to this process's user alone (mode 0600, one link), and
 * that no process of this machine, of whatever namespace, has open or mapped. UCX takes the name
 * away as soon as it has filled a segment, so only a process that was killed just then leaves one.
 * Thread: any. What cannot be removed is left.
 */
void ucx_leftovers_remove(const char *directory, const logger *log);

#endif
