/* SPDX-License-Identifier: Apache-2.0 */
#include "fetch/command.h"
#include "fetch/failure.h"
#include "fetch/mapping_file.h"
#include "fetch/options.h"
#include "fetch/output.h"
#include "fetch/terminal.h"

#include <fnmatch.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct map_options {
    common_options common;
    char *key; /**< pattern of published names; NULL: all */
} map_options;

/* What is told of the whole, and as how much of it was shown. */
typedef struct totals {
    size_t tensors, sources, boxes, own, by_loader;
    uint64_t bytes;
} totals;

static bool map_wanted(const map_options *o, const char *source)
{
    return o->key == NULL || fnmatch(o->key, source, 0) == 0;
}

/* Whether anything of the tensor is shown. */
static bool shows_tensor(const map_options *o, const mapping_tensor *t)
{
    bool shown = o->key == NULL;
    for (size_t i = 0; i < t->n_sources; i++) {
        shown = shown || map_wanted(o, t->sources[i].name);
    }
    return shown;
}

static bool shows_module(const map_options *o, const mapping_module *m)
{
    size_t i;
    const json_t *name;
    bool shown = o->key == NULL;
    for (i = 0; i < m->n_tensors; i++) {
        shown = shown || shows_tensor(o, &m->tensors[i]);
    }
    json_array_foreach(m->taken, i, name)
    {
        const char *text = json_string_value(name);
        shown = shown || (text != NULL && map_wanted(o, text));
    }
    return shown;
}

/* How a module is filled: "boxes", "loader"; "own": nothing published goes into it. */
static const char *mode_of(const mapping_module *m)
{
    bool filled = false;
    for (size_t i = 0; i < m->n_tensors; i++) {
        filled = filled || m->tensors[i].n_sources > 0;
    }
    return m->fallback != NULL ? "loader" : filled ? "boxes" : "own";
}

static uint64_t box_bytes(const mapping_source *s, const mapping_box *b)
{
    uint64_t bits = fanin_dtype_bits(s->dtype);
    for (uint32_t d = 0; d < s->n_dims; d++) {
        bits *= b->extent[d];
    }
    return bits / 8;
}

static void count(const map_options *o, const mapping_module *m, totals *sum)
{
    sum->by_loader += m->fallback != NULL;
    for (size_t i = 0; i < m->n_tensors; i++) {
        const mapping_tensor *t = &m->tensors[i];
        sum->tensors += shows_tensor(o, t);
        sum->own += t->own != NULL;
        for (size_t j = 0; j < t->n_sources; j++) {
            if (map_wanted(o, t->sources[j].name)) {
                sum->sources++;
                sum->boxes += t->sources[j].n_boxes;
                sum->bytes += mapping_source_bytes(&t->sources[j]);
            }
        }
    }
}

/* ------------------------------------------------------------------- as text */

static void add_source(struct libscols_table *table, struct libscols_line *parent,
                       const mapping_tensor *t, const mapping_source *s)
{
    for (size_t i = 0; i < s->n_boxes; i++) {
        const mapping_box *b = &s->boxes[i];
        output_row(table, parent, t->name, s->name, output_dims(b->offset, s->n_dims).s,
                   output_dims(b->extent, s->n_dims).s, output_number(b->at).s,
                   output_number(box_bytes(s, b)).s, NULL);
    }
}

static void add_module(const map_options *o, struct libscols_table *table,
                       const mapping_module *m)
{
    char name[512], mode[256];
    snprintf(name, sizeof name, "%s (%s)", m->path[0] != '\0' ? m->path : ".", m->kind);
    snprintf(mode, sizeof mode, "%s%s%s", mode_of(m), m->fallback != NULL ? ": " : "",
             m->fallback != NULL ? m->fallback : "");
    struct libscols_line *parent =
        output_row(table, NULL, name, NULL, NULL, NULL, NULL, NULL, mode);
    for (size_t i = 0; i < m->n_tensors; i++) {
        const mapping_tensor *t = &m->tensors[i];
        for (size_t j = 0; j < t->n_sources; j++) {
            if (map_wanted(o, t->sources[j].name)) {
                add_source(table, parent, t, &t->sources[j]);
            }
        }
        if (t->own != NULL && o->key == NULL) {
            snprintf(mode, sizeof mode, "own: %s", t->own);
            output_row(table, parent, t->name, "-", NULL, NULL, NULL, NULL, mode);
        }
    }
}

