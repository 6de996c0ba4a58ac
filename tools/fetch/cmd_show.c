/* SPDX-License-Identifier: Apache-2.0 */
#include "fetch/command.h"
#include "fetch/failure.h"
#include "fetch/keys.h"
#include "fetch/missing.h"
#include "fetch/output.h"
#include "fetch/terminal.h"

#include <fnmatch.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct shower {
    const char *publication;
    const char *name; /**< or a pattern */
    bool pattern;
    size_t found;
    json_t *keys; /**< those found; NULL: printed as tables */
} shower;

/* The first owner that holds the very box of owner @p index; @p index: it is the first. */
static size_t original_of(const fanin_entry *e, size_t index)
{
    const fanin_owner *o = &e->owners[index];
    for (size_t i = 0; i < index; i++) {
        if (memcmp(e->owners[i].offset, o->offset, e->n_dims * sizeof(o->offset[0])) ==
                0 &&
            memcmp(e->owners[i].extent, o->extent, e->n_dims * sizeof(o->extent[0])) ==
                0) {
            return i;
        }
    }
    return index;
}

static json_t *key_json(const char *key, const fanin_entry *e, uint64_t distinct)
{
    json_t *owners = json_array();
    for (size_t i = 0; i < e->n_owners; i++) {
        const fanin_owner *o = &e->owners[i];
        size_t original = original_of(e, i);
        json_t *one = json_pack("{s:i}", "rank", (int)o->rank);
        json_object_set_new(one, "offset", keys_dims(o->offset, e->n_dims));
        json_object_set_new(one, "extent", keys_dims(o->extent, e->n_dims));
        output_set_u64(one, "bytes", o->bytes);
        output_set_u64(one, "region", o->region);
        output_set_u64(one, "region_offset", o->region_offset);
        json_object_set_new(one, "packed", json_boolean(o->packed));
        json_object_set_new(one, "replica_of",
                            original != i ? json_integer(e->owners[original].rank)
                                          : json_null());
        json_array_append_new(owners, one);
    }
    json_t *object = json_object();
    output_set_string(object, "key", key);
    output_set_string(object, "dtype", fanin_dtype_name(e->dtype));
    json_object_set_new(object, "shape", keys_dims(e->shape, e->n_dims));
    output_set_u64(object, "bytes", e->bytes);
    output_set_u64(object, "distinct_bytes", distinct);
    json_object_set_new(object, "owners", owners);
    return object;
}

static void show_table(const char *key, const fanin_entry *e, uint64_t distinct)
{
    static const output_column columns[] = {
        {"RANK", true, false},    {"OFFSET", false, false},
        {"EXTENT", false, false}, {"BYTES", true, false},
        {"REGION", true, false},  {"REGION-OFFSET", true, false},
        {"LAYOUT", false, false}, {"REPLICA-OF", false, false},
    };
    struct libscols_table *table = output_table(columns, 8);
    for (size_t i = 0; i < e->n_owners; i++) {
        const fanin_owner *o = &e->owners[i];
        size_t original = original_of(e, i);
        char replica[32] = "-";
        if (original != i) {
            snprintf(replica, sizeof(replica), "rank %u", e->owners[original].rank);
        }
        output_text rank = output_number(o->rank);
        output_text offset = output_dims(o->offset, e->n_dims);
        output_text extent = output_dims(o->extent, e->n_dims);
        output_text bytes = output_number(o->bytes);
        output_text region = output_number(o->region);
        output_text place = output_number(o->region_offset);
        const char *cells[] = {rank.s,
                               offset.s,
                               extent.s,
                               bytes.s,
                               region.s,
                               place.s,
                               o->packed ? "packed" : "strided",
                               replica};
        output_row(table, NULL, cells, 8);
    }
    terminal_print("key    %s", key);
    terminal_print("dtype  %s", fanin_dtype_name(e->dtype));
    terminal_print("shape  %s", output_dims(e->shape, e->n_dims).s);
    terminal_print("bytes  %llu, of which ranks hold %llu",
                   (unsigned long long)e->bytes, (unsigned long long)distinct);
    output_print(table);
}

