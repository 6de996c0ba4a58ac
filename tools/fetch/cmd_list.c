/* SPDX-License-Identifier: Apache-2.0 */
#include "fetch/command.h"
#include "fetch/failure.h"
#include "fetch/keys.h"
#include "fetch/missing.h"
#include "fetch/output.h"
#include "fetch/rank_states.h"
#include "fetch/terminal.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* One publication as one rank sees it. */
typedef struct view {
    uint32_t rank;
    int32_t state;
    uint64_t step, epoch, catalog_version, tensors, bytes;
    uint64_t state_age_ms, commit_age_ms; /**< 0: not known */
    char name[96];
    uint8_t digest[16];
} view;

typedef struct views {
    view *items;
    size_t count, capacity;
    bool failed;
} views;

static bool on_publication(void *cookie, const fanin_publication_info *info)
{
    views *v = cookie;
    if (v->count == v->capacity) {
        size_t capacity = v->capacity > 0 ? 2 * v->capacity : 64;
        view *items = realloc(v->items, capacity * sizeof(items[0]));
        if (items == NULL) {
            v->failed = true;
            return false;
        }
        v->items = items;
        v->capacity = capacity;
    }
    view *one = &v->items[v->count++];
    *one = (view){.rank = info->rank,
                  .state = info->state,
                  .step = info->step,
                  .epoch = info->epoch,
                  .catalog_version = info->catalog_version,
                  .tensors = info->tensors,
                  .bytes = info->bytes,
                  .state_age_ms = info->state_age_ms,
                  .commit_age_ms = info->commit_age_ms};
    snprintf(one->name, sizeof(one->name), "%s", info->name);
    memcpy(one->digest, info->key_digest, sizeof(one->digest));
    return true;
}

static int by_name_and_rank(const void *a, const void *b)
{
    const view *x = a;
    const view *y = b;
    int order = strcmp(x->name, y->name);
    return order != 0 ? order : (x->rank > y->rank) - (x->rank < y->rank);
}

/* Views [first, end) are of one publication. */
static size_t group_end(const views *v, size_t first)
{
    size_t end = first + 1;
    while (end < v->count && strcmp(v->items[end].name, v->items[first].name) == 0) {
        end++;
    }
    return end;
}

static const char *common_state(const view *items, size_t count)
{
    for (size_t i = 1; i < count; i++) {
        if (items[i].state != items[0].state) {
            return "mixed";
        }
    }
    return state_name(items[0].state);
}

/* Ranks of the world that do not show the publication. */
typedef struct absentees {
    uint32_t *ranks; /**< that answered */
    size_t count;
} absentees;

static bool is_missing(const missing *m, uint32_t rank)
{
    bool found = false;
    for (uint32_t i = 0; i < m->count; i++) {
        found = found || m->ranks[i].rank == (int32_t)rank;
    }
    return found;
}

/* Views are in the order of their ranks. Without knowing who is missing nobody is absent. */
static absentees find_absent(const view *items, size_t count, const missing *m)
{
    absentees a = {.ranks = output_require(calloc(m->asked, sizeof(a.ranks[0])))};
    bool known = true;
    for (uint32_t i = 0; i < m->count; i++) {
        known = known && m->ranks[i].rank >= 0;
    }
    size_t next = 0;
    for (uint32_t rank = 0; known && rank < m->asked; rank++) {
        while (next < count && items[next].rank < rank) {
            next++;
        }
        bool shown = next < count && items[next].rank == rank;
        if (!shown && !is_missing(m, rank)) {
            a.ranks[a.count++] = rank;
        }
    }
    return a;
}

static output_text step_range(const view *items, size_t count)
{
    uint64_t low = items[0].step;
    uint64_t high = low;
    output_text text;
    for (size_t i = 1; i < count; i++) {
        low = items[i].step < low ? items[i].step : low;
        high = items[i].step > high ? items[i].step : high;
    }
    if (low == high) {
        return output_number(low);
    }
    snprintf(text.s, sizeof(text.s), "%llu-%llu", (unsigned long long)low,
             (unsigned long long)high);
    return text;
}

