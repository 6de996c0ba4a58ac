/* SPDX-License-Identifier: Apache-2.0 */
/** @file Where inputs of a fuzz target pull directories to: a folder of this process's own, removed
    at its end. */
#ifndef PULLED_DIRECTORY_H
#define PULLED_DIRECTORY_H

#include <stdbool.h>

/** That is not there yet, in that folder. */
const char *pulled_directory(void);
/** It is there, alone and with a file of tensors by that name, which can be read; or, if it was not
    pulled, nothing is there. Removes it. */
void pulled_directory_check(bool pulled, const char *file);

#endif
