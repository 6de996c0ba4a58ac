/* SPDX-License-Identifier: Apache-2.0 */
#include "command.h"
#include "failure.h"
#include "keys.h"
#include "output.h"
#include "session.h"
#include "terminal.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* One publication as one rank sees it. */
typedef struct view {
    uint32_t rank;
    int32_t state;
    uint64_t step, epoch, catalog_version, tensors, bytes;
    char name[96];
    uint8_t digest[16];
} view;

typedef struct views {
    view *items;
    size_t count, capacity;
    bool failed;
} views;

static const char *state_name(int32_t state)
{
    switch (state) {
    case FANIN_PUBLICATION_UNPUBLISHED:
        return "unpublished";
    case FANIN_PUBLICATION_STABLE:
        return "stable";
    case FANIN_PUBLICATION_DRAINING:
        return "draining";
    case FANIN_PUBLICATION_WRITING:
        return "writing";
    case FANIN_PUBLICATION_PAUSED:
        return "paused";
    default:
        return "unknown";
    }
}

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
                  .bytes = info->bytes};
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

static void add_group(struct libscols_table *table, const view *items, size_t count)
{
    uint64_t bytes = 0;
    for (size_t i = 0; i < count; i++) {
        bytes += items[i].bytes;
    }
    output_text step = step_range(items, count);
    output_text size = output_bytes(bytes);
    const char *head[] = {run_name(items[0].name), common_state(items, count), step.s,
                          NULL, size.s};
    struct libscols_line *parent = output_row(table, NULL, head, 5);
    for (size_t i = 0; i < count; i++) {
        char rank[32];
        snprintf(rank, sizeof(rank), "rank %u", items[i].rank);
        step = output_number(items[i].step);
        size = output_bytes(items[i].bytes);
        output_text tensors = output_number(items[i].tensors);
        const char *cells[] = {rank, state_name(items[i].state), step.s, tensors.s,
                               size.s};
        output_row(table, parent, cells, 5);
    }
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

/* Metadata of a publication that is committed somewhere; empty otherwise. */
static json_t *metadata_of(session *s, const view *items, size_t count,
                           uint32_t timeout_ms)
{
    fanin_error error = FANIN_ERROR_INIT;
    pairs p = {json_object()};
    bool committed = true;
    for (size_t i = 0; i < count; i++) {
        committed &= items[i].state != FANIN_PUBLICATION_UNPUBLISHED;
    }
    if (committed && fanin_client_metadata(s->client, items[0].name, timeout_ms,
                                           on_pair, &p, &error) != FANIN_OK) {
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

static json_t *group_json(const view *items, size_t count, json_t *metadata)
{
    json_t *ranks = json_array();
    uint64_t bytes = 0;
    for (size_t i = 0; i < count; i++) {
        json_t *one = json_pack("{s:i, s:s}", "rank", (int)items[i].rank, "state",
                                state_name(items[i].state));
        output_set_u64(one, "step", items[i].step);
        output_set_u64(one, "epoch", items[i].epoch);
        output_set_u64(one, "catalog_version", items[i].catalog_version);
        output_set_u64(one, "tensors", items[i].tensors);
        output_set_u64(one, "bytes", items[i].bytes);
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
    json_object_set(object, "metadata", metadata);
    return object;
}

static int list_runs(session *s, const common_options *common)
{
    static const output_column columns[] = {{"RUN", false, true},
                                            {"STATE", false, false},
                                            {"STEP", true, false},
                                            {"TENSORS", true, false},
                                            {"BYTES", true, false}};
    fanin_error error = FANIN_ERROR_INIT;
    views v = {0};
    fanin_status status =
        fanin_client_list(s->client, common->timeout_ms, on_publication, &v, &error);
    if (status != FANIN_OK || v.failed) {
        if (v.failed) {
            failure_set(&error, FANIN_ERR_MEMORY, "free memory",
                        "too many publications");
        }
        free(v.items);
        return failure_report("cannot list", &error);
    }
    if (v.count > 0) {
        qsort(v.items, v.count, sizeof(v.items[0]), by_name_and_rank);
    }
    struct libscols_table *table = output_table(columns, 5);
    json_t *metadata = json_object();
    json_t *list = json_array();
    for (size_t i = 0; i < v.count;) {
        size_t n = group_end(&v, i) - i;
        json_t *one = metadata_of(s, &v.items[i], n, common->timeout_ms);
        add_group(table, &v.items[i], n);
        json_array_append_new(list, group_json(&v.items[i], n, one));
        json_object_set_new(metadata, v.items[i].name, one);
        i += n;
    }
    if (common->json) {
        scols_unref_table(table);
        output_json(json_pack("{s:O}", "runs", list));
    } else {
        const char *name;
        json_t *value;
        output_print(table);
        json_object_foreach(metadata, name, value)
        {
            print_metadata(name, value);
        }
    }
    json_decref(list);
    json_decref(metadata);
    free(v.items);
    return 0;
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
    if (fanin_client_catalog(s->client, s->publication, NULL, common->timeout_ms,
                             on_entry, &l, &error) != FANIN_OK) {
        scols_unref_table(l.table);
        json_decref(l.list);
        return failure_report("cannot list keys", &error);
    }
    if (common->json) {
        json_t *object = json_object();
        output_set_string(object, "publication", s->publication);
        json_object_set(object, "keys", l.list);
        output_json(object);
    } else {
        output_print(l.table);
    }
    json_decref(l.list);
    return 0;
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
            code = session_connect(&s, line.common.timeout_ms);
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
            "bytes.",
    .run = run,
};
