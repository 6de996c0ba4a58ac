/* SPDX-License-Identifier: Apache-2.0 */
#include "bench/bench.h"
#include "bench/trace_events.h"
#include "fetch/command.h"
#include "fetch/failure.h"
#include "fetch/options.h"
#include "fetch/output.h"
#include "fetch/terminal.h"
#include "fetch/whole_tensor.h"

#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

enum { LAG_NS = 1000000 }; /* a rank that is slower by less is not worth a line */

/* One phase of the calls, or of one rank's part in them. */
typedef struct phase_row {
    const char *name;
    int rank;
    const trace_event *first;
    uint64_t *ns;
    uint32_t count, bad;
    stats_figure figure;
    bool slowest;    /* of the ranks in this phase */
    uint64_t others; /* then: the median of the others' medians */
} phase_row;

typedef struct trace_options {
    char *svg, *merge;
    long long pull;
    common_options common;
    struct poptOption common_part[COMMON_OPTIONS];
    arguments parsed;
    trace_events events;
    phase_row *rows;
    uint64_t *ns; /* of all rows */
    size_t count;
} trace_options;

/* ------------------------------------------------------------------------ figures */

static int cmd_trace_by_place(const trace_event *a, const trace_event *b)
{
    return (a > b) - (a < b);
}

/* Spans of one rank's phase stand together, in the order in which they were seen. */
static int by_phase(const void *a, const void *b)
{
    const trace_event *x = *(const trace_event *const *)a;
    const trace_event *y = *(const trace_event *const *)b;
    int names = x->rank != y->rank ? x->rank - y->rank : strcmp(x->name, y->name);
    return names != 0 ? names : cmd_trace_by_place(x, y);
}

/* Calls first, then ranks; each in the order in which phases were seen first. */
static int cmd_trace_by_rank(const void *a, const void *b)
{
    const phase_row *x = a, *y = b;
    return x->rank != y->rank ? x->rank - y->rank
                              : cmd_trace_by_place(x->first, y->first);
}

/* Ranks of one phase stand together, the slowest first. */
static int by_speed(const void *a, const void *b)
{
    const phase_row *x = *(phase_row *const *)a, *y = *(phase_row *const *)b;
    int names = strcmp(x->name, y->name);
    if (names != 0) {
        return names;
    }
    return x->figure.median != y->figure.median
               ? (x->figure.median < y->figure.median ? 1 : -1)
               : x->rank - y->rank;
}

static void mark_slowest(trace_options *o)
{
    phase_row **ranks = output_require(calloc(o->count + 1, sizeof(phase_row *)));
    size_t count = 0;
    for (size_t i = 0; i < o->count; i++) {
        if (o->rows[i].rank >= 0) {
            ranks[count++] = &o->rows[i];
        }
    }
    qsort(ranks, count, sizeof(phase_row *), by_speed);
    for (size_t first = 0, end; first < count; first = end) {
        end = first + 1;
        while (end < count && strcmp(ranks[end]->name, ranks[first]->name) == 0) {
            end++;
        }
        if (end - first > 1) {
            ranks[first]->slowest = true;
            ranks[first]->others = ranks[first + (end - first) / 2]->figure.median;
        }
    }
    free(ranks);
}

/* Where one rank costs the most time beyond what the others take; NULL: nowhere that matters. */
static const phase_row *laggard(const trace_options *o)
{
    const phase_row *found = NULL;
    for (size_t i = 0; i < o->count; i++) {
        const phase_row *row = &o->rows[i];
        uint64_t more = row->slowest ? row->figure.median - row->others : 0;
        if (more >= LAG_NS && more >= row->others &&
            (found == NULL || more > found->figure.median - found->others)) {
            found = row;
        }
    }
    return found;
}

static void cmd_trace_add_span(phase_row *row, const trace_event *e)
{
    row->ns[row->count++] = (uint64_t)(e->took_us * 1000);
    row->bad += strcmp(e->outcome, "FANIN_OK") != 0;
}

static void make_rows(trace_options *o)
{
    const trace_event **spans =
        output_require(calloc(o->events.count + 1, sizeof(trace_event *)));
    size_t count = 0;
    for (size_t i = 0; i < o->events.count; i++) {
        if (o->pull == 0 || o->events.all[i].n == (size_t)o->pull) {
            spans[count++] = &o->events.all[i];
        }
    }
    qsort(spans, count, sizeof(trace_event *), by_phase);
    o->rows = output_require(calloc(count + 1, sizeof *o->rows));
    o->ns = output_require(calloc(count + 1, sizeof *o->ns));
    for (size_t i = 0; i < count; i++) {
        phase_row *last = o->count > 0 ? &o->rows[o->count - 1] : NULL;
        if (last == NULL || last->rank != spans[i]->rank ||
            strcmp(last->name, spans[i]->name) != 0) {
            last = &o->rows[o->count++];
            *last = (phase_row){.name = spans[i]->name,
                                .rank = spans[i]->rank,
                                .first = spans[i],
                                .ns = &o->ns[i]};
        }
        cmd_trace_add_span(last, spans[i]);
    }
    free(spans);
    qsort(o->rows, o->count, sizeof *o->rows, cmd_trace_by_rank);
    for (size_t i = 0; i < o->count; i++) {
        o->rows[i].figure = stats_figure_of(o->rows[i].ns, o->rows[i].count);
    }
    mark_slowest(o);
}

