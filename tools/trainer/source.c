/* SPDX-License-Identifier: Apache-2.0 */
#include "trainer/source.h"
#include "fetch/failure.h"
#include "fetch/output.h"
#include "fetch/pattern.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

enum { MAX_CONFIG = 1000000 };

/* The metadata pair of a model's config.json. */
#define MODEL_PAIR "config"

void source_table(source_options *options, struct poptOption table[SOURCE_OPTIONS])
{
    const struct poptOption entries[SOURCE_OPTIONS] = {
        {"model", 'm', POPT_ARG_STRING, &options->model, 0,
         "shapes of qwen2.5-0.5b, llama-3.1-8b, llama-3.3-70b, qwen3-0.6b, qwen3-8b, "
         "qwen3-30b-a3b or qwen3-235b-a22b; with --full also of deepseek-v3 and "
         "kimi-k2",
         "MODEL"},
        {"full", 0, POPT_ARG_NONE, &options->full, 0,
         "the whole model, published as full:R", NULL},
        {"layers", 0, POPT_ARG_INT, &options->layers, 0,
         "with --full: only its first N layers", "N"},
        {"shrink", 0, POPT_ARG_INT, &options->shrink, 0,
         "with --full: widths and vocabulary divided by N", "N"},
        {"r", 'r', POPT_ARG_INT, &options->r, 0, "rank of the adapter (default 16)",
         "R"},
        {"fused", 0, POPT_ARG_NONE, &options->fused, 0,
         "experts of a layer as one parameter each", NULL},
        {"adapter-shape", 0, POPT_ARG_STRING, &options->shape, 0,
         "model and r of small, dense, large, moe or moe-fused", "SHAPE"},
        {"dtype", 0, POPT_ARG_STRING, &options->dtype, 0,
         "element type (default bf16, f32 with --cast)", "DTYPE"},
        {"adapter", 0, POPT_ARG_STRING, &options->adapter, 0,
         "serve the PEFT adapter in a directory instead", "DIR"},
        {"model-dir", 0, POPT_ARG_STRING, &options->directory, 0,
         "serve the model in a directory: safetensors files, config.json", "DIR"},
        POPT_TABLEEND,
    };
    memcpy(table, entries, sizeof entries);
}

static void add_pair(source *s, const char *key, const char *value)
{
    s->pairs[s->n_pairs++] = (fanin_pair){key, value};
}

/* Wrong usage: a name that is none of those which every @p stride bytes from @p first on
   point to. */
static int source_unknown(const command *self, const char *what, const char *name,
                          const char *const *first, size_t stride, size_t count)
{
    enum { MAX_NAMES = 32 };
    const char *names[MAX_NAMES + 1] = {NULL};
    char all[512] = "";
    for (size_t i = 0; i < count && i < MAX_NAMES; i++) {
        memcpy(&names[i], (const char *)first + i * stride, sizeof names[i]);
        output_append(all, sizeof all, "%s%s", i > 0 ? ", " : "", names[i]);
    }
    const char *nearest = options_nearest(name, names);
    return nearest != NULL
               ? failure_usage(self->name, "unknown %s '%s', did you mean '%s'?", what,
                               name, nearest)
               : failure_usage(self->name, "unknown %s '%s', it is none of %s", what,
                               name, all);
}

/* 0: --dtype says nothing that is known. */
static fanin_dtype element_type(const source_options *options)
{
    return options_dtype(options->dtype != NULL ? options->dtype
                         : options->masters     ? "f32"
                                                : "bf16");
}

