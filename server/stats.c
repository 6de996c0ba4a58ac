/* SPDX-License-Identifier: Apache-2.0 */
/* Counters as a struct and as Prometheus text. */
#include "control/control.h"
#include "counters.h"
#include "publish/lease.h"
#include "stream/stream.h"
#include "text.h"
#include "versioned.h"

#include <inttypes.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

static void collect(fanin_server *s, fanin_server_stats *out)
{
    pthread_mutex_lock(&s->lock);
    *out = s->stats;
    out->leases = s->n_leases;
    out->publications = out->tensors = out->publications_paused = 0;
    for (size_t i = 0; i < s->n_publications; i++) {
        if (!s->publications[i]->present)
            continue;
        out->publications++;
        out->publications_paused += s->publications[i]->paused;
        out->tensors += s->publications[i]->n_shards;
    }
    pthread_mutex_unlock(&s->lock);
    out->session_memory = atomic_load(&s->memory);
    out->requests_delayed = atomic_load(&s->rests);
    out->log_lines_left_out = atomic_load(&s->unsaid);
    out->ipc_mappers = atomic_load(&s->registrar.n_mappers);
    out->control_cpu_ns = control_cpu_ns(s);
    out->data_cpu_ns = stream_cpu_ns(s);
}

fanin_status fanin_server_get_stats(fanin_server *server, fanin_server_stats *stats)
{
    fanin_status status = server_check(server, NULL);
    if (status != FANIN_OK)
        return status;
    if (!stats || stats->struct_size < sizeof stats->struct_size)
        return FANIN_ERR_ARGUMENT;
    fanin_server_stats now;
    collect(server, &now);
    versioned_write(stats, &now, sizeof now);
    return FANIN_OK;
}

/* ---------------------------------------------------------------- Prometheus */

typedef struct metric {
    const char *name, *label; /**< NULL: none */
    size_t at;                /**< in fanin_server_stats */
    const char *help;         /**< "": as before */
} metric;

#define OWN_METRIC(member, name, label, help)                                          \
    {name, label, offsetof(fanin_server_stats, member), help},
#define METRIC(key, ...) OWN_METRIC(__VA_ARGS__)
static const metric metrics[] = {COUNTERS(METRIC, OWN_METRIC, COUNTER_NOT_SHOWN)};

static void head(text *t, const char *name, const char *help)
{
    size_t length = strlen(name);
    bool counter = length > 6 && strcmp(name + length - 6, "_total") == 0;
    text_add(t, "# HELP %s %s\n# TYPE %s %s\n", name, help, name,
             counter ? "counter" : "gauge");
}

/* The end of a line. */
static void add_value(text *t, const char *name, uint64_t value)
{
    if (strstr(name, "_seconds"))
        text_add(t, " %" PRIu64 ".%09" PRIu64 "\n", value / 1000000000,
                 value % 1000000000);
    else
        text_add(t, " %" PRIu64 "\n", value);
}

static void add_metrics(text *t, const fanin_server_stats *s)
{
    for (size_t i = 0; i < sizeof metrics / sizeof *metrics; i++) {
        const metric *m = &metrics[i];
        uint64_t value;
        memcpy(&value, (const char *)s + m->at, sizeof value);
        if (!m->name)
            continue;
        if (m->help[0])
            head(t, m->name, m->help);
        text_add(t, m->label ? "%s{%s}" : "%s", m->name, m->label);
        add_value(t, m->name, value);
    }
}

static void add_reads(text *t, const fanin_server_stats *s)
{
    static const char name[] = "fanin_read_bytes_total";
    const struct {
        const char *path;
        uint64_t bytes;
    } reads[] = {{"stream", s->bytes_streamed - s->bytes_tls},
                 {"tls", s->bytes_tls},
                 {"cma", s->bytes_cma},
                 {"rdma", s->bytes_rdma},
                 {"cuda_ipc", s->bytes_cuda_ipc}};
    head(t, name,
         "Tensor bytes read, by path; stream and tls as sent, the others as readers "
         "told.");
    for (size_t i = 0; i < sizeof reads / sizeof *reads; i++)
        text_add(t, "%s{path=\"%s\"} %" PRIu64 "\n", name, reads[i].path,
                 reads[i].bytes);
}

