/* SPDX-License-Identifier: Apache-2.0 */
/** @file The file with a launch's secret: its rules, and reading it. */
#ifndef SECRET_FILE_H
#define SECRET_FILE_H

#include <fanin/error.h>

#define SECRET_SIZE 32
#define SECRET_ENV "FANIN_SECRET_FILE"

/** What a configuration's secret_file means: NULL the environment's FANIN_SECRET_FILE, "" none.
    NULL: there is no secret. */
const char *secret_file_of(const char *configured);

/**
 * Reads 64 hexadecimal digits or 32 bytes, with at most one newline behind. The file, to which
 * symbolic links may lead, belongs to this process's user or to root; others may do nothing with
 * it, and its group may read it only if it is root's. Blocks as reading a file does, never on a
 * pipe. FANIN_ERR_NOT_FOUND: there is no such file. FANIN_ERR_AUTH: owner or mode.
 * FANIN_ERR_ARGUMENT: it holds something else, or one byte 32 times. FANIN_ERR_IO. All name the
 * file and what to do; none tells anything of what it holds.
 */
fanin_status secret_file_read(const char *path, uint8_t out[SECRET_SIZE],
                              fanin_error *error);

/** From 64 hexadecimal digits, whatever follows them. False: they are not that many. */
bool secret_of_hex(const char *text, uint8_t out[SECRET_SIZE]);

#endif
