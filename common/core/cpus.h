/* SPDX-License-Identifier: Apache-2.0 */
/** @file How many processors there are for threads. */
#ifndef CPUS_H
#define CPUS_H

/** CPUs that this process may use, at least 1. */
unsigned usable_cpus(void);

#endif