/* Cumulative, as histograms are there. */
static void add_drain_waits(text *t, const fanin_server_stats *s)
{
    static const char name[] = "fanin_drain_seconds";
    uint64_t count = 0, bound = DRAIN_BUCKET_NS;
    text_add(t,
             "# HELP %s Updates and pauses by how long they waited for readers.\n"
             "# TYPE %s histogram\n",
             name, name);
    for (size_t i = 0; i < FANIN_DRAIN_BUCKETS; i++) {
        count += s->drain_waits[i];
        if (i + 1 < FANIN_DRAIN_BUCKETS)
            text_add(t, "%s_bucket{le=\"%g\"} %" PRIu64 "\n", name, (double)bound / 1e9,
                     count);
        bound = drain_bound_after(bound);
    }
    text_add(t, "%s_bucket{le=\"+Inf\"} %" PRIu64 "\n%s_sum", name, count, name);
    add_value(t, name, s->drain_wait_ns_total);
    text_add(t, "%s_count %" PRIu64 "\n", name, count);
}

/* Who it was is made of digits and dots, or of a few words. */
static void add_held_up(text *t, const fanin_server_stats *s)
{
    static const char name[] = "fanin_held_up_seconds_max";
    if (!s->held_up_by[0])
        return;
    head(t, name, "Longest time that one peer's leases held an update up, and whose.");
    text_add(t, "%s{peer=\"%s\"}", name, s->held_up_by);
    add_value(t, name, s->held_up_ns_max);
}

/* ---------------------------------------------------------- each publication */

typedef struct row {
    char name[PUBLICATION_NAME_SIZE];
    bool has_step;
    publication_state state;
    uint64_t step, committed_unix_ns;
} row;

/* *rows_out is the caller's. */
static fanin_status copy_rows(fanin_server *s, row **rows_out, size_t *count_out)
{
    size_t count = 0;
    pthread_mutex_lock(&s->lock);
    row *rows = calloc(s->n_publications + 1, sizeof *rows);
    for (size_t i = 0; rows && i < s->n_publications; i++) {
        const publication *p = s->publications[i];
        if (!p->present)
            continue;
        row *r = &rows[count++];
        *r = (row){.has_step = p->has_step,
                   .state = p->state,
                   .step = p->step,
                   .committed_unix_ns = p->committed_unix_ns};
        memcpy(r->name, p->name, sizeof r->name);
    }
    pthread_mutex_unlock(&s->lock);
    *rows_out = rows;
    *count_out = count;
    return rows ? FANIN_OK : FANIN_ERR_MEMORY;
}

/* Names of publications need no escapes: publication_name_check(). */
static void labels(text *t, const char *name, const fanin_server *s, const row *r)
{
    text_add(t, "%s{publication=\"%s\",rank=\"%u\"", name, r->name, (unsigned)s->rank);
}

/* A number, at @p at in its row, of each publication that has a step. */
static void add_numbers(text *t, const fanin_server *s, const row *rows, size_t count,
                        const char *name, size_t at, const char *help)
{
    head(t, name, help);
    for (size_t i = 0; i < count; i++) {
        uint64_t value;
        if (!rows[i].has_step)
            continue;
        memcpy(&value, (const char *)&rows[i] + at, sizeof value);
        labels(t, name, s, &rows[i]);
        text_add(t, "}");
        add_value(t, name, value);
    }
}

static void add_publications(text *t, const fanin_server *s, const row *rows,
                             size_t count)
{
    static const char state_metric[] = "fanin_publication_state";
    add_numbers(t, s, rows, count, "fanin_publication_step", offsetof(row, step),
                "The last step that was committed.");
    head(t, state_metric,
         "1 for the state that the publication has, 0 for the others.");
    for (size_t i = 0; i < count; i++)
        for (int state = STATE_UNPUBLISHED; state <= STATE_PAUSED; state++) {
            labels(t, state_metric, s, &rows[i]);
            text_add(t, ",state=\"%s\"} %d\n", state_name((publication_state)state),
                     rows[i].state == (publication_state)state);
        }
    add_numbers(
        t, s, rows, count, "fanin_publication_commit_timestamp_seconds",
        offsetof(row, committed_unix_ns),
        "When the last step was committed, in seconds since 1970 by this host's "
        "clock.");
}

fanin_status fanin_server_prometheus(fanin_server *server, char *out, size_t capacity,
                                     size_t *length_out)
{
    fanin_status status = server_check(server, NULL);
    if (status != FANIN_OK)
        return status;
    if (!out && capacity > 0)
        return FANIN_ERR_ARGUMENT;
    fanin_server_stats now;
    row *rows;
    size_t count;
    status = copy_rows(server, &rows, &count);
    if (status != FANIN_OK)
        return status;
    collect(server, &now);
    text t = text_in(out, capacity);
    add_metrics(&t, &now);
    add_reads(&t, &now);
    add_held_up(&t, &now);
    add_drain_waits(&t, &now);
    add_publications(&t, server, rows, count);
    free(rows);
    if (length_out)
        *length_out = t.used;
    return FANIN_OK;
}
