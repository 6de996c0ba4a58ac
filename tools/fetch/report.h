/* SPDX-License-Identifier: Apache-2.0 */
/** @file What a pull did, for people and as JSON. */
#ifndef REPORT_H
#define REPORT_H

#include <fanin/client.h>
#include <jansson.h>

typedef struct report_phase {
    const char *name;
    size_t offset; /**< of the uint64_t in fanin_result_info */
} report_phase;

/** The phases in the order of time, then total and fixed; NULL name at the end. */
extern const report_phase report_phases[];

uint64_t report_phase_ns(const fanin_result_info *info, const report_phase *phase);

/** All of @p info as an object. */
json_t *report_json(const fanin_result_info *info);

/** Lines "name  value" on stdout; phases that took no time are left out. @p by_patches: they alone
    were read, if there were any. */
void report_print(const fanin_result_info *info, bool by_patches);

/** The largest resident set of this process so far. */
uint64_t report_peak_bytes(void);

#endif
