/* SPDX-License-Identifier: Apache-2.0 */
/** @file What stands where a reader's adapter is to be written. */
#ifndef CAMPAIGN_OBSTACLES_H
#define CAMPAIGN_OBSTACLES_H

#include <stdbool.h>
#include <stdint.h>

/** Now and then puts something at @p directory that is no adapter, or takes rights out of what the
    process will make: a FIFO, a FIFO within a directory, a file, a link to nowhere, a umask. True:
    it did. */
bool obstacles_put(const char *directory, uint64_t *random);
/** Removes whatever stands there, and sets the umask back. */
void obstacles_clear(const char *directory);

#endif
