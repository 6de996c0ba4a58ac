/* SPDX-License-Identifier: Apache-2.0 */
/** @file Descriptors 0 to 2 of a process that closed them. */
#ifndef STANDARD_DESCRIPTORS_H
#define STANDARD_DESCRIPTORS_H

/**
 * Takes those of the numbers 0 to 2 that are closed, for good. Else a connection or a file gets
 * such a number, and whoever writes to standard output or error writes into it. What holds them
 * fails each read and write with EBADF, as a closed descriptor does, and ends at exec.
 */
void standard_descriptors_hold(void);

#endif
