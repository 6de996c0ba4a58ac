/* SPDX-License-Identifier: Apache-2.0 */
/** @file Files with secrets, for tests. */
#ifndef SECRETS_H
#define SECRETS_H

/** A file of 64 digits, the last of them @p digit, in a folder of its own; fails the test. The path is
    the process's; secrets_remove() removes all. */
const char *secret_of(char digit);
void secrets_remove(void);

#endif
