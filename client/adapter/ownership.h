/* SPDX-License-Identifier: Apache-2.0 */
/** @file Whether other users of the host could have made or could change a file. Pure but for geteuid(). */
#ifndef OWNERSHIP_H
#define OWNERSHIP_H

#include <stdbool.h>
#include <sys/stat.h>

#define OWNERSHIP_TEXT 128

/** True: another user owns the file or may write to it; @p why_out says it ("belongs to uid 7,
    ..."). False: only we and root could have made it what it is. */
bool ownership_doubtful(const struct stat *info, char why_out[OWNERSHIP_TEXT]);

/** The same of what lies in a directory: true if another user may rename it there. A directory of
    root's is fine, and one that others may write to if it is sticky. */
bool ownership_parent_doubtful(const struct stat *info, char why_out[OWNERSHIP_TEXT]);

#endif
