/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file
 * A file that grows beyond RLIMIT_FSIZE is EFBIG and SIGXFSZ, which ends a process that minds
 * neither. Between enter and leave the calling thread gets the error alone; the process's
 * dispositions stay as they are.
 */
#ifndef FILE_LIMIT_H
#define FILE_LIMIT_H

#include <signal.h>
#include <stdbool.h>

typedef struct file_limit_guard {
    sigset_t before;
    bool pending; /**< the signal was there already: it is not ours to take */
} file_limit_guard;

file_limit_guard file_limit_enter(void);
/** Keeps errno. */
void file_limit_leave(const file_limit_guard *g);

#endif