/* "lora:7" is run 7; publications of other kinds keep their kind. */
static const char *run_name(const char *publication)
{
    return strncmp(publication, "lora:", 5) == 0 ? publication + 5 : publication;
}

static void add_row(struct libscols_table *table, struct libscols_line *parent,
                    const char *name, const char *state)
{
    const char *cells[] = {name, state, "-", "-", "-", "-", "-"};
    output_row(table, parent, cells, 7);
}

static void add_others(struct libscols_table *table, struct libscols_line *parent,
                       const absentees *absent, const missing *m)
{
    char name[MISSING_NAME];
    for (size_t i = 0; i < absent->count; i++) {
        snprintf(name, sizeof(name), "rank %u", absent->ranks[i]);
        add_row(table, parent, name, "absent");
    }
    for (uint32_t i = 0; i < m->count; i++) {
        missing_name(&m->ranks[i], name, sizeof(name));
        add_row(table, parent, name, "unreachable");
    }
}

static void add_group(struct libscols_table *table, const view *items, size_t count,
                      const missing *m)
{
    absentees absent = find_absent(items, count, m);
    char state[64];
    uint64_t bytes = 0;
    for (size_t i = 0; i < count; i++) {
        bytes += items[i].bytes;
    }
    snprintf(state, sizeof(state), "%s", common_state(items, count));
    if (m->asked > count) {
        snprintf(state, sizeof(state), "%s, %zu of %u ranks",
                 common_state(items, count), count, m->asked);
    }
    output_text step = step_range(items, count);
    output_text size = output_bytes(bytes);
    const char *head[] = {
        run_name(items[0].name), state, NULL, step.s, NULL, NULL, size.s};
    struct libscols_line *parent = output_row(table, NULL, head, 7);
    for (size_t i = 0; i < count; i++) {
        char rank[32];
        snprintf(rank, sizeof(rank), "rank %u", items[i].rank);
        step = output_number(items[i].step);
        size = output_bytes(items[i].bytes);
        output_text tensors = output_number(items[i].tensors);
        output_text held = output_age(items[i].state_age_ms);
        output_text committed = output_age(items[i].commit_age_ms);
        if (items[i].commit_age_ms > 0) {
            snprintf(committed.s, sizeof(committed.s), "%.60s ago",
                     output_age(items[i].commit_age_ms).s);
        }
        const char *cells[] = {
            rank,  state_name(items[i].state), held.s, step.s, committed.s, tensors.s,
            size.s};
        output_row(table, parent, cells, 7);
    }
    add_others(table, parent, &absent, m);
    free(absent.ranks);
}

typedef struct pairs {
    json_t *object;
} pairs;

static bool on_pair(void *cookie, const char *key, const char *value)
{
    pairs *p = cookie;
    output_set_string(p->object, key, value);
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
                             NULL, &error) == FANIN_ERR_PAUSED) {
        failure_warn("%s", error.message);
    }
}

/* Metadata of a publication that is committed somewhere; empty otherwise. */
static json_t *metadata_of(session *s, const view *items, size_t count)
{
    fanin_error error = FANIN_ERROR_INIT;
    pairs p = {json_object()};
    bool committed = true, paused = false;
    for (size_t i = 0; i < count; i++) {
        committed &= items[i].state != FANIN_PUBLICATION_UNPUBLISHED;
        paused |= items[i].state == FANIN_PUBLICATION_PAUSED;
    }
    if (paused) {
        warn_paused(s, items[0].name);
    }
    fanin_status status =
        committed ? fanin_client_metadata(s->client, items[0].name, session_left_ms(s),
                                          on_pair, &p, &error)
                  : FANIN_OK;
    if (status != FANIN_OK && !(paused && status == FANIN_ERR_PAUSED)) {
        failure_warn("no metadata of %s: %s", items[0].name, error.message);
    }
    return p.object;
}

