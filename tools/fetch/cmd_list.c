/* SPDX-License-Identifier: Apache-2.0 */
#include "fetch/command.h"
#include "fetch/failure.h"
#include "fetch/interrupt.h"
#include "fetch/missing.h"
#include "fetch/output.h"
#include "fetch/session.h"
#include "fetch/shard_map.h"
#include "text.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ------------------------------------------------------------------- the map */

enum { BAR = 24 };

typedef struct share {
    uint64_t boxes, bytes, replica_bytes;
} share;

/* Of tensors whose boxes leave something out, or overlap. */
typedef struct fault {
    uint64_t bytes;
    size_t tensors;
    char *first; /**< name of the first one, NULL: none */
} fault;

typedef struct dealing {
    share *ranks; /**< by number */
    size_t count;
    uint64_t bytes; /**< of the tensors */
    fault gaps, overlaps;
} dealing;

static share *list_map_share_of(dealing *d, uint32_t rank)
{
    if (rank >= d->count) {
        d->ranks =
            output_require(realloc(d->ranks, ((size_t)rank + 1) * sizeof d->ranks[0]));
        memset(&d->ranks[d->count], 0, (rank + 1 - d->count) * sizeof d->ranks[0]);
        d->count = (size_t)rank + 1;
    }
    return &d->ranks[rank];
}

static void list_map_note(fault *f, const char *name, uint64_t bytes)
{
    f->bytes += bytes;
    f->tensors += bytes > 0;
    if (bytes > 0 && f->first == NULL)
        f->first = output_require(strdup(name));
}

static bool list_map_on_entry(void *cookie, const fanin_entry *e)
{
    dealing *d = cookie;
    const shard_faults faults = shard_faults_of(e);
    for (size_t i = 0; i < e->n_owners; i++) {
        share *s = list_map_share_of(d, e->owners[i].rank);
        s->boxes++;
        s->bytes += e->owners[i].bytes;
        s->replica_bytes += shard_original(e, i) != i ? e->owners[i].bytes : 0;
    }
    d->bytes += e->bytes;
    list_map_note(&d->gaps, e->name, faults.gaps);
    list_map_note(&d->overlaps, e->name, faults.overlaps);
    return !interrupt_requested();
}

static void print_fault(const char *what, const fault *f)
{
    if (f->tensors > 0)
        terminal_print("%s: %s in %zu tensors, the first %s", what,
                       output_bytes(f->bytes).s, f->tensors, f->first);
}

static void print(const dealing *d, const missing *absent)
{
    uint64_t most = 1;
    for (size_t i = 0; i < d->count; i++)
        most = d->ranks[i].bytes > most ? d->ranks[i].bytes : most;
    struct libscols_table *table = output_table("RANK> BOXES> BYTES> REPLICAS> SHARE");
    for (size_t i = 0; i < d->count; i++) {
        const share *s = &d->ranks[i];
        char bar[BAR + 1] = "";
        memset(bar, '#', (size_t)((double)s->bytes / (double)most * BAR));
        output_row(table, NULL, output_number(i).s, output_number(s->boxes).s,
                   output_bytes(s->bytes).s, output_bytes(s->replica_bytes).s, bar);
    }
    output_print(table);
    terminal_print("tensors: %s", output_bytes(d->bytes).s);
    print_fault("gaps, which no rank holds", &d->gaps);
    print_fault("overlaps that are no replicas", &d->overlaps);
    missing_print(absent);
}

static void list_map_print_json(const session *s, const dealing *d,
                                const missing *absent)
{
    json_t *ranks = json_array();
    for (size_t i = 0; i < d->count; i++) {
        const share *of = &d->ranks[i];
        json_array_append_new(
            ranks, output_object("rank", output_u64(i), "boxes", output_u64(of->boxes),
                                 "bytes", output_u64(of->bytes), "replica_bytes",
                                 output_u64(of->replica_bytes), NULL));
    }
    output_json(output_object("publication", output_string(s->publication), "bytes",
                              output_u64(d->bytes), "gap_bytes",
                              output_u64(d->gaps.bytes), "overlap_bytes",
                              output_u64(d->overlaps.bytes), "map", ranks, "missing",
                              missing_json(absent), NULL));
}

