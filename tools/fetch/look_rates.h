/* SPDX-License-Identifier: Apache-2.0 */
/** @file What has changed between two looks at a run. */
#ifndef LOOK_RATES_H
#define LOOK_RATES_H

#include "fetch/look.h"

/** Of one rank. */
typedef struct look_rate {
    bool known;         /**< it answered both, and is still the process that it was */
    uint64_t bytes, ns; /**< that readers got of it, and the time in between */
    const char *path;   /**< by which most of them went; NULL: there were none */
} look_rate;

typedef struct look_before {
    bool known;
    char address[MISSING_ADDRESS];
    uint64_t bytes[LOOK_PATHS], pulls, at_ns;
} look_before;

typedef struct look_rates {
    look_rate *list; /**< as the ranks of the look that was taken last */
    look_before *before;
    uint32_t count;
} look_rates;

/** Compares @p l, taken at @p now_ns, with the look that was given before. All zero at first. */
void look_rates_take(look_rates *r, const look *l, uint64_t now_ns);
void look_rates_free(look_rates *r);

#endif
