/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file
 * Where a reader is, as its offer says it: "site" or "site/rack", "": not said. Each part is of
 * ASCII letters, digits, '.', '-' and '_'. Readers of one site share no link with those of another.
 */
#ifndef PLACE_H
#define PLACE_H

#include <stdbool.h>

#define PLACE_SIZE 64 /**< with the NUL */
#define PLACE_FORM                                                                     \
    "site or site/rack, of letters, digits, '.', '-' and '_', at most 63 in all"

bool place_valid(const char *place);
/** Who says no place is of the site of all that say none. */
bool place_same_site(const char *a, const char *b);

#endif
