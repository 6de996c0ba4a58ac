/* SPDX-License-Identifier: Apache-2.0 */
#include "cpu_quota.h"

#include "topology_internal.h"
#include <inttypes.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>

#define PREFIX "0::" /* of the line that is version 2's */

/* "/a/b" of /proc/self/cgroup, without a slash at its end; empty: the root, or unknown. */
static void own_group(const char *proc, char out[PATH_MAX])
{
    char name[PATH_MAX], line[PATH_MAX];
    out[0] = '\0';
    int length = snprintf(name, sizeof name, "%s/self/cgroup", proc);
    FILE *file = length > 0 && length < (int)sizeof name ? fopen(name, "re") : NULL;
    while (file && fgets(line, sizeof line, file)) {
        line[strcspn(line, "\n")] = '\0';
        if (strncmp(line, PREFIX, strlen(PREFIX)) == 0)
            snprintf(out, PATH_MAX, "%s", line + strlen(PREFIX));
    }
    if (file)
        fclose(file);
    if (strcmp(out, "/") == 0)
        out[0] = '\0';
}

unsigned cpu_quota(const char *proc, const char *sys)
{
    char group[PATH_MAX], name[PATH_MAX + 32], text[64];
    unsigned least = UINT_MAX;
    own_group(proc, group);
    for (;;) {
        uint64_t time, period;
        snprintf(name, sizeof name, "fs/cgroup%s/cpu.max", group);
        if (sysfs_line(sys, name, text, sizeof text) &&
            sscanf(text, "%" SCNu64 " %" SCNu64, &time, &period) == 2 && period > 0) {
            uint64_t cpus = time / period + (time % period > 0);
            least = cpus < least ? (unsigned)cpus : least;
        }
        char *last = strrchr(group, '/');
        if (!last)
            return least > 0 ? least : 1;
        *last = '\0';
    }
}
