/* SPDX-License-Identifier: Apache-2.0 */
/** @file Reading sysfs, for the files of this folder. */
#ifndef TOPOLOGY_INTERNAL_H
#define TOPOLOGY_INTERNAL_H

#include "topology.h"

/** The first line of a file below @p root, without its end; false: it is not there. */
bool sysfs_line(const char *root, const char *name, char *out, size_t size);
/** The number (hexadecimal with 0x) that the file begins with, @p otherwise if there is none. */
double sysfs_number(const char *root, const char *name, double otherwise);
bool sysfs_exists(const char *root, const char *name);

/** Names in a folder below @p root, sorted with numbers as numbers, for sysfs_names_free(). */
char **sysfs_names(const char *root, const char *folder, size_t *count_out);
void sysfs_names_free(char **names, size_t count);

/** Where the link @p name below @p root leads: PCI address, path, NUMA node. */
void sysfs_place(const char *root, const char *name, topology_place *out);

#endif
