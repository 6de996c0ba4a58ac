/* SPDX-License-Identifier: Apache-2.0 */
#include "bench/trace_events.h"
#include "fetch/failure.h"
#include "fetch/output.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>

/* Above the numbers that a kernel gives processes: of a further file whose process has the same. */
#define PROCESSES 10000000
/* Some thirty years, of spans and clocks: nanoseconds of more are no number of 64 bits. */
#define LONGEST_US 1e15

static int events_refuse(const char *path, const char *why)
{
    return failure_local("cannot read the trace", FANIN_ERR_ARGUMENT,
                         "give files of --trace or FANIN_TRACE", "%s: %s", path, why);
}

static const char *events_text_of(const json_t *object, const char *name)
{
    const char *text = json_string_value(json_object_get(object, name));
    return text != NULL ? text : "";
}

static json_int_t number_of(const json_t *object, const char *name)
{
    return json_integer_value(json_object_get(object, name));
}

/* ------------------------------------------------------------------------ clocks */

/* Times of day less the clock's, in microseconds: when the clock began. */
static double began_at(const json_t *about)
{
    return ((double)strtoll(events_text_of(about, "realtime_ns"), NULL, 10) -
            (double)strtoll(events_text_of(about, "monotonic_ns"), NULL, 10)) /
           1e3;
}

/* Files of one boot have one clock; of others the time of day says how they lie. */
static double lag(const json_t *first, const json_t *file)
{
    const json_t *a = json_object_get(first, "otherData");
    const json_t *b = json_object_get(file, "otherData");
    bool same = strcmp(events_text_of(a, "boot_id"), events_text_of(b, "boot_id")) == 0;
    return same ? 0 : began_at(b) - began_at(a);
}

/* ------------------------------------------------------------------------ reading */

static bool events_add_span(trace_events *e, const json_t *span, size_t file)
{
    const json_t *arguments = json_object_get(span, "args");
    const json_t *rank = json_object_get(arguments, "rank");
    trace_event one = {.name = events_text_of(span, "name"),
                       .outcome = events_text_of(arguments, "outcome"),
                       .about = events_text_of(arguments, "about"),
                       .began_us = json_number_value(json_object_get(span, "ts")) +
                                   e->later_us[file],
                       .took_us = json_number_value(json_object_get(span, "dur")),
                       .pull = number_of(arguments, "pull"),
                       .bytes = number_of(arguments, "bytes"),
                       .rank = -1,
                       .trainer = strcmp(events_text_of(span, "cat"), "trainer") == 0,
                       .file = file};
    if (one.name[0] == '\0' || one.took_us < 0 || one.took_us > LONGEST_US ||
        one.bytes < 0 || one.began_us < -LONGEST_US || one.began_us > LONGEST_US ||
        !json_is_number(json_object_get(span, "ts"))) {
        return false;
    }
    if (json_is_null(rank)) {
        one.rank = TRACE_RANK_UNKNOWN;
    } else if (json_is_integer(rank) && json_integer_value(rank) >= 0 &&
               json_integer_value(rank) < 65536) {
        one.rank = (int)json_integer_value(rank);
    }
    e->all = output_room(e->all, e->count, &e->capacity, sizeof *e->all);
    e->all[e->count++] = one;
    return true;
}

/* Spans that found no room. */
static bool add_lost(trace_events *e, const json_t *event)
{
    json_int_t spans = number_of(json_object_get(event, "args"), "spans");
    return spans >= 0 && !__builtin_add_overflow(e->lost, spans, &e->lost);
}

static bool events_add_file(trace_events *e, json_t *root, size_t file)
{
    const json_t *list = json_object_get(root, "traceEvents");
    size_t i;
    json_t *event;
    if (!json_is_array(list) || !json_is_object(json_object_get(root, "otherData"))) {
        return false;
    }
    e->later_us[file] = lag(e->files[0], root);
    json_array_foreach(list, i, event)
    {
        const char *kind = events_text_of(event, "ph");
        if (strcmp(kind, "X") == 0 && !events_add_span(e, event, file)) {
            return false;
        }
        if (strcmp(kind, "i") == 0 && !add_lost(e, event)) {
            return false;
        }
    }
    return true;
}

static bool is_whole(const trace_event *e)
{
    return e->rank < 0 &&
           (strcmp(e->name, "pull") == 0 || strcmp(e->name, "open") == 0);
}

