/* SPDX-License-Identifier: Apache-2.0 */
/** @file What --version says. */
#ifndef VERSION_H
#define VERSION_H

/** The commit that this was built from, or "unknown". */
extern const char *const version_revision;

/** Prints versions of the tool, the library, the protocol, and of what was found of UCX and CUDA.
    */
void version_print(void);

#endif
