/* SPDX-License-Identifier: Apache-2.0 */
#include "report.h"
#include "output.h"

#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <sys/resource.h>

const report_phase report_phases[] = {
    {"connect", offsetof(fanin_result_info, connect_ns)},
    {"catalog", offsetof(fanin_result_info, catalog_ns)},
    {"plan", offsetof(fanin_result_info, plan_ns)},
    {"wait", offsetof(fanin_result_info, wait_ns)},
    {"begin", offsetof(fanin_result_info, begin_ns)},
    {"read", offsetof(fanin_result_info, read_ns)},
    {"scatter", offsetof(fanin_result_info, scatter_ns)},
    {"end", offsetof(fanin_result_info, end_ns)},
    {"write", offsetof(fanin_result_info, write_ns)},
    {"total", offsetof(fanin_result_info, total_ns)},
    {"fixed", offsetof(fanin_result_info, fixed_ns)},
    {NULL, 0},
};

uint64_t report_phase_ns(const fanin_result_info *info, const report_phase *phase)
{
    uint64_t ns;
    memcpy(&ns, (const char *)info + phase->offset, sizeof(ns));
    return ns;
}

static bool moves_bytes(const report_phase *phase)
{
    return strcmp(phase->name, "read") == 0 || strcmp(phase->name, "total") == 0 ||
           strcmp(phase->name, "write") == 0;
}

json_t *report_json(const fanin_result_info *info)
{
    json_t *object = json_object();
    json_t *phases = json_object();
    output_set_u64(object, "step", info->step);
    output_set_hex(object, "world_id", info->world_id, sizeof(info->world_id));
    output_set_u64(object, "bytes", info->bytes);
    output_set_u64(object, "tensors", info->tensors);
    output_set_u64(object, "reads", info->reads);
    output_set_u64(object, "restarts", info->restarts);
    output_set_u64(object, "stale", info->stale);
    json_object_set_new(object, "reused", json_boolean(info->reused));
    output_set_string(object, "path",
                      info->reused ? "none" : fanin_path_name(info->path));
    output_set_string(object, "path_reason", info->path_reason);
    for (const report_phase *p = report_phases; p->name != NULL; p++) {
        output_set_u64(phases, p->name, report_phase_ns(info, p));
    }
    json_object_set_new(object, "phases_ns", phases);
    if (info->total_ns > 0) {
        json_object_set_new(
            object, "bytes_per_second",
            json_real((double)info->bytes / (double)info->total_ns * 1e9));
    }
    json_t *ranks =
        info->ranks_json != NULL ? json_loads(info->ranks_json, 0, NULL) : NULL;
    json_object_set_new(object, "ranks", ranks != NULL ? ranks : json_array());
    output_set_u64(object, "peak_resident_bytes", report_peak_bytes());
    return object;
}

void report_print(const fanin_result_info *info)
{
    printf("%-9s %llu\n", "step", (unsigned long long)info->step);
    printf("%-9s %s\n", "world", output_hex(info->world_id, sizeof(info->world_id)).s);
    printf("%-9s %llu\n", "tensors", (unsigned long long)info->tensors);
    printf("%-9s %s (%llu)\n", "bytes", output_bytes(info->bytes).s,
           (unsigned long long)info->bytes);
    if (!info->reused) {
        printf("%-9s %s%s%s\n", "path", fanin_path_name(info->path),
               info->path_reason != NULL && info->path_reason[0] != '\0' ? ": " : "",
               info->path_reason != NULL ? info->path_reason : "");
        printf("%-9s %llu\n", "reads", (unsigned long long)info->reads);
    }
    if (info->restarts > 0) {
        printf("%-9s %u, %u of them stale\n", "restarts", info->restarts, info->stale);
    }
    for (const report_phase *p = report_phases; p->name != NULL; p++) {
        uint64_t ns = report_phase_ns(info, p);
        if (ns == 0) {
            continue;
        }
        printf("%-9s %12s", p->name, output_duration(ns).s);
        if (moves_bytes(p) && !info->reused) {
            printf("  %12s", output_rate(info->bytes, ns).s);
        }
        putchar('\n');
    }
}

uint64_t report_peak_bytes(void)
{
    struct rusage usage;
    return getrusage(RUSAGE_SELF, &usage) == 0 ? (uint64_t)usage.ru_maxrss * 1024 : 0;
}