static int source_open_model(const command *self, const source_options *options,
                             const char *fallback, source *out)
{
    fanin_error error = FANIN_ERROR_INIT;
    const char *shape_name = options->shape != NULL   ? options->shape
                             : options->model == NULL ? fallback
                                                      : NULL;
    const adapter_shape *shape = shape_name ? adapter_shape_find(shape_name) : NULL;
    if (shape_name != NULL && shape == NULL)
        return source_unknown(self, "adapter shape", shape_name,
                              &adapter_shapes[0].name, sizeof adapter_shapes[0],
                              n_adapter_shapes);
    if (shape_name != NULL && options->model != NULL)
        return failure_usage(self->name,
                             "--model and --adapter-shape exclude each other");
    const char *name = shape != NULL ? shape->model : options->model;
    const model *m = model_find(name);
    if (m != NULL && m->kv_rank > 0)
        return failure_usage(self->name, "'%s' is there as a whole model: give --full",
                             name);
    if (m == NULL)
        return source_unknown(self, "model", name, &models[0].name, sizeof models[0],
                              n_models);
    uint32_t r = options->r != 0 ? (uint32_t)options->r : shape != NULL ? shape->r : 16;
    bool fused = options->fused || (shape != NULL && shape->fused);
    fanin_dtype dtype = element_type(options);
    if (dtype == 0)
        return failure_usage(self->name, "--dtype '%s' is no element type",
                             options->dtype);
    if (model_expand(m, r, fused, dtype, &out->tensors, &error) != FANIN_OK) {
        int code = failure_report("cannot make the adapter", &error);
        return error.status == FANIN_ERR_ARGUMENT ? EXIT_USAGE : code;
    }
    add_pair(out, PATTERN_PAIR_KEY, PATTERN_PAIR_VALUE);
    add_pair(out, PATTERN_DTYPE_KEY, fanin_dtype_name(dtype));
    if (fused) {
        out->config = output_require(model_fused_config(m, r));
        add_pair(out, "peft_config", out->config);
        return 0;
    }
    snprintf(out->number_r, sizeof out->number_r, "%u", r);
    snprintf(out->number_alpha, sizeof out->number_alpha, "%u", 2 * r);
    add_pair(out, "r", out->number_r);
    add_pair(out, "lora_alpha", out->number_alpha);
    add_pair(out, "base_model_name_or_path", m->name);
    add_pair(out, "task_type", "CAUSAL_LM");
    return 0;
}

static int open_whole_model(const command *self, const source_options *options,
                            source *out)
{
    fanin_error error = FANIN_ERROR_INIT;
    if (options->model == NULL || options->shape != NULL || options->fused ||
        options->r != 0)
        return failure_usage(self->name,
                             "a whole model (--full) is --model MODEL, without "
                             "--adapter-shape, --r and --fused");
    const model *known = model_find(options->model);
    if (known == NULL)
        return source_unknown(self, "whole model", options->model, &models[0].name,
                              sizeof models[0], n_models);
    fanin_dtype dtype = element_type(options);
    if (dtype == 0)
        return failure_usage(self->name, "--dtype '%s' is no element type",
                             options->dtype);
    const model m =
        model_scale(known, (uint32_t)options->layers, (uint32_t)options->shrink);
    if (whole_model_expand(&m, dtype, &out->tensors, &error) != FANIN_OK) {
        int code = failure_report("cannot make the model", &error);
        return error.status == FANIN_ERR_ARGUMENT ? EXIT_USAGE : code;
    }
    out->full = true;
    out->config = output_require(model_config(&m, dtype));
    add_pair(out, PATTERN_PAIR_KEY, PATTERN_PAIR_VALUE);
    if (m.kv_rank == 0) /* all tensors have it */
        add_pair(out, PATTERN_DTYPE_KEY, fanin_dtype_name(dtype));
    add_pair(out, MODEL_PAIR, out->config);
    add_pair(out, "format", "pt");
    return 0;
}

static int refuse_directory(const char *path, fanin_status status, const char *problem)
{
    return failure_local(
        "cannot serve the directory", status,
        "give a directory with adapter_config.json and " TENSORS_OF_ADAPTER
        ", or with config.json and a model's safetensors files",
        "%s: %s", path, problem);
}

static int read_config(const char *path, const char *pair, source *out)
{
    FILE *file = fopen(path, "re");
    if (file == NULL)
        return refuse_directory(path,
                                errno == ENOENT ? FANIN_ERR_NOT_FOUND : FANIN_ERR_IO,
                                strerror(errno));
    out->config = output_require(malloc(MAX_CONFIG + 1));
    size_t size = fread(out->config, 1, MAX_CONFIG + 1, file);
    bool bad = ferror(file) != 0;
    fclose(file);
    if (bad || size == 0 || size > MAX_CONFIG ||
        memchr(out->config, '\0', size) != NULL)
        return refuse_directory(path, FANIN_ERR_IO,
                                "cannot be read, is empty, or too large");
    out->config[size] = '\0';
    add_pair(out, pair, out->config);
    return 0;
}

