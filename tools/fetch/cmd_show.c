/* SPDX-License-Identifier: Apache-2.0 */
#include "fetch/command.h"
#include "fetch/failure.h"
#include "fetch/missing.h"
#include "fetch/output.h"
#include "fetch/terminal.h"

#include <fnmatch.h>
#include <inttypes.h>
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
        if (memcmp(e->owners[i].offset, o->offset, e->n_dims * sizeof o->offset[0]) ==
                0 &&
            memcmp(e->owners[i].extent, o->extent, e->n_dims * sizeof o->extent[0]) ==
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
        json_array_append_new(
            owners,
            output_object(
                "rank", output_u64(o->rank), "offset",
                output_list(o->offset, e->n_dims), "extent",
                output_list(o->extent, e->n_dims), "bytes", output_u64(o->bytes),
                "region", output_u64(o->region), "region_offset",
                output_u64(o->region_offset), "packed", json_boolean(o->packed),
                "replica_of",
                output_rank(original != i ? (int64_t)e->owners[original].rank : -1),
                NULL));
    }
    return output_object(
        "key", output_string(key), "dtype", output_string(fanin_dtype_name(e->dtype)),
        "shape", output_list(e->shape, e->n_dims), "bytes", output_u64(e->bytes),
        "distinct_bytes", output_u64(distinct), "owners", owners, NULL);
}

static void show_table(const char *key, const fanin_entry *e, uint64_t distinct)
{
    struct libscols_table *table = output_table(
        "RANK> OFFSET EXTENT BYTES> REGION> REGION-OFFSET> LAYOUT REPLICA-OF");
    for (size_t i = 0; i < e->n_owners; i++) {
        const fanin_owner *o = &e->owners[i];
        size_t original = original_of(e, i);
        char replica[32] = "-";
        if (original != i) {
            snprintf(replica, sizeof replica, "rank %u", e->owners[original].rank);
        }
        output_row(table, NULL, output_number(o->rank).s,
                   output_dims(o->offset, e->n_dims).s,
                   output_dims(o->extent, e->n_dims).s, output_number(o->bytes).s,
                   output_number(o->region).s, output_number(o->region_offset).s,
                   o->packed ? "packed" : "strided", replica);
    }
    terminal_print("key    %s", key);
    terminal_print("dtype  %s", fanin_dtype_name(e->dtype));
    terminal_print("shape  %s", output_dims(e->shape, e->n_dims).s);
    terminal_print("bytes  %" PRIu64 ", of which ranks hold %" PRIu64, e->bytes,
                   distinct);
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
    snprintf(key, sizeof key, "%s:%s", s->publication, e->name);
    if (s->keys != NULL) {
        json_array_append_new(s->keys, key_json(key, e, distinct));
    } else {
        fputs(s->found > 0 ? "\n" : "", stdout);
        show_table(key, e, distinct);
    }
    s->found++;
    return true;
}

/* "lora:<run>:<name>", "full:<run>:<name>" or a name alone; fills @p run_out if the key says one. */
static const char *split_key(const char *key, char run_out[OPTIONS_PUBLICATION])
{
    run_out[0] = '\0';
    const char *kind = strchr(key, ':');
    const char *end = kind != NULL ? strchr(kind + 1, ':') : NULL;
    if (end == NULL || end - key >= OPTIONS_PUBLICATION) {
        return key;
    }
    snprintf(run_out, OPTIONS_PUBLICATION, "%.*s", (int)(end - key), key);
    if (options_is_publication(run_out)) {
        return end + 1;
    }
    run_out[0] = '\0';
    return key;
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
        output_set(object, "publication", output_string(s->publication), "keys",
                   json_incref(s->keys), NULL);
    }
    output_set(object, "missing", missing_json(absent), NULL);
    output_json(object);
}

static int show(session *s, const char *name, bool json)
{
    fanin_error error = FANIN_ERROR_INIT;
    missing absent = {0};
    shower cookie = {.publication = s->publication,
                     .name = name,
                     .pattern = strpbrk(name, "*?[") != NULL,
                     .keys = json ? json_array() : NULL};
    s->key = cookie.pattern ? NULL : name;
    fanin_status status =
        fanin_client_catalog(s->client, s->publication, s->key, session_left_ms(s),
                             on_entry, &cookie, &error);
    if (status == FANIN_OK && cookie.found == 0) {
        status = failure_set(&error, FANIN_ERR_NOT_FOUND,
                             "'nixl-fetch list --run R' shows the names",
                             "no key of %s is like '%s'", s->publication, name);
    }
    int code;
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

static int show_key(session *s, const invocation *line, void *cookie)
{
    (void)cookie;
    char run[OPTIONS_PUBLICATION];
    const char *name = split_key(line->words[0], run);
    int code = 0;
    if (run[0] != '\0' && line->run != NULL && strcmp(s->publication, run) != 0) {
        return failure_usage(s->command->name,
                             "--run '%s' is not the run of the key '%s'", line->run,
                             line->words[0]);
    }
    if (run[0] != '\0') {
        code = session_choose_run(s, run);
    }
    code = code != 0 ? code : session_need_run(s);
    code = code != 0 ? code : session_reach(s);
    return code != 0 ? code : show(s, name, line->common.json != 0);
}

static int run(const command *self, int argc, const char **argv)
{
    invocation line = {.common.timeout_ms = 10000};
    struct poptOption table[] = {SESSION_TABLE(&line), POPT_TABLEEND};
    return session_run(self, argc, argv, &line, table, 1, show_key, NULL);
}

const command cmd_show = {
    .name = "show",
    .arguments = "TARGET KEY [OPTION...]",
    .summary = "show which rank holds which box of a key, and where",
    .help =
        "Examples:\n"
        "  nixl-fetch show 127.0.0.1:6000 --world-size 8 \\\n"
        "      lora:0:base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight\n"
        "  nixl-fetch show nixl_info.json 'full:0:*.layers.0.*'\n"
        "\n"
        "KEY is lora:<run>:<name> or full:<run>:<name>, or a name together with --run; "
        "the\n"
        "name may be a pattern\n"
        "with *, ? and [...]. A rank that does not answer is named; the exit status is "
        "then 13.",
    .run = run,
};
