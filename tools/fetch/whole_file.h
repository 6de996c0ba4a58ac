/* SPDX-License-Identifier: Apache-2.0 */
/** @file A new file, whole or not at all. */
#ifndef WHOLE_FILE_H
#define WHOLE_FILE_H

#include <fanin/error.h>
#include <stddef.h>

/**
 * Makes @p path, mode 0600, whole or not at all, and on the disk: never over what is there, nor
 * through a link. FANIN_ERR_EXISTS, FANIN_ERR_IO.
 */
fanin_status whole_file_write(const char *path, const void *bytes, size_t size,
                              fanin_error *error);

#endif
