/* SPDX-License-Identifier: Apache-2.0 */
#include "adapter/ownership.h"

#include <stdio.h>
#include <unistd.h>

#define OTHERS_WRITE (S_IWGRP | S_IWOTH)

static bool of_another(const struct stat *info, char why_out[OWNERSHIP_TEXT])
{
    snprintf(why_out, OWNERSHIP_TEXT, "belongs to uid %lu, this process is uid %lu",
             (unsigned long)info->st_uid, (unsigned long)geteuid());
    return true;
}

static bool writable(const struct stat *info, char why_out[OWNERSHIP_TEXT])
{
    snprintf(why_out, OWNERSHIP_TEXT, "may be written by other users (mode %04o)",
             (unsigned)info->st_mode & 07777);
    return true;
}

bool ownership_doubtful(const struct stat *info, char why_out[OWNERSHIP_TEXT])
{
    if (info->st_uid != geteuid())
        return of_another(info, why_out);
    return info->st_mode & OTHERS_WRITE ? writable(info, why_out) : false;
}

bool ownership_parent_doubtful(const struct stat *info, char why_out[OWNERSHIP_TEXT])
{
    /* Its owner may rename everything in it, sticky or not. */
    if (info->st_uid != geteuid() && info->st_uid != 0)
        return of_another(info, why_out);
    bool shared = (info->st_mode & OTHERS_WRITE) && !(info->st_mode & S_ISVTX);
    return shared ? writable(info, why_out) : false;
}
