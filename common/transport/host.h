/* SPDX-License-Identifier: Apache-2.0 */
/** @file Which kernel and which namespaces this process lives in. */
#ifndef HOST_H
#define HOST_H

#define HOST_ID_SIZE 64 /**< with the final NUL */

/**
 * The boot id and the numbers of the pid and ipc namespaces, as printable text: two
 * processes with equal texts run under one kernel and may reach each other's memory by pid.
 * "" where /proc does not tell. Thread: any. Does not block.
 */
void host_id(char out[HOST_ID_SIZE]);

#endif