static void print_metadata(const char *name, json_t *metadata)
{
    const char *key;
    json_t *value;
    json_object_foreach(metadata, key, value)
    {
        const char *text = json_string_value(value);
        int length = text != NULL ? (int)strcspn(text, "\n") : 0;
        bool cut = text != NULL && (text[length] != '\0' || length > 60);
        terminal_print("run %s: %s = %.*s%s", run_name(name), key,
                       length > 60 ? 60 : length, text != NULL ? text : "",
                       cut ? "..." : "");
    }
}

static json_t *group_json(const view *items, size_t count, const missing *m,
                          json_t *metadata)
{
    json_t *ranks = json_array(), *others = json_array();
    absentees absent = find_absent(items, count, m);
    for (size_t i = 0; i < absent.count; i++) {
        json_array_append_new(others, json_integer(absent.ranks[i]));
    }
    free(absent.ranks);
    uint64_t bytes = 0;
    for (size_t i = 0; i < count; i++) {
        json_t *one = json_pack("{s:i, s:s}", "rank", (int)items[i].rank, "state",
                                state_name(items[i].state));
        output_set_u64(one, "step", items[i].step);
        output_set_u64(one, "epoch", items[i].epoch);
        output_set_u64(one, "catalog_version", items[i].catalog_version);
        output_set_u64(one, "tensors", items[i].tensors);
        output_set_u64(one, "bytes", items[i].bytes);
        output_set_age(one, "state_age_ns", items[i].state_age_ms);
        output_set_age(one, "commit_age_ns", items[i].commit_age_ms);
        output_set_hex(one, "key_digest", items[i].digest, sizeof(items[i].digest));
        json_array_append_new(ranks, one);
        bytes += items[i].bytes;
    }
    json_t *object = json_object();
    output_set_string(object, "publication", items[0].name);
    output_set_string(object, "run", run_name(items[0].name));
    output_set_string(object, "state", common_state(items, count));
    output_set_u64(object, "bytes", bytes);
    json_object_set_new(object, "ranks", ranks);
    json_object_set_new(object, "absent", others);
    json_object_set(object, "metadata", metadata);
    return object;
}

/* FANIN_OK: views of all ranks that answered, in order. */
static fanin_status gather(session *s, views *v, fanin_error *error)
{
    /* Half of the time: the metadata come after it. */
    fanin_status status = fanin_client_list(s->client, session_left_ms(s) / 2 + 1,
                                            on_publication, v, error);
    if (v->failed) {
        return failure_set(error, FANIN_ERR_MEMORY, "free memory",
                           "too many publications");
    }
    if (status == FANIN_OK && v->count > 0) {
        qsort(v->items, v->count, sizeof(v->items[0]), by_name_and_rank);
    }
    return status;
}

static void print_runs(const views *v, const missing *m, const json_t *metadata)
{
    static const output_column columns[] = {
        {"RUN", false, true},  {"STATE", false, false},    {"FOR", true, false},
        {"STEP", true, false}, {"COMMITTED", true, false}, {"TENSORS", true, false},
        {"BYTES", true, false}};
    if (v->count == 0) {
        printf("nothing is published: %u of %u ranks answered, and hold no run\n",
               m->asked - m->count, m->asked);
    } else {
        struct libscols_table *table = output_table(columns, 7);
        for (size_t i = 0; i < v->count; i = group_end(v, i)) {
            add_group(table, &v->items[i], group_end(v, i) - i, m);
        }
        output_print(table);
    }
    for (size_t i = 0; i < v->count; i = group_end(v, i)) {
        const char *name = v->items[i].name;
        print_metadata(name, json_object_get(metadata, name));
    }
    missing_print(m);
}

static json_t *runs_json(const views *v, const missing *m, const json_t *metadata)
{
    json_t *list = json_array();
    for (size_t i = 0; i < v->count; i = group_end(v, i)) {
        json_array_append_new(list,
                              group_json(&v->items[i], group_end(v, i) - i, m,
                                         json_object_get(metadata, v->items[i].name)));
    }
    return json_pack("{s:o, s:o}", "runs", list, "missing", missing_json(m));
}

