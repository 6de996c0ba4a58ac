/* SPDX-License-Identifier: Apache-2.0 */
#include "fetch/look_metrics.h"
#include "fetch/output.h"
#include "fetch/rank_states.h"

#include <inttypes.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

typedef struct page {
    FILE *out;
    const session *session;
    const look *look;
} page;

static void head(const page *g, const char *name, const char *type, const char *help)
{
    fprintf(g->out, "# HELP %s %s\n# TYPE %s %s\n", name, help, name, type);
}

/* The value of a label: what it is made of came from others. */
static void label(const page *g, const char *name, const char *value)
{
    fprintf(g->out, ",%s=\"", name);
    for (const char *p = value; *p != '\0'; p++) {
        bool plain = *p >= ' ' && *p <= '~' && *p != '"' && *p != '\\';
        fputc(plain ? *p : '_', g->out);
    }
    fputc('"', g->out);
}

/* "name{publication="lora:0",rank="3"", without the brace that closes it. */
static void begin(const page *g, const char *name, const look_rank *r)
{
    fprintf(g->out, "%s{publication=\"%s\",rank=\"", name, g->session->publication);
    if (r->at.rank >= 0) {
        fprintf(g->out, "%d", (int)r->at.rank);
    }
    fputc('"', g->out);
}

/* Counts in nanoseconds are told in seconds. */
static void value(const page *g, const char *name, uint64_t number)
{
    if (strstr(name, "_seconds") != NULL) {
        fprintf(g->out, "} %" PRIu64 ".%09" PRIu64 "\n", number / 1000000000,
                number % 1000000000);
    } else {
        fprintf(g->out, "} %" PRIu64 "\n", number);
    }
}

/* ------------------------------------------------------------------- of the ranks */

typedef struct counter {
    const char *name, *result; /**< result NULL: no label */
    size_t at;                 /**< in fanin_rank_stats */
    const char *help;          /**< NULL: one more of the same name */
} counter;

#define AT(field) offsetof(fanin_rank_stats, field)

static const counter counters[] = {
    {"fanin_pulls_total", "good", AT(pulls_good), "Leases that ended, by result."},
    {"fanin_pulls_total", "stale", AT(pulls_stale), NULL},
    {"fanin_pulls_total", "abandoned", AT(pulls_abandoned), NULL},
    {"fanin_begins_total", "granted", AT(begins_granted),
     "Requests for a lease, by result."},
    {"fanin_begins_total", "refused", AT(begins_refused), NULL},
    {"fanin_streamed_bytes_total", NULL, AT(bytes_streamed),
     "Tensor bytes sent on data connections."},
    {"fanin_updates_total", NULL, AT(updates), "Updates that began."},
    {"fanin_commits_total", NULL, AT(commits), "Steps committed."},
    {"fanin_control_cpu_seconds_total", NULL, AT(cpu_ns),
     "CPU time of the thread that serves control connections."},
    {"fanin_data_cpu_seconds_total", NULL, AT(data_cpu_ns),
     "CPU time of the threads that send tensors on data connections."},
    {"fanin_leases", NULL, AT(leases), "Leases that readers hold now."},
    {"fanin_control_sessions", NULL, AT(sessions), "Control connections now."},
    {"fanin_sends_waiting", NULL, AT(sends_waiting),
     "Data connections now with bytes that the peer, or the network, does not take "
     "yet."},
};

static bool counted(const look_rank *r)
{
    return look_answered(r) && r->stats.counted;
}

static void add_counters(const page *g)
{
    for (size_t i = 0; i < sizeof counters / sizeof *counters; i++) {
        const counter *c = &counters[i];
        if (c->help != NULL) {
            head(g, c->name, strstr(c->name, "_total") != NULL ? "counter" : "gauge",
                 c->help);
        }
        for (uint32_t k = 0; k < g->look->count; k++) {
            const look_rank *r = &g->look->ranks[k];
            uint64_t number;
            memcpy(&number, (const char *)&r->stats + c->at, sizeof number);
            if (counted(r)) {
                begin(g, c->name, r);
                if (c->result != NULL) {
                    label(g, "result", c->result);
                }
                value(g, c->name, number);
            }
        }
    }
}

static void add_reads(const page *g)
{
    static const char name[] = "fanin_read_bytes_total";
    head(g, name, "counter",
         "Tensor bytes read, by path; stream and tls as sent, the others as readers "
         "told.");
    for (uint32_t k = 0; k < g->look->count; k++) {
        const look_rank *r = &g->look->ranks[k];
        look_read reads[LOOK_PATHS];
        look_reads(&r->stats, reads);
        for (size_t i = 0; i < LOOK_PATHS && counted(r); i++) {
            begin(g, name, r);
            label(g, "path", reads[i].path);
            value(g, name, reads[i].bytes);
        }
    }
}

