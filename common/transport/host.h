/* SPDX-License-Identifier: Apache-2.0 */
/** @file Which kernel and which namespaces this process lives in. */
#ifndef HOST_H
#define HOST_H

#include "log.h"

#define HOST_ID_SIZE 64 /**< with the final NUL */

/**
 * The boot id and the numbers of the pid and ipc namespaces, as printable text: two
 * processes with equal texts run under one kernel and may reach each other's memory by pid.
 * "" where /proc does not tell, which @p log (NULL: none) says: whoever keeps it has no path cma
 * and no cuda_ipc. Thread: any. Does not block.
 */
void host_id(const logger *log, char out[HOST_ID_SIZE]);

#endif
