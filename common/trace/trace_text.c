/* SPDX-License-Identifier: Apache-2.0 */
#include "trace_text.h"

#include <inttypes.h>
#include <stdio.h>

/* Above every number that a kernel gives a thread. */
#define FIRST_ROW (UINT32_C(1) << 23)

static void tell_row(trace_file *f, pid_t pid, const trace_thread *t,
                     const trace_row *row, uint32_t shown, const char *about)
{
    char thread[40], address[2 * TRACE_ABOUT], who[2 * TRACE_ABOUT + 16];
    trace_escape(thread, sizeof thread, t->name);
    trace_escape(address, sizeof address, about);
    if (row->rank == -1)
        snprintf(who, sizeof who, "%s %u", thread, t->tid);
    else if (row->rank < 0)
        snprintf(who, sizeof who, "rank ? at %s", address);
    else if (t->tid == (uint32_t)pid)
        snprintf(who, sizeof who, "rank %d", (int)row->rank);
    else
        snprintf(who, sizeof who, "rank %d, thread %u", (int)row->rank, t->tid);
    trace_file_add(
        f,
        "{\"ph\":\"M\",\"name\":\"thread_name\",\"pid\":%d,\"tid\":%u,\"ts\":0,"
        "\"args\":{\"name\":\"%s\"}}",
        (int)pid, shown, who);
}

static void put_member(trace_file *f, const char *name, uint64_t value)
{
    trace_file_text(f, name);
    trace_file_number(f, value);
}

/* What the viewer shows beside the span: only what there is. */
static void put_arguments(trace_file *f, const trace_span *s)
{
    char about[2 * TRACE_ABOUT];
    trace_file_text(f, "\"args\":{\"outcome\":\"");
    trace_file_text(f, fanin_status_name(s->outcome));
    trace_file_text(f, "\"");
    if (s->place.pull > 0) {
        put_member(f, ",\"pull\":", s->place.pull);
        put_member(f, ",\"attempt\":", s->place.attempt);
    }
    if (s->rank >= 0)
        put_member(f, ",\"rank\":", (uint64_t)s->rank);
    else if (s->rank < -1)
        trace_file_text(f, ",\"rank\":null");
    if (s->step > 0)
        put_member(f, ",\"step\":", s->step);
    if (s->bytes > 0)
        put_member(f, ",\"bytes\":", s->bytes);
    if (s->scatter_ns > 0)
        put_member(f, ",\"scatter_ns\":", s->scatter_ns);
    if (s->about[0]) {
        trace_escape(about, sizeof about, s->about);
        trace_file_text(f, ",\"about\":\"");
        trace_file_text(f, about);
        trace_file_text(f, "\"");
    }
    trace_file_text(f, "}}");
}

static const char *color_of(const trace_span *s)
{
    if (s->outcome == FANIN_ERR_STALE)
        return ",\"cname\":\"bad\",";
    return s->outcome == FANIN_OK ? "," : ",\"cname\":\"terrible\",";
}

bool trace_text_span(trace_file *f, trace_rows *rows, pid_t pid,
                     const trace_thread *thread, const trace_span *s)
{
    bool is_new;
    const trace_row *row = trace_rows_find(rows, thread->number, s->rank, &is_new);
    if (!row)
        return false;
    uint32_t shown = s->rank == -1 ? thread->tid : FIRST_ROW + row->number;
    if (is_new)
        tell_row(f, pid, thread, row, shown, s->about);
    trace_file_begin(f);
    trace_file_text(f, "{\"ph\":\"X\",\"name\":\"");
    trace_file_text(f, trace_name_text(s->name));
    trace_file_text(f, s->name >= TRACE_BEGIN_UPDATE ? "\",\"cat\":\"trainer\""
                                                     : "\",\"cat\":\"pull\"");
    put_member(f, ",\"pid\":", (uint64_t)pid);
    put_member(f, ",\"tid\":", shown);
    trace_file_text(f, ",\"ts\":");
    trace_file_micros(f, s->began_ns);
    trace_file_text(f, ",\"dur\":");
    trace_file_micros(f, s->ended_ns > s->began_ns ? s->ended_ns - s->began_ns : 0);
    trace_file_text(f, color_of(s));
    put_arguments(f, s);
    return true;
}

void trace_text_lost(trace_file *f, pid_t pid, uint64_t at_ns, uint64_t spans)
{
    trace_file_add(f,
                   "{\"ph\":\"i\",\"s\":\"p\",\"name\":\"lost\",\"pid\":%d,\"tid\":%d,"
                   "\"ts\":%" PRIu64 ".%03u,\"args\":{\"spans\":%" PRIu64 "}}",
                   (int)pid, (int)pid, at_ns / 1000, (unsigned)(at_ns % 1000), spans);
}
