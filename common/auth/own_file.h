/* SPDX-License-Identifier: Apache-2.0 */
/** @file Files with keys and certificates: whose they may be, and reading them whole. */
#ifndef OWN_FILE_H
#define OWN_FILE_H

#include <fanin/error.h>
#include <stdint.h>

typedef struct own_file_rules {
    const char *what;   /**< as messages name it: "secret file" */
    const char *phase;  /**< of errors */
    bool is_private;    /**< others may not even read it */
    const char *make;   /**< what to do where there is none, or another thing */
    const char *leaked; /**< what to do besides if others could have read it */
} own_file_rules;

/** An error about the file: "the WHAT PATH WHY". */
fanin_status own_file_refuse(const own_file_rules *rules, const char *path,
                             fanin_status status, const char *why, const char *remedy,
                             fanin_error *error);

/**
 * Reads at most @p room bytes of a file, to which symbolic links may lead. It belongs to this
 * process's user or to root; nobody else may write it; if it is private, others may do nothing with
 * it, and its group may only read it, and only if it is root's. Blocks as reading a file does,
 * never on a pipe. FANIN_ERR_NOT_FOUND: there is no such file. FANIN_ERR_AUTH: owner or mode.
 * FANIN_ERR_ARGUMENT: it is no file. FANIN_ERR_IO. All name the file and what to do; none tells
 * anything of what it holds.
 */
fanin_status own_file_read(const own_file_rules *rules, const char *path, void *out,
                           size_t room, size_t *size_out, fanin_error *error);

#endif