/* All files; 0, or the exit status after a message. */
static int map_files(const char *directory, source *out)
{
    tensor_directory *d = &out->files;
    out->maps = output_require(calloc(d->n_files, sizeof out->maps[0]));
    out->map_sizes = output_require(calloc(d->n_files, sizeof out->map_sizes[0]));
    for (size_t i = 0; i < d->n_files; i++) {
        struct stat st;
        int descriptor = fanin_safetensors_descriptor(d->files[i]);
        void *map = MAP_FAILED;
        if (fstat(descriptor, &st) == 0)
            map = mmap(NULL, (size_t)st.st_size, PROT_READ, MAP_SHARED, descriptor, 0);
        if (map == MAP_FAILED)
            return refuse_directory(directory, FANIN_ERR_IO, strerror(errno));
        out->maps[i] = map;
        out->map_sizes[i] = (size_t)st.st_size;
    }
    return 0;
}

static int map_tensors(const char *directory, source *out)
{
    fanin_error error = FANIN_ERROR_INIT;
    tensor_directory *d = &out->files;
    if (tensor_directory_open(directory, out->full, d, &error) != FANIN_OK)
        return failure_report("cannot serve the directory", &error);
    int code = map_files(directory, out);
    if (code != 0)
        return code;
    out->tensors.tensors =
        output_require(calloc(d->count + 1, sizeof out->tensors.tensors[0]));
    for (size_t i = 0; i < d->count; i++) {
        const tensor_place *place = &d->tensors[i];
        const fanin_safetensors_entry *entry = &place->entry;
        size_t size = out->map_sizes[place->file];
        tensor_spec *t = &out->tensors.tensors[i];
        if (entry->bytes > size || entry->offset > size - entry->bytes)
            return refuse_directory(directory, FANIN_ERR_IO,
                                    "it changed while it was read");
        *t = (tensor_spec){.name = entry->name,
                           .dtype = entry->dtype,
                           .n_dims = entry->n_dims,
                           .bytes = entry->bytes,
                           .data =
                               (const uint8_t *)out->maps[place->file] + entry->offset};
        memcpy(t->shape, entry->shape, sizeof t->shape);
        out->tensors.bytes += entry->bytes;
    }
    out->tensors.count = d->count;
    return 0;
}

static int open_directory(const command *self, const source_options *options,
                          source *out)
{
    char path[4096];
    const char *directory = options->full ? options->directory : options->adapter;
    out->full = options->full != 0;
    if (options->model != NULL || options->shape != NULL || options->fused ||
        options->r != 0 || options->dtype != NULL || options->layers != 0 ||
        options->shrink != 0)
        return failure_usage(self->name,
                             "--adapter and --model-dir exclude --model, "
                             "--adapter-shape, --r, --fused, --dtype, --layers and "
                             "--shrink");
    snprintf(path, sizeof path, "%s/%s", directory,
             out->full ? "config.json" : "adapter_config.json");
    int code = 0;
    /* A model may be without one. */
    if (!out->full || access(path, F_OK) == 0)
        code = read_config(path, out->full ? MODEL_PAIR : "peft_config", out);
    if (out->full)
        add_pair(out, "format", "pt");
    return code != 0 ? code : map_tensors(directory, out);
}

int source_open(const command *self, const source_options *options,
                const char *fallback, source *out)
{
    source_options o = *options;
    *out = (source){0};
    if (o.adapter != NULL && (o.full || o.directory != NULL))
        return failure_usage(self->name, "--adapter is no whole model (--model-dir, "
                                         "--full, --run full:R)");
    o.full = o.full || o.directory != NULL;
    if (o.adapter != NULL || o.directory != NULL)
        return open_directory(self, &o, out);
    if (o.full)
        return open_whole_model(self, &o, out);
    if (o.layers != 0 || o.shrink != 0)
        return failure_usage(self->name, "--layers and --shrink are for whole models "
                                         "(--full)");
    if (o.model == NULL && o.shape == NULL && fallback == NULL)
        return failure_usage(
            self->name,
            "say what to serve: --model, --adapter-shape, --adapter or --model-dir");
    return source_open_model(self, &o, fallback, out);
}

void source_close(source *s)
{
    tensor_list_free(&s->tensors);
    free(s->config);
    for (size_t i = 0; s->maps != NULL && i < s->files.n_files; i++)
        if (s->maps[i] != NULL)
            munmap(s->maps[i], s->map_sizes[i]);
    free(s->maps);
    free(s->map_sizes);
    tensor_directory_close(&s->files);
}