/* Tells of each rank what it holds, and what nobody does. The exit status. */
static int list_map(session *s, const common_options *common)
{
    fanin_error error = FANIN_ERROR_INIT;
    dealing d = {.ranks = NULL};
    missing absent;
    int code;
    if (fanin_client_catalog(s->client, s->publication, NULL, session_left_ms(s),
                             list_map_on_entry, &d, &error) != FANIN_OK) {
        code = session_failure(s, "cannot list keys", &error);
    } else {
        missing_gather(s, &absent);
        if (common->json)
            list_map_print_json(s, &d, &absent);
        else
            print(&d, &absent);
        code = missing_report(&absent);
        missing_free(&absent);
    }
    free(d.ranks);
    free(d.gaps.first);
    free(d.overlaps.first);
    return code;
}

/* One publication as one rank sees it. */
typedef struct view {
    fanin_publication_info is; /**< but for its name */
    char name[96];
} view;

typedef struct views {
    view *items;
    size_t count, capacity;
} views;

static bool list_on_publication(void *cookie, const fanin_publication_info *info)
{
    views *v = cookie;
    v->items = output_room(v->items, v->count, &v->capacity, sizeof v->items[0]);
    view *one = &v->items[v->count++];
    one->is = *info;
    snprintf(one->name, sizeof one->name, "%s", info->name);
    return true;
}

static int by_name_and_rank(const void *a, const void *b)
{
    const view *x = a;
    const view *y = b;
    int order = strcmp(x->name, y->name);
    return order != 0 ? order : (x->is.rank > y->is.rank) - (x->is.rank < y->is.rank);
}

/* Views [first, end) are of one publication. */
static size_t group_end(const views *v, size_t first)
{
    size_t end = first + 1;
    while (end < v->count && strcmp(v->items[end].name, v->items[first].name) == 0)
        end++;
    return end;
}

static const char *common_state(const view *items, size_t count)
{
    for (size_t i = 1; i < count; i++)
        if (items[i].is.state != items[0].is.state)
            return "mixed";
    return rank_state_name(items[0].is.state);
}

/* Ranks of the world that do not show the publication. */
typedef struct absentees {
    uint32_t *ranks; /**< that answered */
    size_t count;
} absentees;

static bool is_missing(const missing *m, uint32_t rank)
{
    bool found = false;
    for (uint32_t i = 0; i < m->count; i++)
        found = found || m->ranks[i].rank == (int32_t)rank;
    return found;
}

/* Views are in the order of their ranks. Without knowing who is missing nobody is absent. */
static absentees find_absent(const view *items, size_t count, const missing *m)
{
    absentees a = {.ranks = output_require(calloc(m->asked, sizeof a.ranks[0]))};
    bool known = true;
    for (uint32_t i = 0; i < m->count; i++)
        known = known && m->ranks[i].rank >= 0;
    size_t next = 0;
    for (uint32_t rank = 0; known && rank < m->asked; rank++) {
        while (next < count && items[next].is.rank < rank)
            next++;
        bool shown = next < count && items[next].is.rank == rank;
        if (!shown && !is_missing(m, rank))
            a.ranks[a.count++] = rank;
    }
    return a;
}

static output_text step_range(const view *items, size_t count)
{
    uint64_t low = items[0].is.step;
    uint64_t high = low;
    output_text text;
    for (size_t i = 1; i < count; i++) {
        low = items[i].is.step < low ? items[i].is.step : low;
        high = items[i].is.step > high ? items[i].is.step : high;
    }
    if (low == high)
        return output_number(low);
    snprintf(text.s, sizeof text.s, "%" PRIu64 "-%" PRIu64, low, high);
    return text;
}

static void list_add_row(struct libscols_table *table, struct libscols_line *parent,
                         const char *name, const char *state)
{
    output_row(table, parent, name, state, "-", "-", "-", "-", "-");
}

static void add_others(struct libscols_table *table, struct libscols_line *parent,
                       const absentees *absent, const missing *m)
{
    char name[32];
    for (size_t i = 0; i < absent->count; i++) {
        snprintf(name, sizeof name, "rank %u", absent->ranks[i]);
        list_add_row(table, parent, name, "absent");
    }
    for (uint32_t i = 0; i < m->count; i++)
        list_add_row(table, parent, missing_name(&m->ranks[i]).s, "unreachable");
}

