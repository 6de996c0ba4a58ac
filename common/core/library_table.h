/* SPDX-License-Identifier: Apache-2.0 */
/** @file Libraries that are loaded at run time: tables of their functions; and staying loaded
    oneself. */
#ifndef LIBRARY_TABLE_H
#define LIBRARY_TABLE_H

#include <stddef.h>

/** A function by the name that the library exports, and where in the table its pointer belongs. */
typedef struct library_function {
    const char *name;
    size_t offset;
} library_function;

/** Fills @p table from what dlopen() gave. NULL: with all of them; else the name of the first that
    the library has not, static as @p functions are. */
const char *library_table_read(void *handle, const library_function *functions,
                               size_t count, void *table);

/** Keeps the file that holds this code mapped until the process ends, for what is still called
    after the last call into the library. Thread: any. */
void pin_own_library(void);

#endif
