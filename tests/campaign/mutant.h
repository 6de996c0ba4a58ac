/* SPDX-License-Identifier: Apache-2.0 */
/** @file Programs of a campaign that are wrong on purpose, which it must find out. */
#ifndef CAMPAIGN_MUTANT_H
#define CAMPAIGN_MUTANT_H

#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

/** Whether this process is that mutant: CAMPAIGN_MUTANT in its environment says so. */
static inline bool mutant_is(const char *name)
{
    const char *mutant = getenv("CAMPAIGN_MUTANT");
    return mutant && strcmp(mutant, name) == 0;
}

#endif