static uint64_t list_bytes_of(const view *items, size_t count)
{
    uint64_t bytes = 0;
    for (size_t i = 0; i < count; i++)
        bytes += items[i].is.bytes;
    return bytes;
}

static void add_group(struct libscols_table *table, const view *items, size_t count,
                      const missing *m)
{
    absentees absent = find_absent(items, count, m);
    char state[64];
    snprintf(state, sizeof state, "%s", common_state(items, count));
    if (m->asked > count)
        output_append(state, sizeof state, ", %zu of %u ranks", count, m->asked);
    struct libscols_line *parent =
        output_row(table, NULL, options_run_of(items[0].name), state, NULL,
                   step_range(items, count).s, NULL, NULL,
                   output_bytes(list_bytes_of(items, count)).s);
    for (size_t i = 0; i < count; i++) {
        const fanin_publication_info *v = &items[i].is;
        char rank[32], committed[80];
        snprintf(rank, sizeof rank, "rank %u", v->rank);
        snprintf(committed, sizeof committed, v->commit_age_ms > 0 ? "%.60s ago" : "%s",
                 output_age(v->commit_age_ms).s);
        output_row(table, parent, rank, rank_state_name(v->state),
                   output_age(v->state_age_ms).s, output_number(v->step).s, committed,
                   output_number(v->tensors).s, output_bytes(v->bytes).s);
    }
    add_others(table, parent, &absent, m);
    free(absent.ranks);
}

static bool list_on_pair(void *cookie, const char *key, const char *value)
{
    output_set(cookie, key, output_string(value), NULL);
    return true;
}

static bool stop_at_once(void *cookie, const fanin_entry *entry)
{
    (void)cookie, (void)entry;
    return false;
}

/* A pull would be told why ranks have paused it: so is who looks at it. */
static void warn_paused(session *s, const char *name)
{
    fanin_error error = FANIN_ERROR_INIT;
    if (fanin_client_catalog(s->client, name, NULL, session_left_ms(s), stop_at_once,
                             NULL, &error) == FANIN_ERR_PAUSED)
        failure_warn("%s", error.message);
}

/* Metadata of a publication that is committed somewhere; empty otherwise. */
static json_t *metadata_of(session *s, const view *items, size_t count)
{
    fanin_error error = FANIN_ERROR_INIT;
    json_t *pairs = json_object();
    bool committed = true, paused = false;
    for (size_t i = 0; i < count; i++) {
        committed &= items[i].is.state != FANIN_PUBLICATION_UNPUBLISHED;
        paused |= items[i].is.state == FANIN_PUBLICATION_PAUSED;
    }
    if (paused)
        warn_paused(s, items[0].name);
    fanin_status status =
        committed ? fanin_client_metadata(s->client, items[0].name, session_left_ms(s),
                                          list_on_pair, pairs, &error)
                  : FANIN_OK;
    if (status != FANIN_OK && !(paused && status == FANIN_ERR_PAUSED))
        failure_warn("no metadata of %s: %s", items[0].name, error.message);
    return pairs;
}

static void print_metadata(const char *name, json_t *metadata)
{
    enum { SHOWN = 60 }; /* bytes of a value */
    const char *key;
    json_t *value;
    json_object_foreach(metadata, key, value)
    {
        const char *text = json_is_string(value) ? json_string_value(value) : "";
        char shown[SHOWN + 1];
        utf8_copy(shown, sizeof shown, text);
        shown[strcspn(shown, "\n")] = '\0';
        terminal_print("run %s: %s = %s%s", options_run_of(name), key, shown,
                       strlen(shown) < strlen(text) ? "..." : "");
    }
}

/* What a reader of the step before reads of all ranks, and from how far back one may come. */
static void print_patches(const view *items, size_t count)
{
    uint64_t steps = items[0].is.patches, bytes = 0,
             whole = list_bytes_of(items, count);
    for (size_t i = 0; i < count; i++) {
        steps = items[i].is.patches < steps ? items[i].is.patches : steps;
        bytes += items[i].is.patch_bytes;
    }
    if (steps > 0 && whole > 0)
        terminal_print("run %s: deltas lead %" PRIu64
                       " step%s back; the last has %.1f %% "
                       "of the bytes",
                       options_run_of(items[0].name), steps, steps > 1 ? "s" : "",
                       100.0 * (double)bytes / (double)whole);
}

