/* SPDX-License-Identifier: Apache-2.0 */
/** @file relay-fleet [NAME VALUE]...: runs one fleet, and tells how it went. */
#include "fleet.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct option {
    const char *name;
    size_t *whole;
    double *real;
} option;

int main(int argc, char **argv)
{
    fleet_options o = fleet_defaults();
    fleet_result r;
    const option all[] = {
        {"readers", &o.readers, NULL},
        {"units", &o.units, NULL},
        {"neighbours", &o.neighbours, NULL},
        {"threads", &o.threads, NULL},
        {"origin-threads", &o.origin_threads, NULL},
        {"batch", &o.batch, NULL},
        {"rack", &o.rack, NULL},
        {"unsaid", &o.unsaid, NULL},
        {"slow", &o.slow, NULL},
        {"dead", &o.dead, NULL},
        {"silent", &o.silent, NULL},
        {"late", &o.late, NULL},
        {"ticks", NULL, &o.ticks},
        {"spine", NULL, &o.spine},
        {"unit", NULL, &o.unit_s},
        {"latency", NULL, &o.latency_s},
        {"slow-by", NULL, &o.slow_by},
        {"at", NULL, &o.at},
    };
    for (int i = 1; i + 1 < argc; i += 2) {
        const option *found = NULL;
        for (size_t k = 0; k < sizeof all / sizeof *all; k++)
            found = strcmp(all[k].name, argv[i]) == 0 ? &all[k] : found;
        if (!found) {
            fprintf(stderr, "relay-fleet: there is no %s\n", argv[i]);
            return 2;
        }
        if (found->whole)
            *found->whole = strtoul(argv[i + 1], NULL, 10);
        else
            *found->real = strtod(argv[i + 1], NULL);
    }
    bool ended = fleet_run(&o, &r);
    printf(
        "%zu readers, %zu units: %.3f x, %.3f models, late one %.3f x, %.1f units told "
        "a reader%s\n",
        o.readers, o.units, r.times, r.models, r.late,
        (double)r.told / (double)o.readers, ended ? "" : "; SOME HAVE NOT ENDED");
    return ended ? 0 : 1;
}
