/* SPDX-License-Identifier: Apache-2.0 */
#include "fetch/report.h"
#include "fetch/output.h"

#include <inttypes.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>

const report_phase report_phases[] = {
    {"connect", offsetof(fanin_result_info, connect_ns)},
    {"map", offsetof(fanin_result_info, map_ns)},
    {"catalog", offsetof(fanin_result_info, catalog_ns)},
    {"plan", offsetof(fanin_result_info, plan_ns)},
    {"table", offsetof(fanin_result_info, table_ns)},
    {"wait", offsetof(fanin_result_info, wait_ns)},
    {"begin", offsetof(fanin_result_info, begin_ns)},
    {"read", offsetof(fanin_result_info, read_ns)},
    {"scatter", offsetof(fanin_result_info, scatter_ns)},
    {"verify", offsetof(fanin_result_info, verify_ns)},
    {"end", offsetof(fanin_result_info, end_ns)},
    {"write", offsetof(fanin_result_info, write_ns)},
    {"total", offsetof(fanin_result_info, total_ns)},
    {"fixed", offsetof(fanin_result_info, fixed_ns)},
    {NULL, 0},
};

uint64_t report_phase_ns(const fanin_result_info *info, const report_phase *phase)
{
    uint64_t ns;
    memcpy(&ns, (const char *)info + phase->offset, sizeof ns);
    return ns;
}

static bool moves_bytes(const report_phase *phase)
{
    const char *name = phase->name;
    return strcmp(name, "read") == 0 || strcmp(name, "verify") == 0 ||
           strcmp(name, "total") == 0 || strcmp(name, "write") == 0;
}

/* That the phase went through. */
static uint64_t bytes_moved(const fanin_result_info *info, const report_phase *phase,
                            bool by_patches)
{
    return by_patches && strcmp(phase->name, "read") == 0 ? info->patch_bytes
                                                          : info->bytes;
}

static json_t *checksums_json(const fanin_result_info *info)
{
    if (info->transport_checksums == FANIN_CHECKSUMS_LOCAL)
        return json_string("local");
    return json_boolean(info->transport_checksums == FANIN_CHECKSUMS_ALL);
}

static const char *checksums_text(const fanin_result_info *info)
{
    switch (info->transport_checksums) {
    case FANIN_CHECKSUMS_ALL:
        return "of all that came over the network";
    case FANIN_CHECKSUMS_LOCAL:
        return "none needed: nothing came over a network";
    default:
        return "none, of bytes that came over a network";
    }
}

static json_t *ranks_of(const fanin_result_info *info)
{
    json_t *ranks =
        info->ranks_json != NULL ? json_loads(info->ranks_json, 0, NULL) : NULL;
    return ranks != NULL ? ranks : json_array();
}

json_t *report_json(const fanin_result_info *info)
{
    json_t *phases = json_object();
    for (const report_phase *p = report_phases; p->name != NULL; p++)
        output_set(phases, p->name, output_u64(report_phase_ns(info, p)), NULL);
    json_t *object = output_object(
        "step", output_u64(info->step), "world_id", output_digits(info->world_id),
        "bytes", output_u64(info->bytes), "tensors", output_u64(info->tensors), "reads",
        output_u64(info->reads), "restarts", output_u64(info->restarts), "stale",
        output_u64(info->stale), "reused", json_boolean(info->reused), "path",
        output_string(info->reused ? "none" : fanin_path_name(info->path)),
        "path_reason", output_string(info->path_reason), "transport_checksums",
        checksums_json(info), "verified", json_boolean(info->verified), "phases_ns",
        phases, NULL);
    if (info->total_ns > 0) {
        double rate = (double)info->bytes / (double)info->total_ns * 1e9;
        output_set(object, "bytes_per_second", json_real(rate), NULL);
    }
    output_set(object, "ranks", ranks_of(info), "peak_resident_bytes",
               output_u64(report_peak_bytes()), NULL);
    return object;
}

static const char *report_text_of(const json_t *rank, const char *name)
{
    const char *text = json_string_value(json_object_get(rank, name));
    return text != NULL ? text : "";
}

static bool same_path(const json_t *a, const json_t *b)
{
    return strcmp(report_text_of(a, "path"), report_text_of(b, "path")) == 0 &&
           strcmp(report_text_of(a, "reason"), report_text_of(b, "reason")) == 0;
}

/* "ranks 0-3, 5": those that were read as @p rank was. */
static void print_group(const json_t *ranks, const json_t *rank)
{
    size_t count = json_array_size(ranks);
    uint32_t *alike = output_require(calloc(count, sizeof *alike));
    size_t n = 0;
    for (size_t i = 0; i < count; i++)
        if (same_path(json_array_get(ranks, i), rank))
            alike[n++] = (uint32_t)i;
    fputs("ranks ", stdout);
    output_ranges(stdout, ", ", alike, n);
    free(alike);
}

/* One line a group of ranks that were read by one path for one reason. */
static void print_paths(const fanin_result_info *info)
{
    json_t *ranks = ranks_of(info);
    size_t count = json_array_size(ranks);
    bool one = true;
    for (size_t i = 1; i < count; i++)
        one = one && same_path(json_array_get(ranks, i), json_array_get(ranks, 0));
    if (one) {
        const char *reason = info->path_reason != NULL ? info->path_reason : "";
        terminal_print("%-9s %s%s%s", "path", fanin_path_name(info->path),
                       reason[0] != '\0' ? ": " : "", reason);
    }
    for (size_t i = 0; !one && i < count; i++) {
        const json_t *rank = json_array_get(ranks, i);
        size_t earlier = 0;
        while (earlier < i && !same_path(json_array_get(ranks, earlier), rank))
            earlier++;
        if (earlier == i) {
            printf("%-9s %s, ", i == 0 ? "path" : "", report_text_of(rank, "path"));
            print_group(ranks, rank);
            terminal_print("%s%s",
                           report_text_of(rank, "reason")[0] != '\0' ? ": " : "",
                           report_text_of(rank, "reason"));
        }
    }
    json_decref(ranks);
}

void report_print(const fanin_result_info *info, bool by_patches)
{
    printf("%-9s %" PRIu64 "\n", "step", info->step);
    printf("%-9s %s\n", "world", output_hex(info->world_id).s);
    printf("%-9s %" PRIu64 "\n", "tensors", info->tensors);
    printf("%-9s %s (%" PRIu64 ")\n", "bytes", output_bytes(info->bytes).s,
           info->bytes);
    if (!info->reused) {
        print_paths(info);
        printf("%-9s %s\n", "checksums", checksums_text(info));
        if (info->verified)
            printf("%-9s the ranks hold what has landed\n", "verified");
        printf("%-9s %" PRIu64 "\n", "reads", info->reads);
    }
    if (info->restarts > 0)
        printf("%-9s %u, %u of them stale\n", "restarts", info->restarts, info->stale);
    for (const report_phase *p = report_phases; p->name != NULL; p++) {
        uint64_t ns = report_phase_ns(info, p);
        if (ns == 0)
            continue;
        printf("%-9s %12s", p->name, output_duration(ns).s);
        if (moves_bytes(p) && !info->reused)
            printf("  %12s", output_rate(bytes_moved(info, p, by_patches), ns).s);
        putchar('\n');
    }
}

uint64_t report_peak_bytes(void)
{
    struct rusage usage;
    return getrusage(RUSAGE_SELF, &usage) == 0 ? (uint64_t)usage.ru_maxrss * 1024 : 0;
}
