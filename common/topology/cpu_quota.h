/* SPDX-License-Identifier: Apache-2.0 */
/** @file The CPU time that a container or a service is given. */
#ifndef CPU_QUOTA_H
#define CPU_QUOTA_H

/** How many CPUs' time this process may take by cpu.max of its control group (version 2) and of
    those around it, rounded up; UINT_MAX: no limit is known. @p proc, @p sys: "/proc", "/sys". */
unsigned cpu_quota(const char *proc, const char *sys);

#endif