static bool on_entry(void *cookie, const fanin_entry *e)
{
    shower *s = cookie;
    char key[FANIN_MAX_NAME + 128];
    uint64_t distinct = 0;
    if (s->pattern && fnmatch(s->name, e->name, 0) != 0) {
        return true;
    }
    for (size_t i = 0; i < e->n_owners; i++) {
        if (original_of(e, i) == i) {
            distinct += e->owners[i].bytes;
        }
    }
    snprintf(key, sizeof(key), "%s:%s", s->publication, e->name);
    if (s->keys != NULL) {
        json_array_append_new(s->keys, key_json(key, e, distinct));
    } else {
        fputs(s->found > 0 ? "\n" : "", stdout);
        show_table(key, e, distinct);
    }
    s->found++;
    return true;
}

/* "lora:<run>:<name>" or a name alone; fills @p run_out if the key says one. */
static const char *split_key(const char *key, char run_out[FANIN_MAX_RUN + 1])
{
    static const char prefix[] = "lora:";
    run_out[0] = '\0';
    if (strncmp(key, prefix, sizeof(prefix) - 1) != 0) {
        return key;
    }
    const char *run = key + sizeof(prefix) - 1;
    size_t length = strcspn(run, ":");
    if (run[length] != ':' || length == 0 || length > FANIN_MAX_RUN) {
        return key;
    }
    memcpy(run_out, run, length);
    run_out[length] = '\0';
    return run + length + 1;
}

/* With a pattern an object with a list, else the key's own. */
static void tell(const shower *s, const missing *absent)
{
    if (s->keys == NULL) {
        missing_print(absent);
        return;
    }
    json_t *object =
        s->pattern ? json_object() : json_deep_copy(json_array_get(s->keys, 0));
    if (s->pattern) {
        output_set_string(object, "publication", s->publication);
        json_object_set(object, "keys", s->keys);
    }
    json_object_set_new(object, "missing", missing_json(absent));
    output_json(object);
}

static int show(session *s, const common_options *common, const char *name)
{
    fanin_error error = FANIN_ERROR_INIT;
    missing absent = {0};
    shower cookie = {.publication = s->publication,
                     .name = name,
                     .pattern = strpbrk(name, "*?[") != NULL,
                     .keys = common->json ? json_array() : NULL};
    int code = session_reach(s);
    if (code != 0) {
        json_decref(cookie.keys);
        return code;
    }
    s->key = cookie.pattern ? NULL : name;
    fanin_status status =
        fanin_client_catalog(s->client, s->publication, s->key, session_left_ms(s),
                             on_entry, &cookie, &error);
    if (status == FANIN_OK && cookie.found == 0) {
        status = failure_set(&error, FANIN_ERR_NOT_FOUND,
                             "'nixl-fetch list --run R' shows the names",
                             "no key of %s is like '%s'", s->publication, name);
    }
    if (status != FANIN_OK) {
        code = session_failure(s, "cannot show the key", &error);
    } else {
        missing_gather(s, &absent);
        tell(&cookie, &absent);
        code = missing_report(&absent);
        missing_free(&absent);
    }
    json_decref(cookie.keys);
    return code;
}

static int run(const command *self, int argc, const char **argv)
{
    invocation line = {.common.timeout_ms = 10000};
    struct poptOption table[] = {SESSION_TABLE(&line), POPT_TABLEEND};
    char run_of_key[FANIN_MAX_RUN + 1];
    session s = {0};
    int code;
    const char *where = session_begin(self, &line, argc, argv, table, 1, &code);
    if (where != NULL) {
        const char *name = split_key(line.words[0], run_of_key);
        bool named = run_of_key[0] != '\0';
        code =
            named && line.run != NULL && strcmp(line.run, run_of_key) != 0
                ? failure_usage(self->name, "--run '%s' is not the run of the key '%s'",
                                line.run, line.words[0])
                : session_open(&s, self, &line, where, named ? run_of_key : line.run);
        if (code == 0) {
            code = show(&s, &line.common, name);
        }
        session_close(&s);
    }
    session_end(&line);
    return code;
}

const command cmd_show = {
    .name = "show",
    .arguments = "TARGET KEY [OPTION...]",
    .summary = "show which rank holds which box of a key, and where",
    .help =
        "Examples:\n"
        "  nixl-fetch show 127.0.0.1:6000 --world-size 8 \\\n"
        "      lora:0:base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight\n"
        "  nixl-fetch show nixl_info.json 'lora:0:*.layers.0.*'\n"
        "\n"
        "KEY is lora:<run>:<name>, or a name together with --run; the name may be a "
        "pattern\n"
        "with *, ? and [...]. A rank that does not answer is named; the exit status is "
        "then 13.",
    .run = run,
};
