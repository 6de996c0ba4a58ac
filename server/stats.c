/* SPDX-License-Identifier: Apache-2.0 */
/* Counters as a struct and as Prometheus text. */
#include "publish/publication.h"
#include "text.h"
#include "versioned.h"

#include <stdio.h>
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
    out->ipc_mappers = atomic_load(&s->registrar.n_mappers);
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

static void head(text *t, const char *name, const char *type, const char *help)
{
    text_add(t, "# HELP %s %s\n# TYPE %s %s\n", name, help, name, type);
}

static void number(text *t, const char *name, const char *type, const char *help,
                   uint64_t value)
{
    head(t, name, type, help);
    text_add(t, "%s %llu\n", name, (unsigned long long)value);
}

static void seconds(text *t, const char *name, const char *type, const char *help,
                    uint64_t ns)
{
    head(t, name, type, help);
    text_add(t, "%s %llu.%09llu\n", name, (unsigned long long)(ns / 1000000000),
             (unsigned long long)(ns % 1000000000));
}

typedef struct labelled {
    const char *value;
    uint64_t count;
} labelled;

static void family(text *t, const char *name, const char *help, const char *label,
                   const labelled *rows, size_t n_rows)
{
    head(t, name, "counter", help);
    for (size_t i = 0; i < n_rows; i++)
        text_add(t, "%s{%s=\"%s\"} %llu\n", name, label, rows[i].value,
                 (unsigned long long)rows[i].count);
}

#define FAMILY(name, help, label, ...)                                                 \
    family(t, name, help, label, (const labelled[]){__VA_ARGS__},                      \
           sizeof((const labelled[]){__VA_ARGS__}) / sizeof(labelled))

static void add_pulls(text *t, const fanin_server_stats *s)
{
    FAMILY("fanin_pulls_total", "Leases that ended, by result.", "result",
           {"good", s->pulls_good}, {"stale", s->pulls_stale},
           {"abandoned", s->pulls_abandoned});
    FAMILY("fanin_begins_total", "Requests for a lease, by result.", "result",
           {"granted", s->begins_granted}, {"refused", s->begins_refused});
    FAMILY("fanin_reads_total", "Read requests on data connections, by result.",
           "result", {"streamed", s->reads_streamed}, {"refused", s->reads_refused});
    number(t, "fanin_streamed_bytes_total", "counter",
           "Tensor bytes sent on data connections; one-sided reads are not seen.",
           s->bytes_streamed);
}

static void add_updates(text *t, const fanin_server_stats *s)
{
    number(t, "fanin_updates_total", "counter", "Updates that began.", s->updates);
    number(t, "fanin_commits_total", "counter", "Steps committed.", s->commits);
    number(
        t, "fanin_commits_withdrawn_total", "counter",
        "Steps that were never published because an update began before their stream "
        "had got there.",
        s->commits_withdrawn);
    number(t, "fanin_aborts_total", "counter", "Updates aborted.", s->aborts);
    seconds(t, "fanin_drain_wait_seconds_total", "counter",
            "Time that begin_update waited for readers.", s->drain_wait_ns_total);
    seconds(t, "fanin_drain_wait_seconds_max", "gauge",
            "Longest time that a begin_update waited for readers.",
            s->drain_wait_ns_max);
    number(
        t, "fanin_drains_expired_total", "counter",
        "Updates that began when the lease time was over, not when readers were done.",
        s->drains_expired);
}

static void add_sessions(text *t, const fanin_server_stats *s)
{
    number(t, "fanin_connections_opened_total", "counter", "Connections admitted.",
           s->sessions_opened);
    number(t, "fanin_connections_refused_total", "counter", "Connections refused.",
           s->sessions_refused);
    number(t, "fanin_protocol_errors_total", "counter",
           "Messages that the protocol does not allow.", s->protocol_errors);
    number(t, "fanin_connections", "gauge", "Control and data connections now.",
           s->sessions);
    number(t, "fanin_leases", "gauge", "Leases that readers hold now.", s->leases);
    number(t, "fanin_publications", "gauge", "Publications now.", s->publications);
    number(t, "fanin_publications_paused", "gauge",
           "Publications between pause and resume now.", s->publications_paused);
    number(t, "fanin_tensors", "gauge", "Shards registered now.", s->tensors);
    number(t, "fanin_connection_memory_bytes", "gauge",
           "Memory that all connections take now.", s->session_memory);
    number(t, "fanin_ipc_mappers", "gauge",
           "Sessions that were given keys to map CUDA memory.", s->ipc_mappers);
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

static void add_states(text *t, const fanin_server *s, const row *rows, size_t count)
{
    head(t, "fanin_publication_state", "gauge",
         "1 for the state that the publication has, 0 for the others.");
    for (size_t i = 0; i < count; i++) {
        for (int state = STATE_UNPUBLISHED; state <= STATE_PAUSED; state++) {
            labels(t, "fanin_publication_state", s, &rows[i]);
            text_add(t, ",state=\"%s\"} %d\n", state_name((publication_state)state),
                     rows[i].state == (publication_state)state);
        }
    }
}

static void add_publications(text *t, const fanin_server *s, const row *rows,
                             size_t count)
{
    head(t, "fanin_publication_step", "gauge", "The last step that was committed.");
    for (size_t i = 0; i < count; i++) {
        if (!rows[i].has_step)
            continue;
        labels(t, "fanin_publication_step", s, &rows[i]);
        text_add(t, "} %llu\n", (unsigned long long)rows[i].step);
    }
    add_states(t, s, rows, count);
    head(t, "fanin_publication_commit_timestamp_seconds", "gauge",
         "When the last step was committed, in seconds since 1970.");
    for (size_t i = 0; i < count; i++) {
        uint64_t ns = rows[i].committed_unix_ns;
        if (!rows[i].has_step)
            continue;
        labels(t, "fanin_publication_commit_timestamp_seconds", s, &rows[i]);
        text_add(t, "} %llu.%09llu\n", (unsigned long long)(ns / 1000000000),
                 (unsigned long long)(ns % 1000000000));
    }
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
    add_pulls(&t, &now);
    add_updates(&t, &now);
    add_sessions(&t, &now);
    add_publications(&t, server, rows, count);
    free(rows);
    if (length_out)
        *length_out = t.used;
    return FANIN_OK;
}