static json_t *group_json(const view *items, size_t count, const missing *m,
                          json_t *metadata)
{
    json_t *ranks = json_array(), *others = json_array();
    absentees absent = find_absent(items, count, m);
    for (size_t i = 0; i < absent.count; i++)
        json_array_append_new(others, output_u64(absent.ranks[i]));
    free(absent.ranks);
    for (size_t i = 0; i < count; i++) {
        const fanin_publication_info *v = &items[i].is;
        json_array_append_new(
            ranks,
            output_object("rank", output_u64(v->rank), "state",
                          output_string(rank_state_name(v->state)), "step",
                          output_u64(v->step), "epoch", output_u64(v->epoch),
                          "catalog_version", output_u64(v->catalog_version), "tensors",
                          output_u64(v->tensors), "bytes", output_u64(v->bytes),
                          "patches", output_u64(v->patches), "patch_bytes",
                          output_u64(v->patch_bytes), "state_age_ns",
                          output_age_ns(v->state_age_ms), "commit_age_ns",
                          output_age_ns(v->commit_age_ms), "key_digest",
                          output_digits(v->key_digest), NULL));
    }
    return output_object("publication", output_string(items[0].name), "run",
                         output_string(options_run_of(items[0].name)), "state",
                         output_string(common_state(items, count)), "bytes",
                         output_u64(list_bytes_of(items, count)), "ranks", ranks,
                         "absent", others, "metadata", json_incref(metadata), NULL);
}

static void print_runs(const views *v, const missing *m, const json_t *metadata)
{
    if (v->count == 0) {
        printf("nothing is published: %u of %u ranks answered, and hold no run\n",
               m->asked - m->count, m->asked);
    } else {
        struct libscols_table *table =
            output_table("RUN^ STATE FOR> STEP> COMMITTED> TENSORS> BYTES>");
        for (size_t i = 0; i < v->count; i = group_end(v, i))
            add_group(table, &v->items[i], group_end(v, i) - i, m);
        output_print(table);
    }
    for (size_t i = 0; i < v->count; i = group_end(v, i)) {
        const char *name = v->items[i].name;
        print_metadata(name, json_object_get(metadata, name));
        print_patches(&v->items[i], group_end(v, i) - i);
    }
    missing_print(m);
}

static json_t *runs_json(const views *v, const missing *m, const json_t *metadata)
{
    json_t *list = json_array();
    for (size_t i = 0; i < v->count; i = group_end(v, i))
        json_array_append_new(list,
                              group_json(&v->items[i], group_end(v, i) - i, m,
                                         json_object_get(metadata, v->items[i].name)));
    return json_pack("{s:o, s:o}", "runs", list, "missing", missing_json(m));
}

static int list_runs(session *s, const common_options *common)
{
    fanin_error error = FANIN_ERROR_INIT;
    views v = {0};
    missing m;
    /* Half of the time: the metadata come after it. */
    if (fanin_client_list(s->client, session_left_ms(s) / 2 + 1, list_on_publication,
                          &v, &error) != FANIN_OK) {
        free(v.items);
        return session_failure(s, "cannot list", &error);
    }
    if (v.count > 0)
        qsort(v.items, v.count, sizeof v.items[0], by_name_and_rank);
    missing_gather(s, &m);
    json_t *metadata = json_object();
    for (size_t i = 0; i < v.count; i = group_end(&v, i))
        json_object_set_new(metadata, v.items[i].name,
                            metadata_of(s, &v.items[i], group_end(&v, i) - i));
    if (common->json)
        output_json(runs_json(&v, &m, metadata));
    else
        print_runs(&v, &m, metadata);
    int code = missing_report(&m);
    json_decref(metadata);
    missing_free(&m);
    free(v.items);
    return code;
}

typedef struct key_lister {
    const session *session;
    struct libscols_table *table; /**< NULL with --json */
    json_t *list;
} key_lister;

static int by_number(const void *a, const void *b)
{
    uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;
    return (x > y) - (x < y);
}