static int by_pull(const void *a, const void *b)
{
    const trace_event *x = *(trace_event *const *)a, *y = *(trace_event *const *)b;
    if (x->file != y->file) {
        return x->file < y->file ? -1 : 1;
    }
    return (x->pull > y->pull) - (x->pull < y->pull);
}

/* Pulls are counted over all files; their parts have their numbers. */
static void number_pulls(trace_events *e)
{
    trace_event **wholes = output_require(calloc(e->count + 1, sizeof(trace_event *)));
    for (size_t i = 0; i < e->count; i++) {
        if (is_whole(&e->all[i])) {
            wholes[e->pulls++] = &e->all[i];
            e->all[i].n = e->pulls;
        }
    }
    qsort(wholes, e->pulls, sizeof(trace_event *), by_pull);
    for (size_t i = 0; i < e->count; i++) {
        const trace_event *one = &e->all[i];
        trace_event **whole =
            bsearch(&one, wholes, e->pulls, sizeof(trace_event *), by_pull);
        if (whole != NULL) {
            e->all[i].n = (*whole)->n;
        }
    }
    free(wholes);
}

int trace_events_read(const char *const *paths, size_t count, trace_events *out)
{
    out->files = output_require(calloc(count, sizeof *out->files));
    out->later_us = output_require(calloc(count, sizeof *out->later_us));
    for (size_t i = 0; i < count; i++) {
        json_error_t why;
        int descriptor = open(paths[i], O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
        if (descriptor < 0) {
            return events_refuse(paths[i], strerror(errno));
        }
        out->files[i] = json_file_read(descriptor, &why);
        out->n_files = i + 1;
        if (out->files[i] == NULL) {
            return events_refuse(paths[i], why.text);
        }
        if (!events_add_file(out, out->files[i], i)) {
            return events_refuse(paths[i], "it is no trace of this kind");
        }
    }
    number_pulls(out);
    return 0;
}

void trace_events_free(trace_events *events)
{
    for (size_t i = 0; i < events->n_files; i++) {
        json_decref(events->files[i]);
    }
    free(events->files);
    free(events->later_us);
    free(events->all);
    *events = (trace_events){0};
}

const trace_event *trace_events_pull(const trace_events *events, size_t n)
{
    const trace_event *found = NULL;
    for (size_t i = 0; i < events->count; i++) {
        const trace_event *e = &events->all[i];
        if (!is_whole(e) || (n != 0 && e->n != n)) {
            continue;
        }
        if (found == NULL || e->took_us > found->took_us) {
            found = e;
        }
    }
    return found;
}

/* ------------------------------------------------------------------------ writing */

/* Processes of two hosts, or of two containers, may have one number. */
static json_int_t shown_pid(const trace_events *events, size_t file, json_int_t pid)
{
    for (size_t i = 0; i < file; i++) {
        const json_t *about = json_object_get(events->files[i], "otherData");
        if (number_of(about, "pid") == pid) {
            return pid + (json_int_t)file * PROCESSES;
        }
    }
    return pid;
}

void trace_events_merge(const trace_events *events, FILE *out)
{
    const char *between = "";
    fputs("{\"displayTimeUnit\":\"ms\",\"otherData\":", out);
    json_dumpf(json_object_get(events->files[0], "otherData"), out,
               JSON_COMPACT | JSON_ENCODE_ANY);
    fputs(",\"traceEvents\":[", out);
    for (size_t i = 0; i < events->n_files; i++) {
        const json_t *list = json_object_get(events->files[i], "traceEvents");
        size_t at;
        json_t *event;
        json_array_foreach(list, at, event)
        {
            json_t *ts = json_object_get(event, "ts");
            json_t *pid = json_object_get(event, "pid");
            if (json_is_real(ts)) {
                json_real_set(ts, json_real_value(ts) + events->later_us[i]);
            }
            if (json_is_integer(pid)) {
                json_integer_set(pid, shown_pid(events, i, json_integer_value(pid)));
            }
            fprintf(out, "%s\n", between);
            json_dumpf(event, out,
                       JSON_COMPACT | JSON_ENCODE_ANY | JSON_REAL_PRECISION(17));
            between = ",";
        }
    }
    fputs("\n]}\n", out);
}
