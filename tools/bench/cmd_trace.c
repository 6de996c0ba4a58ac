/* SPDX-License-Identifier: Apache-2.0 */
#include "bench/out_file.h"
#include "bench/stats.h"
#include "bench/trace_events.h"
#include "fetch/command.h"
#include "fetch/failure.h"
#include "fetch/options.h"
#include "fetch/output.h"
#include "fetch/terminal.h"

#include <stdlib.h>
#include <string.h>

/* One phase of the calls, or of one rank's part in them. */
typedef struct phase_row {
    const char *name;
    int rank;
    bool slowest; /* of the ranks in this phase */
    uint64_t *ns;
    size_t capacity;
    uint32_t count, bad;
    stats_figure figure;
} phase_row;

typedef struct trace_options {
    char *svg, *merge;
    long long pull;
    common_options common;
    struct poptOption common_part[COMMON_OPTIONS];
    arguments parsed;
    trace_events events;
    phase_row *rows;
    size_t count, capacity;
} trace_options;

/* ------------------------------------------------------------------------ figures */

static phase_row *row_of(trace_options *o, const trace_event *e)
{
    for (size_t i = 0; i < o->count; i++) {
        if (o->rows[i].rank == e->rank && strcmp(o->rows[i].name, e->name) == 0) {
            return &o->rows[i];
        }
    }
    o->rows = output_room(o->rows, o->count, &o->capacity, sizeof *o->rows);
    o->rows[o->count] = (phase_row){.name = e->name, .rank = e->rank};
    return &o->rows[o->count++];
}

/* Calls first, then ranks; each in the order in which phases were seen first. */
static int by_rank(const void *a, const void *b)
{
    const phase_row *x = a, *y = b;
    return (x->rank > y->rank) - (x->rank < y->rank);
}

static void mark_slowest(trace_options *o)
{
    for (size_t i = 0; i < o->count; i++) {
        phase_row *row = &o->rows[i];
        size_t others = 0;
        row->slowest = row->rank >= 0;
        for (size_t j = 0; j < o->count && row->slowest; j++) {
            const phase_row *other = &o->rows[j];
            bool rival =
                j != i && other->rank >= 0 && strcmp(other->name, row->name) == 0;
            others += rival;
            row->slowest = !rival || other->figure.median < row->figure.median ||
                           (other->figure.median == row->figure.median && j > i);
        }
        row->slowest = row->slowest && others > 0;
    }
}

static void make_rows(trace_options *o)
{
    for (size_t i = 0; i < o->events.count; i++) {
        const trace_event *e = &o->events.all[i];
        if (o->pull > 0 && e->n != (size_t)o->pull) {
            continue;
        }
        phase_row *row = row_of(o, e);
        row->ns = output_room(row->ns, row->count, &row->capacity, sizeof *row->ns);
        row->ns[row->count++] = (uint64_t)(e->took_us * 1000);
        row->bad += strcmp(e->outcome, "FANIN_OK") != 0;
    }
    if (o->count > 0) {
        qsort(o->rows, o->count, sizeof *o->rows, by_rank);
    }
    for (size_t i = 0; i < o->count; i++) {
        o->rows[i].figure = stats_figure_of(o->rows[i].ns, o->rows[i].count);
    }
    mark_slowest(o);
}

/* ------------------------------------------------------------------------ telling */

static void tell_text(const trace_options *o)
{
    struct libscols_table *table = output_table("RANK PHASE N> MEDIAN> P90> MAX> NOTE");
    const trace_event *longest = trace_events_pull(&o->events, (size_t)o->pull);
    terminal_print("%zu pulls of %zu processes", o->events.pulls, o->events.n_files);
    if (longest != NULL) {
        terminal_print("longest: number %zu, %s, %s, %s", longest->n, longest->about,
                       output_duration((uint64_t)(longest->took_us * 1000)).s,
                       longest->outcome);
    }
    for (size_t i = 0; i < o->count; i++) {
        const phase_row *row = &o->rows[i];
        char bad[40] = "";
        if (row->bad > 0) {
            snprintf(bad, sizeof bad, "%u not good", row->bad);
        }
        char note[64];
        snprintf(note, sizeof note, "%s%s%s", row->slowest ? "slowest" : "",
                 row->slowest && row->bad > 0 ? ", " : "", bad);
        output_row(
            table, NULL, row->rank < 0 ? "-" : output_number((uint64_t)row->rank).s,
            row->name, output_number(row->count).s,
            output_duration(row->figure.median).s, output_duration(row->figure.p90).s,
            output_duration(row->figure.most).s, note);
    }
    output_print(table);
    if (o->events.lost > 0) {
        terminal_print("%lld spans found no room", (long long)o->events.lost);
    }
}

