/* SPDX-License-Identifier: Apache-2.0 */
/** @file Commands that are Python's: the program becomes the first python3 of the PATH, which runs
    tools/python. */
#ifndef PYTHON_H
#define PYTHON_H

#include "fetch/session.h"

/** What "python3 -c" gets. */
extern const char python_program[];

/** A command line; the words must live until python_become(). */
typedef struct python {
    const command *command;
    const char **words;
    size_t count, capacity;
} python;

/** Up to the words of the command's own; zero before. */
void python_start(python *p, const command *self, const common_options *common);
/** NULL is "". */
void python_add(python *p, const char *word);
/** This program's file, for commands that start others of them. */
void python_add_self(python *p);
/** The target's word, and options of its connections, for another command of this program. */
void python_add_target(python *p, const session *s, const invocation *line);
/** This program's command line `status --json` for what the session is about. */
void python_add_looks(python *p, const session *s, const invocation *line);

/** Returns only where it cannot be: the exit status after a message. */
int python_become(python *p);

#endif