static void print_summary(const mapping_file *m, const totals *sum)
{
    const char *kind;
    json_t *value;
    terminal_print("%s %s, %s", m->engine, m->version, m->model);
    json_object_foreach((json_t *)(uintptr_t)m->ranks, kind, value)
    {
        printf("%s rank %" JSON_INTEGER_FORMAT " of %" JSON_INTEGER_FORMAT "\n", kind,
               json_integer_value(json_object_get(value, "rank")),
               json_integer_value(json_object_get(value, "size")));
    }
    printf(
        "%zu boxes, %s, of %zu published tensors go into %zu tensors of %zu modules\n",
        sum->boxes, output_bytes(sum->bytes).s, sum->sources, sum->tensors,
        m->n_modules);
    printf("%zu tensors are the engine's own, %zu modules are the loader's, %zu of "
           "%" PRIu64 " published tensors are not wanted\n",
           sum->own, sum->by_loader, json_array_size(m->unwanted), m->published);
}

static void map_tell_text(const map_options *o, const mapping_file *m,
                          const totals *sum)
{
    struct libscols_table *table =
        output_table("TENSOR^ SOURCE OFFSET EXTENT AT> BYTES> MODE");
    for (size_t i = 0; i < m->n_modules; i++) {
        if (shows_module(o, &m->modules[i])) {
            add_module(o, table, &m->modules[i]);
        }
    }
    output_print(table);
    print_summary(m, sum);
}

/* ------------------------------------------------------------------- as JSON */

static json_t *source_json(const mapping_source *s)
{
    json_t *boxes = json_array();
    for (size_t i = 0; i < s->n_boxes; i++) {
        const mapping_box *b = &s->boxes[i];
        uint64_t stride[FANIN_MAX_DIMS];
        for (uint32_t d = 0; d < s->n_dims; d++) {
            stride[d] = (uint64_t)b->stride[d];
        }
        json_array_append_new(boxes,
                              output_object("offset", output_list(b->offset, s->n_dims),
                                            "extent", output_list(b->extent, s->n_dims),
                                            "at", output_u64(b->at), "stride",
                                            output_list(stride, s->n_dims), NULL));
    }
    return output_object("name", output_string(s->name), "dtype",
                         output_string(fanin_dtype_name(s->dtype)), "shape",
                         output_list(s->shape, s->n_dims), "boxes", boxes, "bytes",
                         output_u64(mapping_source_bytes(s)), NULL);
}

static json_t *map_tensor_json(const map_options *o, const mapping_tensor *t)
{
    json_t *sources = json_array();
    for (size_t i = 0; i < t->n_sources; i++) {
        if (map_wanted(o, t->sources[i].name)) {
            json_array_append_new(sources, source_json(&t->sources[i]));
        }
    }
    return output_object("name", output_string(t->name), "role", output_string(t->role),
                         "dtype", output_string(fanin_dtype_name(t->dtype)), "shape",
                         output_list(t->shape, t->n_dims), "own",
                         t->own != NULL ? output_string(t->own) : json_null(), "padded",
                         json_boolean(t->n_fills > 0), "sources", sources, NULL);
}

