/* SPDX-License-Identifier: Apache-2.0 */
/** @file What --version says. */
#ifndef VERSION_H
#define VERSION_H

/** Prints versions of the tool, the library, the protocol, and of what was found of UCX and CUDA. */
void version_print(void);

#endif
