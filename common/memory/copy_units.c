/* SPDX-License-Identifier: Apache-2.0 */
#include "copy_units.h"

#include "copy_kernel.h"

/** What memory is read in; runs are cut at multiples of it. */
#define LINE 128
/** Shares that each warp gets when entries are cut at run time: so that they end at about the
    same time. */
#define SHARES_OF_A_WARP 4

/* One long run. */
static uint64_t copy_units_cut_run(const copy_entry *run, copy_entry *out)
{
    uint64_t n = 0;
    for (uint64_t done = 0; done < run->run; n++) {
        uint32_t beyond = (uint32_t)((run->from + done) % LINE);
        if (run->convert != CONVERT_NONE)
            beyond &= ~UINT32_C(3); /* whole elements */
        uint64_t length = COPY_UNIT_BYTES - beyond;
        if (length > run->run - done)
            length = run->run - done;
        if (out) {
            out[n] = *run;
            out[n].from += done;
            out[n].to += convert_bytes(run->convert, done);
            out[n].run = (uint32_t)length;
        }
        done += length;
    }
    return n;
}

static uint64_t cut_long_runs(const copy_entry *entry, copy_entry *out)
{
    uint64_t n = 0;
    copy_entry run = *entry;
    run.runs = 1;
    run.from_step = run.to_step = 0;
    for (uint32_t i = 0; i < entry->runs; i++) {
        n += copy_units_cut_run(&run, out ? out + n : NULL);
        run.from += (uint64_t)entry->from_step;
        run.to += (uint64_t)entry->to_step;
    }
    return n;
}

static uint64_t cut_short_runs(const copy_entry *entry, copy_entry *out)
{
    uint32_t at_once = COPY_UNIT_BYTES / entry->run;
    if (at_once > COPY_UNIT_RUNS)
        at_once = COPY_UNIT_RUNS;
    uint64_t n = ((uint64_t)entry->runs + at_once - 1) / at_once;
    /* Of one size, or a run less: no warp gets a rest. */
    for (uint64_t i = 0; out && i < n; i++) {
        uint64_t first = entry->runs * i / n, end = entry->runs * (i + 1) / n;
        out[i] = *entry;
        out[i].from += first * (uint64_t)entry->from_step;
        out[i].to += first * (uint64_t)entry->to_step;
        out[i].runs = (uint32_t)(end - first);
    }
    return n;
}

uint64_t copy_units_cut(const copy_entry *entry, copy_entry *out)
{
    if (entry->run == 0 || entry->runs == 0)
        return 0;
    /* As most are: nothing is to be cut. */
    if (entry->runs == 1 && entry->run <= COPY_UNIT_BYTES) {
        if (out)
            *out = *entry;
        return 1;
    }
    return entry->run > COPY_UNIT_BYTES ? cut_long_runs(entry, out)
                                        : cut_short_runs(entry, out);
}

uint32_t copy_units_parts(const copy_entry *entries, uint64_t n, uint64_t warps)
{
    uint64_t longest = 1, wanted = warps * SHARES_OF_A_WARP / n;
    for (uint64_t i = 0; i < n; i++) {
        uint64_t bytes = (uint64_t)entries[i].run * entries[i].runs;
        uint64_t shares = bytes / COPY_UNIT_BYTES;
        if (shares < entries[i].runs / COPY_UNIT_RUNS)
            shares = entries[i].runs / COPY_UNIT_RUNS;
        longest = shares > longest ? shares : longest;
    }
    if (wanted > longest)
        wanted = longest;
    return wanted > 0 ? (uint32_t)wanted : 1;
}