static int list_runs(session *s, const common_options *common)
{
    fanin_error error = FANIN_ERROR_INIT;
    views v = {0};
    missing m;
    fanin_status status = gather(s, &v, &error);
    if (status != FANIN_OK) {
        free(v.items);
        return session_failure(s, "cannot list", &error);
    }
    missing_gather(s, &m);
    json_t *metadata = json_object();
    for (size_t i = 0; i < v.count; i = group_end(&v, i)) {
        json_object_set_new(metadata, v.items[i].name,
                            metadata_of(s, &v.items[i], group_end(&v, i) - i));
    }
    if (common->json) {
        output_json(runs_json(&v, &m, metadata));
    } else {
        print_runs(&v, &m, metadata);
    }
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

static bool on_entry(void *cookie, const fanin_entry *entry)
{
    key_lister *l = cookie;
    char key[FANIN_MAX_NAME + 128];
    char *ranks = keys_ranks(entry);
    const char *dtype = fanin_dtype_name(entry->dtype);
    output_text shape = output_dims(entry->shape, entry->n_dims);
    snprintf(key, sizeof(key), "%s:%s", l->session->publication, entry->name);
    if (l->table != NULL) {
        output_text bytes = output_number(entry->bytes);
        const char *cells[] = {key, dtype, shape.s, ranks, bytes.s};
        output_row(l->table, NULL, cells, 5);
    } else {
        json_t *o = json_object();
        output_set_string(o, "key", key);
        output_set_string(o, "dtype", dtype);
        json_object_set_new(o, "shape", keys_dims(entry->shape, entry->n_dims));
        json_object_set_new(o, "ranks", keys_rank_list(entry));
        output_set_u64(o, "bytes", entry->bytes);
        json_array_append_new(l->list, o);
    }
    free(ranks);
    return true;
}

static int list_keys(session *s, const common_options *common)
{
    static const output_column columns[] = {{"KEY", false, false},
                                            {"DTYPE", false, false},
                                            {"SHAPE", false, false},
                                            {"RANKS", false, false},
                                            {"BYTES", true, false}};
    fanin_error error = FANIN_ERROR_INIT;
    key_lister l = {.session = s, .list = json_array()};
    l.table = common->json ? NULL : output_table(columns, 5);
    missing m;
    if (fanin_client_catalog(s->client, s->publication, NULL, session_left_ms(s),
                             on_entry, &l, &error) != FANIN_OK) {
        scols_unref_table(l.table);
        json_decref(l.list);
        return session_failure(s, "cannot list keys", &error);
    }
    missing_gather(s, &m);
    if (common->json) {
        json_t *object = json_object();
        output_set_string(object, "publication", s->publication);
        json_object_set(object, "keys", l.list);
        json_object_set_new(object, "missing", missing_json(&m));
        output_json(object);
    } else {
        output_print(l.table);
        missing_print(&m);
    }
    json_decref(l.list);
    int code = missing_report(&m);
    missing_free(&m);
    return code;
}

static int run(const command *self, int argc, const char **argv)
{
    invocation line = {.common.timeout_ms = 10000};
    struct poptOption table[] = {SESSION_TABLE(&line), POPT_TABLEEND};
    session s = {0};
    int code;
    const char *where = session_begin(self, &line, argc, argv, table, 0, &code);
    if (where != NULL) {
        code = session_open(&s, self, &line, where, line.run);
        if (code == 0) {
            code = session_reach(&s);
        }
        if (code == 0) {
            code = line.run != NULL ? list_keys(&s, &line.common)
                                    : list_runs(&s, &line.common);
        }
        session_close(&s);
    }
    session_end(&line);
    return code;
}

const command cmd_list = {
    .name = "list",
    .arguments = "TARGET [--run R] [OPTION...]",
    .summary = "list runs with their steps and metadata, or the keys of a run",
    .help = "Examples:\n"
            "  nixl-fetch list 127.0.0.1:6000 --world-size 8\n"
            "  nixl-fetch list nixl_info.json --run 0 --json\n"
            "\n"
            "Without --run: every run, its state and step on each rank, its metadata.\n"
            "With --run: every key, its dtype, shape, the ranks that hold parts, its "
            "bytes.\n"
            "A rank that does not answer is named; the exit status is then 13.",
    .run = run,
};
