/* SPDX-License-Identifier: Apache-2.0 */
/** @file A tar archive (ustar) in memory. */
#ifndef TAR_FILE_H
#define TAR_FILE_H

#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

/** Appends a regular file, mode 0600. @p name has at most 99 bytes. */
void tar_file_add(FILE *archive, const char *name, uint64_t unix_s, const void *bytes,
                  size_t size);

/** Appends what ends an archive. */
void tar_file_end(FILE *archive);

#endif