/* Who holds boxes of the entry, in order, each once; to be freed. */
static uint32_t *owners_of(const fanin_entry *entry, size_t *count_out)
{
    uint32_t *ranks = output_require(calloc(entry->n_owners + 1, sizeof *ranks));
    size_t count = 0;
    for (size_t i = 0; i < entry->n_owners; i++)
        ranks[i] = entry->owners[i].rank;
    qsort(ranks, entry->n_owners, sizeof *ranks, by_number);
    for (size_t i = 0; i < entry->n_owners; i++)
        if (count == 0 || ranks[count - 1] != ranks[i])
            ranks[count++] = ranks[i];
    *count_out = count;
    return ranks;
}

static void add_key_row(struct libscols_table *table, const fanin_entry *entry,
                        const char *key, const uint32_t *ranks, size_t count)
{
    char *text = NULL;
    size_t size = 0;
    FILE *stream = output_require(open_memstream(&text, &size));
    output_ranges(stream, ",", ranks, count);
    fclose(stream);
    output_row(table, NULL, key, fanin_dtype_name(entry->dtype),
               output_dims(entry->shape, entry->n_dims).s, text,
               output_number(entry->bytes).s);
    free(text);
}

static bool list_on_entry(void *cookie, const fanin_entry *entry)
{
    key_lister *l = cookie;
    char key[FANIN_MAX_NAME + 128];
    size_t count;
    uint32_t *ranks = owners_of(entry, &count);
    snprintf(key, sizeof key, "%s:%s", l->session->publication, entry->name);
    if (l->table != NULL) {
        add_key_row(l->table, entry, key, ranks, count);
    } else {
        json_t *list = json_array();
        for (size_t i = 0; i < count; i++)
            json_array_append_new(list, output_u64(ranks[i]));
        json_array_append_new(
            l->list,
            output_object("key", output_string(key), "dtype",
                          output_string(fanin_dtype_name(entry->dtype)), "shape",
                          output_list(entry->shape, entry->n_dims), "ranks", list,
                          "bytes", output_u64(entry->bytes), NULL));
    }
    free(ranks);
    return true;
}

static int list_keys(session *s, const common_options *common)
{
    fanin_error error = FANIN_ERROR_INIT;
    key_lister l = {.session = s};
    missing m;
    if (common->json)
        l.list = json_array();
    else
        l.table = output_table("KEY DTYPE SHAPE RANKS BYTES>");
    if (fanin_client_catalog(s->client, s->publication, NULL, session_left_ms(s),
                             list_on_entry, &l, &error) != FANIN_OK) {
        scols_unref_table(l.table);
        json_decref(l.list);
        return session_failure(s, "cannot list keys", &error);
    }
    missing_gather(s, &m);
    if (common->json) {
        output_json(output_object("publication", output_string(s->publication), "keys",
                                  l.list, "missing", missing_json(&m), NULL));
    } else {
        output_print(l.table);
        missing_print(&m);
    }
    int code = missing_report(&m);
    missing_free(&m);
    return code;
}

static int list_target(session *s, const invocation *line, void *cookie)
{
    const int *map = cookie;
    int code = *map ? session_need_run(s) : 0;
    code = code != 0 ? code : session_reach(s);
    return code != 0           ? code
           : *map              ? list_map(s, &line->common)
           : line->run != NULL ? list_keys(s, &line->common)
                               : list_runs(s, &line->common);
}

static int list_run(const command *self, int argc, const char **argv)
{
    invocation line = {.common.timeout_ms = 10000};
    int map = 0;
    struct poptOption table[] = {
        {"map", 'm', POPT_ARG_NONE, &map, 0,
         "what each rank holds of the run, and what nobody does", NULL},
        SESSION_TABLE(&line),
        POPT_TABLEEND,
    };
    return session_run(self, argc, argv, &line, table, 0, list_target, &map);
}

static const char help[] =
    "Examples:\n"
    "  nixl-fetch list 127.0.0.1:6000 --world-size 8\n"
    "  nixl-fetch list nixl_info.json --run 0 --json\n"
    "  nixl-fetch list nixl_info.json full:0\n"
    "  nixl-fetch list nixl_info.json full:0 --map\n"
    "\n"
    "Without --run: every run, its state and step on each rank, its metadata. With\n"
    "--run: every key, its dtype, shape, the ranks that hold parts, its bytes. A\n"
    "rank that does not answer is named; the exit status is then 13.";

const command cmd_list = {
    .name = "list",
    .arguments = "TARGET [--run R] [OPTION...]",
    .summary = "list runs with their steps and metadata, or the keys of a run",
    .help = help,
    .run = list_run,
};