/* ------------------------------------------------------------------------ telling */

static void tell_laggard(const phase_row *row)
{
    if (row == NULL) {
        return;
    }
    char times[48] = "";
    if (row->others > 0) {
        snprintf(times, sizeof times, ", %.1f times as long as",
                 (double)row->figure.median / (double)row->others);
    }
    terminal_print("slowest: rank %d, %s in %s%s the %s of the other ranks: look at "
                   "its host's network and CPU",
                   row->rank, output_duration(row->figure.median).s, row->name,
                   row->others > 0 ? times : ", against",
                   output_duration(row->others).s);
}

static void cmd_trace_tell_text(const trace_options *o)
{
    struct libscols_table *table = output_table("RANK PHASE N> MEDIAN> P90> MAX> NOTE");
    const trace_event *longest = trace_events_pull(&o->events, (size_t)o->pull);
    terminal_print("%zu pulls of %zu processes", o->events.pulls, o->events.n_files);
    if (longest != NULL) {
        terminal_print("longest: number %zu, %s, %s, %s", longest->n, longest->about,
                       output_duration((uint64_t)(longest->took_us * 1000)).s,
                       longest->outcome);
    }
    tell_laggard(laggard(o));
    for (size_t i = 0; i < o->count; i++) {
        const phase_row *row = &o->rows[i];
        char bad[40] = "";
        if (row->bad > 0) {
            snprintf(bad, sizeof bad, "%u not good", row->bad);
        }
        char note[64];
        snprintf(note, sizeof note, "%s%s%s", row->slowest ? "slowest" : "",
                 row->slowest && row->bad > 0 ? ", " : "", bad);
        output_row(table, NULL,
                   row->rank == TRACE_RANK_UNKNOWN ? "?"
                   : row->rank < 0                 ? "-"
                                   : output_number((uint64_t)row->rank).s,
                   row->name, output_number(row->count).s,
                   output_duration(row->figure.median).s,
                   output_duration(row->figure.p90).s,
                   output_duration(row->figure.most).s, note);
    }
    output_print(table);
    if (o->events.lost > 0) {
        terminal_print("%lld spans found no room", (long long)o->events.lost);
    }
}

static json_t *laggard_json(const phase_row *row)
{
    return row == NULL
               ? json_null()
               : output_object("rank", output_rank(row->rank), "phase",
                               output_string(row->name), "median_ns",
                               output_u64(row->figure.median), "others_median_ns",
                               output_u64(row->others), NULL);
}

static void cmd_trace_tell_json(const trace_options *o)
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
                              output_u64((uint64_t)o->events.lost), "slowest",
                              laggard_json(laggard(o)), "phases", list, NULL));
}

static int write_files(const trace_options *o, const trace_event *whole)
{
    const char *const paths[] = {o->svg, o->merge};
    int code = 0;
    for (int i = 0; i < 2 && code == 0; i++) {
        char *text = NULL;
        size_t size = 0;
        fanin_error error = FANIN_ERROR_INIT;
        if (paths[i] == NULL) {
            continue;
        }
        FILE *stream = output_require(open_memstream(&text, &size));
        if (i == 0) {
            trace_picture(&o->events, whole, stream);
        } else {
            trace_events_merge(&o->events, stream);
        }
        output_require(fclose(stream) == 0 ? text : NULL);
        if (whole_file_write(paths[i], text, size, &error) != FANIN_OK) {
            code = failure_report("cannot write the results", &error);
        }
        free(text);
    }
    return code;
}

static int cmd_trace_tell(trace_options *o, const char *name)
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
        (o->common.json ? cmd_trace_tell_json : cmd_trace_tell_text)(o);
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
        code = cmd_trace_tell(&o, self->name);
    }
    trace_events_free(&o.events);
    free(o.ns);
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
        "and of each rank (?: one that has not said which it is), with the slowest "
        "rank of a phase marked. Files of several "
        "processes\n"
        "are laid on one clock: that of the host, or of other hosts by the time of "
        "day.",
    .run = run,
};