static json_t *module_json(const map_options *o, const mapping_module *m)
{
    json_t *tensors = json_array();
    for (size_t i = 0; i < m->n_tensors; i++) {
        if (shows_tensor(o, &m->tensors[i])) {
            json_array_append_new(tensors, map_tensor_json(o, &m->tensors[i]));
        }
    }
    /* A model's own path is "", which is a text like any other. */
    return output_object("path", json_string(m->path), "class", output_string(m->kind),
                         "mode", output_string(mode_of(m)), "why",
                         m->fallback != NULL ? output_string(m->fallback) : json_null(),
                         "taken",
                         m->taken != NULL ? json_deep_copy(m->taken) : json_array(),
                         "tensors", tensors, NULL);
}

static void map_tell_json(const map_options *o, const mapping_file *m,
                          const totals *sum)
{
    json_t *modules = json_array();
    for (size_t i = 0; i < m->n_modules; i++) {
        if (shows_module(o, &m->modules[i])) {
            json_array_append_new(modules, module_json(o, &m->modules[i]));
        }
    }
    output_json(output_object(
        "engine", output_string(m->engine), "version", output_string(m->version),
        "model", output_string(m->model), "ranks", json_deep_copy(m->ranks),
        "published", output_u64(m->published), "digest", output_string(m->digest),
        "unwanted", json_deep_copy(m->unwanted), "modules", modules, "sources",
        output_u64(sum->sources), "boxes", output_u64(sum->boxes), "bytes",
        output_u64(sum->bytes), NULL));
}

/* ------------------------------------------------------------------- command */

static int map_target(const map_options *o, const char *path)
{
    fanin_error error = FANIN_ERROR_INIT;
    mapping_file m;
    totals sum = {0};
    if (mapping_read(path, &m, &error) != FANIN_OK) {
        return failure_report("cannot read the mapping", &error);
    }
    bool shown = o->key == NULL;
    for (size_t i = 0; i < m.n_modules; i++) {
        shown = shown || shows_module(o, &m.modules[i]);
        count(o, &m.modules[i], &sum);
    }
    int code = 0;
    if (!shown) {
        code = failure_local("cannot show the key", FANIN_ERR_NOT_FOUND,
                             "leave out --key to see all",
                             "%s takes no published tensor like '%s'", path, o->key);
    } else if (o->common.json) {
        map_tell_json(o, &m, &sum);
    } else {
        map_tell_text(o, &m, &sum);
    }
    mapping_free(&m);
    return code;
}

static map_options given;
static struct poptOption common_part[COMMON_OPTIONS];
static struct poptOption option_table[] = {
    {"key", 'k', POPT_ARG_STRING, &given.key, 0,
     "only what takes of published tensors like PATTERN, with *, ? and [...]",
     "PATTERN"},
    {NULL, 0, POPT_ARG_INCLUDE_TABLE, common_part, 0, "Common options:", NULL},
    POPT_TABLEEND,
};

static int run(const command *self, int argc, const char **argv)
{
    arguments parsed;
    int code;
    given = (map_options){.key = NULL};
    options_common(&given.common, common_part);
    if (options_parse(self, argc, argv, option_table, &given.common, &parsed, &code)) {
        code = parsed.count == 0 ? failure_usage(self->name, "FILE is needed")
               : parsed.count > 1
                   ? failure_usage(self->name, "unexpected argument '%s'",
                                   parsed.positional[1])
                   : map_target(&given, parsed.positional[0]);
    }
    options_free(&parsed);
    return code;
}

const command cmd_map = {
    .name = "map",
    .arguments = "FILE [OPTION...]",
    .summary = "show a recorded mapping: where an engine takes published tensors",
    .help = "Examples:\n"
            "  nixl-fetch map rank0.json\n"
            "  nixl-fetch map rank0.json --key '*.layers.0.*q_proj*'\n"
            "\n"
            "FILE is what Mapping.save() of fanin.mapping writes, of one rank of an "
            "engine. For\n"
            "each module: which box of which published tensor goes into which of its "
            "tensors,\n"
            "at which byte. A module is filled by boxes, by the engine's loader, which "
            "is said\n"
            "with the reason, or by nothing that is published (own).",
    .run = run,
};