static void add_drains(const page *g)
{
    static const char name[] = "fanin_drain_seconds";
    head(g, name, "histogram",
         "Updates and pauses by how long they waited for readers.");
    for (uint32_t k = 0; k < g->look->count; k++) {
        const look_rank *r = &g->look->ranks[k];
        uint64_t count = 0, bound = 100000;
        for (size_t i = 0; i < FANIN_DRAIN_BUCKETS && counted(r); i++) {
            count += r->stats.drain_waits[i];
            begin(g, "fanin_drain_seconds_bucket", r);
            if (i + 1 < FANIN_DRAIN_BUCKETS) {
                fprintf(g->out, ",le=\"%g\"} %" PRIu64 "\n", (double)bound / 1e9,
                        count);
            } else {
                fprintf(g->out, ",le=\"+Inf\"} %" PRIu64 "\n", count);
            }
            bound = look_drain_bound_after(i, bound);
        }
        if (counted(r)) {
            begin(g, "fanin_drain_seconds_sum", r);
            value(g, name, r->stats.drain_wait_ns_total);
            begin(g, "fanin_drain_seconds_count", r);
            value(g, "", count);
        }
    }
}

/* ------------------------------------------------------------- of the publication */

static void add_up(const page *g)
{
    head(g, "fanin_rank_up", "gauge", "Whether the rank answered.");
    for (uint32_t k = 0; k < g->look->count; k++) {
        const look_rank *r = &g->look->ranks[k];
        begin(g, "fanin_rank_up", r);
        label(g, "address", r->at.address);
        value(g, "", look_answered(r));
    }
}

static void add_states(const page *g)
{
    static const char name[] = "fanin_publication_state";
    head(g, name, "gauge",
         "1 for the state that the publication has, 0 for the others.");
    for (uint32_t k = 0; k < g->look->count; k++) {
        const look_rank *r = &g->look->ranks[k];
        for (int32_t state = FANIN_PUBLICATION_UNPUBLISHED;
             look_answered(r) && r->there && state <= FANIN_PUBLICATION_PAUSED;
             state++) {
            begin(g, name, r);
            label(g, "state", state_name(state));
            value(g, "", r->is.state == state);
        }
    }
}

static void add_steps(const page *g)
{
    static const char step[] = "fanin_publication_step";
    static const char at[] = "fanin_publication_commit_timestamp_seconds";
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    uint64_t now_ns =
        (uint64_t)now.tv_sec * UINT64_C(1000000000) + (uint64_t)now.tv_nsec;
    head(g, step, "gauge", "The last step that was committed.");
    for (uint32_t k = 0; k < g->look->count; k++) {
        const look_rank *r = &g->look->ranks[k];
        if (look_answered(r) && r->there && r->is.commit_age_ms > 0) {
            begin(g, step, r);
            value(g, step, r->is.step);
        }
    }
    head(g, at, "gauge",
         "When the last step was committed, in seconds since 1970 by this host's "
         "clock.");
    for (uint32_t k = 0; k < g->look->count; k++) {
        const look_rank *r = &g->look->ranks[k];
        if (look_answered(r) && r->there && r->is.commit_age_ms > 0) {
            begin(g, at, r);
            value(g, at, now_ns - r->is.commit_age_ms * 1000000);
        }
    }
}

static void add_leases(const page *g)
{
    static const char age[] = "fanin_lease_age_seconds";
    static const char holder[] = "fanin_lease_holder_age_seconds";
    head(g, age, "gauge", "How long the oldest lease has been held; 0: there is none.");
    for (uint32_t k = 0; k < g->look->count; k++) {
        const look_rank *r = &g->look->ranks[k];
        if (counted(r) && r->there) {
            begin(g, age, r);
            value(g, age, r->is.lease_age_ms * 1000000);
        }
    }
    head(g, holder, "gauge",
         "How long a reader has held leases, by where it is; told to whom "
         "the rank trusts, the oldest 16.");
    for (uint32_t k = 0; k < g->look->count; k++) {
        const look_rank *r = &g->look->ranks[k];
        for (size_t i = 0; i < r->n_holders; i++) {
            begin(g, holder, r);
            label(g, "holder", r->holders[i].who);
            fprintf(g->out, ",nth=\"%zu\"", i);
            value(g, holder, r->holders[i].age_ms * 1000000);
        }
    }
}

static void add_problems(const page *g, const problems *p)
{
    head(g, "fanin_problems", "gauge",
         "What nixl-fetch status finds wrong, by its kind: how many times.");
    for (size_t first = 0; first < p->count; first++) {
        size_t same = 0;
        bool told = false;
        for (size_t i = 0; i < p->count; i++) {
            bool is = strcmp(p->list[i].kind, p->list[first].kind) == 0;
            told = told || (is && i < first);
            same += is;
        }
        if (!told) {
            fprintf(g->out, "fanin_problems{publication=\"%s\",kind=\"%s\"} %zu\n",
                    g->session->publication, p->list[first].kind, same);
        }
    }
}

char *look_metrics(const session *s, const look *l, const problems *p)
{
    char *text = NULL;
    size_t size = 0;
    page g = {output_require(open_memstream(&text, &size)), s, l};
    add_up(&g);
    add_steps(&g);
    add_states(&g);
    add_leases(&g);
    add_counters(&g);
    add_reads(&g);
    add_drains(&g);
    add_problems(&g, p);
    if (fclose(g.out) != 0) {
        output_require(NULL);
    }
    return text;
}
