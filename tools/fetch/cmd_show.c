/* SPDX-License-Identifier: Apache-2.0 */
#include "fetch/command.h"
#include "fetch/failure.h"
#include "fetch/missing.h"
#include "fetch/output.h"
#include "fetch/shard_map.h"
#include "fetch/tensor_directory.h"

#include <fnmatch.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Pictures that are asked for. */
typedef struct pictures {
    int map;
    char *svg; /**< file; NULL: none */
    shard_style style;
} pictures;

typedef struct shower {
    const pictures *asked;
    char *svg; /**< of the key */
    const char *publication;
    const char *name; /**< or a pattern */
    bool pattern;
    size_t found;
    json_t *keys; /**< those found; NULL: printed as tables */
} shower;

static json_t *key_json(const char *key, const fanin_entry *e, uint64_t distinct)
{
    json_t *owners = json_array();
    for (size_t i = 0; i < e->n_owners; i++) {
        const fanin_owner *o = &e->owners[i];
        size_t original = shard_original(e, i);
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
        size_t original = shard_original(e, i);
        char replica[32] = "-";
        if (original != i)
            snprintf(replica, sizeof replica, "rank %u", e->owners[original].rank);
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

static void show_draw(const pictures *asked, const fanin_entry *e)
{
    if (asked->map && asked->style.columns < SHARD_MAP_LEAST)
        printf("a picture needs %d columns\n", SHARD_MAP_LEAST);
    else if (asked->map)
        shard_map_draw(stdout, e, &asked->style);
}

static char *svg_of(const char *key, const fanin_entry *e)
{
    char *text = NULL;
    size_t size = 0;
    FILE *stream = output_require(open_memstream(&text, &size));
    shard_map_svg(stream, key, e);
    fclose(stream);
    return text;
}

static bool show_on_entry(void *cookie, const fanin_entry *e)
{
    shower *s = cookie;
    char key[FANIN_MAX_NAME + 128];
    uint64_t distinct = shard_distinct_bytes(e);
    if (s->pattern && fnmatch(s->name, e->name, 0) != 0)
        return true;
    snprintf(key, sizeof key, "%s:%s", s->publication, e->name);
    if (s->keys != NULL) {
        json_array_append_new(s->keys, key_json(key, e, distinct));
    } else {
        fputs(s->found > 0 ? "\n" : "", stdout);
        show_table(key, e, distinct);
        show_draw(s->asked, e);
    }
    if (s->asked->svg != NULL && s->svg == NULL)
        s->svg = svg_of(key, e);
    s->found++;
    return true;
}

/* "lora:<run>:<name>", "full:<run>:<name>" or a name alone; fills @p run_out if the key says one.
   */
static const char *split_key(const char *key, char run_out[OPTIONS_PUBLICATION])
{
    run_out[0] = '\0';
    const char *kind = strchr(key, ':');
    const char *end = kind != NULL ? strchr(kind + 1, ':') : NULL;
    if (end == NULL || end - key >= OPTIONS_PUBLICATION)
        return key;
    snprintf(run_out, OPTIONS_PUBLICATION, "%.*s", (int)(end - key), key);
    if (options_is_publication(run_out))
        return end + 1;
    run_out[0] = '\0';
    return key;
}

/* With a pattern an object with a list, else the key's own. */
static void show_tell(const shower *s, const missing *absent)
{
    if (s->keys == NULL) {
        missing_print(absent);
        return;
    }
    json_t *object =
        s->pattern ? json_object() : json_deep_copy(json_array_get(s->keys, 0));
    if (s->pattern)
        output_set(object, "publication", output_string(s->publication), "keys",
                   json_incref(s->keys), NULL);
    output_set(object, "missing", missing_json(absent), NULL);
    output_json(object);
}

static bool is_pattern(const char *name)
{
    return strpbrk(name, "*?[") != NULL;
}

static int show_target(session *s, const char *name, bool json, const pictures *asked)
{
    fanin_error error = FANIN_ERROR_INIT;
    missing absent = {0};
    shower cookie = {.asked = asked,
                     .publication = s->publication,
                     .name = name,
                     .pattern = is_pattern(name),
                     .keys = json ? json_array() : NULL};
    s->key = cookie.pattern ? NULL : name;
    fanin_status status =
        fanin_client_catalog(s->client, s->publication, s->key, session_left_ms(s),
                             show_on_entry, &cookie, &error);
    if (status == FANIN_OK && cookie.found == 0)
        status = failure_set(&error, FANIN_ERR_NOT_FOUND,
                             "'nixl-fetch list --run R' shows the names",
                             "no key of %s is like '%s'", s->publication, name);
    if (status == FANIN_OK && cookie.svg != NULL)
        status = whole_file_write(asked->svg, cookie.svg, strlen(cookie.svg), &error);
    free(cookie.svg);
    int code;
    if (status != FANIN_OK) {
        code = session_failure(s, "cannot show the key", &error);
    } else {
        missing_gather(s, &absent);
        show_tell(&cookie, &absent);
        code = missing_report(&absent);
        missing_free(&absent);
    }
    json_decref(cookie.keys);
    return code;
}

static int show_key(session *s, const invocation *line, void *cookie)
{
    pictures *asked = cookie;
    char run[OPTIONS_PUBLICATION];
    const char *name = split_key(line->words[0], run);
    int code = 0;
    if (asked->svg != NULL && is_pattern(name))
        return failure_usage(s->command->name, "--svg is of one key, not of '%s'",
                             name);
    if (asked->map && line->common.json)
        return failure_usage(s->command->name,
                             "--map is for people, --json has all owners");
    asked->style = shard_style_of(line->common.no_color != 0);
    if (run[0] != '\0' && line->run != NULL && strcmp(s->publication, run) != 0)
        return failure_usage(s->command->name,
                             "--run '%s' is not the run of the key '%s'", line->run,
                             line->words[0]);
    if (run[0] != '\0')
        code = session_choose_run(s, run);
    code = code != 0 ? code : session_need_run(s);
    code = code != 0 ? code : session_reach(s);
    return code != 0 ? code : show_target(s, name, line->common.json != 0, asked);
}

static int show_run(const command *self, int argc, const char **argv)
{
    invocation line = {.common.timeout_ms = 10000};
    pictures asked = {.map = 0};
    struct poptOption table[] = {
        {"map", 'm', POPT_ARG_NONE, &asked.map, 0,
         "also draw which rank holds which rows and columns", NULL},
        {"svg", 0, POPT_ARG_STRING, &asked.svg, 0,
         "also make this picture of them, to scale", "FILE"},
        SESSION_TABLE(&line),
        POPT_TABLEEND,
    };
    return session_run(self, argc, argv, &line, table, 1, show_key, &asked);
}

static const char help[] =
    "Examples:\n"
    "  nixl-fetch show 127.0.0.1:6000 --world-size 8 \\\n"
    "      lora:0:base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight\n"
    "  nixl-fetch show nixl_info.json 'full:0:*.layers.0.*'\n"
    "  nixl-fetch show nixl_info.json full:0:lm_head.weight --map --svg head.svg\n"
    "\n"
    "KEY is lora:<run>:<name> or full:<run>:<name>, or a name together with --run;\n"
    "the name may be a pattern with *, ? and [...]. A rank that does not answer is\n"
    "named; the exit status is then 13.";

const command cmd_show = {
    .name = "show",
    .arguments = "TARGET KEY [OPTION...]",
    .summary = "show which rank holds which box of a key, and where",
    .help = help,
    .run = show_run,
};