static void tell_json(const trace_options *o)
{
    json_t *list = json_array();
    for (size_t i = 0; i < o->count; i++) {
        const phase_row *row = &o->rows[i];
        json_array_append_new(
            list,
            output_object(
                "rank", output_rank(row->rank), "phase", output_string(row->name),
                "count", output_u64(row->count), "not_good", output_u64(row->bad),
                "median_ns", output_u64(row->figure.median), "p90_ns",
                output_u64(row->figure.p90), "max_ns", output_u64(row->figure.most),
                "slowest", json_boolean(row->slowest), NULL));
    }
    output_json(output_object("processes", output_u64(o->events.n_files), "pulls",
                              output_u64(o->events.pulls), "lost",
                              output_u64((uint64_t)o->events.lost), "phases", list,
                              NULL));
}

static int write_files(const trace_options *o, const trace_event *whole)
{
    out_file file = {0};
    int code = 0;
    if (o->svg != NULL && (code = out_file_open(&file, o->svg)) == 0) {
        trace_picture(&o->events, whole, file.stream);
        code = out_file_commit(&file);
    }
    if (code == 0 && o->merge != NULL && (code = out_file_open(&file, o->merge)) == 0) {
        trace_events_merge(&o->events, file.stream);
        code = out_file_commit(&file);
    }
    return code;
}

static int tell(trace_options *o, const char *name)
{
    if (o->parsed.count == 0) {
        return failure_usage(name, "give a FILE of --trace or FANIN_TRACE, or several");
    }
    int code =
        trace_events_read(o->parsed.positional, (size_t)o->parsed.count, &o->events);
    if (code != 0) {
        return code;
    }
    const trace_event *whole = trace_events_pull(&o->events, (size_t)o->pull);
    if (o->pull > 0 && whole == NULL) {
        return failure_usage(name, "--pull %lld: the trace has %zu", o->pull,
                             o->events.pulls);
    }
    make_rows(o);
    code = write_files(o, whole);
    if (code == 0) {
        (o->common.json ? tell_json : tell_text)(o);
    }
    return code;
}

static int run(const command *self, int argc, const char **argv)
{
    trace_options o = {.common.timeout_ms = 1000};
    options_common(&o.common, o.common_part);
    struct poptOption table[] = {
        {"svg", 0, POPT_ARG_STRING, &o.svg, 0,
         "also draw the longest pull, or that of --pull, rank by rank", "FILE"},
        {"merge", 0, POPT_ARG_STRING, &o.merge, 0,
         "also write all files as one trace, on the first one's clock", "FILE"},
        {"pull", 0, POPT_ARG_LONGLONG, &o.pull, 0, "this pull alone, counted from 1",
         "N"},
        {NULL, 0, POPT_ARG_INCLUDE_TABLE, o.common_part, 0, "Common options:", NULL},
        POPT_TABLEEND,
    };
    int code = 0;
    if (options_parse(self, argc, argv, table, &o.common, &o.parsed, &code)) {
        code = tell(&o, self->name);
    }
    trace_events_free(&o.events);
    for (size_t i = 0; i < o.count; i++) {
        free(o.rows[i].ns);
    }
    free(o.rows);
    options_free(&o.parsed);
    return code;
}

const command cmd_trace = {
    .name = "trace",
    .arguments = "FILE... [OPTION...]",
    .summary = "say what took how long in traces, rank by rank",
    .help =
        "Examples:\n"
        "  nixl-fetch pull nixl_info.json --out adapter --trace pull.json\n"
        "  nixl-fetch trace pull.json --svg pull.svg\n"
        "  nixl-fetch trace /tmp/me/fanin-*.json --merge all.json\n"
        "\n"
        "FILE is what --trace or FANIN_TRACE has written. A row for each phase of the "
        "calls (-)\n"
        "and of each rank, with the slowest rank of a phase marked. Files of several "
        "processes\n"
        "are laid on one clock: that of the host, or of other hosts by the time of "
        "day.",
    .run = run,
};
