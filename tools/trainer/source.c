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

void source_table(source_options *options, struct poptOption table[SOURCE_OPTIONS])
{
    const struct poptOption entries[SOURCE_OPTIONS] = {
        {"model", 'm', POPT_ARG_STRING, &options->model, 0,
         "shapes of qwen2.5-0.5b, llama-3.1-8b, llama-3.3-70b, qwen3-30b-a3b or "
         "qwen3-235b-a22b",
         "MODEL"},
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
static int unknown(const command *self, const char *what, const char *name,
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

static int open_model(const command *self, const source_options *options,
                      const char *fallback, source *out)
{
    fanin_error error = FANIN_ERROR_INIT;
    const char *shape_name = options->shape != NULL   ? options->shape
                             : options->model == NULL ? fallback
                                                      : NULL;
    const adapter_shape *shape = shape_name ? adapter_shape_find(shape_name) : NULL;
    if (shape_name != NULL && shape == NULL) {
        return unknown(self, "adapter shape", shape_name, &adapter_shapes[0].name,
                       sizeof adapter_shapes[0], n_adapter_shapes);
    }
    if (shape_name != NULL && options->model != NULL) {
        return failure_usage(self->name,
                             "--model and --adapter-shape exclude each other");
    }
    const char *name = shape != NULL ? shape->model : options->model;
    const model *m = model_find(name);
    if (m == NULL) {
        return unknown(self, "model", name, &models[0].name, sizeof models[0],
                       n_models);
    }
    uint32_t r = options->r != 0 ? (uint32_t)options->r : shape != NULL ? shape->r : 16;
    bool fused = options->fused || (shape != NULL && shape->fused);
    fanin_dtype dtype = options_dtype(options->dtype != NULL ? options->dtype
                                      : options->masters     ? "f32"
                                                             : "bf16");
    if (dtype == 0) {
        return failure_usage(self->name, "--dtype '%s' is no element type",
                             options->dtype);
    }
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

static int refuse_adapter(const char *path, fanin_status status, const char *problem)
{
    return failure_local("cannot serve the adapter", status,
                         "give a directory with adapter_config.json and "
                         "adapter_model.safetensors",
                         "%s: %s", path, problem);
}

static int read_config(const char *path, source *out)
{
    FILE *file = fopen(path, "re");
    if (file == NULL) {
        return refuse_adapter(path,
                              errno == ENOENT ? FANIN_ERR_NOT_FOUND : FANIN_ERR_IO,
                              strerror(errno));
    }
    out->config = malloc(MAX_CONFIG + 1);
    size_t size = out->config != NULL ? fread(out->config, 1, MAX_CONFIG + 1, file) : 0;
    bool bad = ferror(file) != 0;
    fclose(file);
    if (bad || size == 0 || size > MAX_CONFIG ||
        memchr(out->config, '\0', size) != NULL) {
        return refuse_adapter(path, FANIN_ERR_IO,
                              "cannot be read, is empty, or too large");
    }
    out->config[size] = '\0';
    add_pair(out, "peft_config", out->config);
    return 0;
}

static int map_tensors(const char *path, source *out)
{
    fanin_error error = FANIN_ERROR_INIT;
    struct stat st;
    if (fanin_safetensors_open(path, &out->file, &error) != FANIN_OK) {
        return failure_report("cannot serve the adapter", &error);
    }
    int descriptor = fanin_safetensors_descriptor(out->file);
    if (fstat(descriptor, &st) != 0) {
        return refuse_adapter(path, FANIN_ERR_IO, strerror(errno));
    }
    out->map_size = (size_t)st.st_size;
    out->map = mmap(NULL, out->map_size, PROT_READ, MAP_SHARED, descriptor, 0);
    if (out->map == MAP_FAILED) {
        out->map = NULL;
        return refuse_adapter(path, FANIN_ERR_IO, strerror(errno));
    }
    size_t count = fanin_safetensors_count(out->file);
    out->tensors.tensors = calloc(count + 1, sizeof out->tensors.tensors[0]);
    if (out->tensors.tensors == NULL) {
        return refuse_adapter(path, FANIN_ERR_IO, "no memory for its tensors");
    }
    for (size_t i = 0; i < count; i++) {
        fanin_safetensors_entry entry = {.struct_size = sizeof entry};
        tensor_spec *t = &out->tensors.tensors[i];
        if (!fanin_safetensors_get(out->file, i, &entry) ||
            entry.bytes > out->map_size || entry.offset > out->map_size - entry.bytes) {
            return refuse_adapter(path, FANIN_ERR_IO, "it changed while it was read");
        }
        *t = (tensor_spec){.name = entry.name,
                           .dtype = entry.dtype,
                           .n_dims = entry.n_dims,
                           .bytes = entry.bytes,
                           .data = (const uint8_t *)out->map + entry.offset};
        memcpy(t->shape, entry.shape, sizeof t->shape);
        out->tensors.bytes += entry.bytes;
    }
    out->tensors.count = count;
    return 0;
}

static int open_adapter(const command *self, const source_options *options, source *out)
{
    char path[4096];
    if (options->model != NULL || options->shape != NULL || options->fused ||
        options->r != 0 || options->dtype != NULL) {
        return failure_usage(self->name, "--adapter excludes --model, --adapter-shape, "
                                         "--r, --fused and --dtype");
    }
    snprintf(path, sizeof path, "%s/adapter_config.json", options->adapter);
    int code = read_config(path, out);
    if (code == 0) {
        snprintf(path, sizeof path, "%s/adapter_model.safetensors", options->adapter);
        code = map_tensors(path, out);
    }
    return code;
}

int source_open(const command *self, const source_options *options,
                const char *fallback, source *out)
{
    *out = (source){0};
    if (options->adapter != NULL) {
        return open_adapter(self, options, out);
    }
    if (options->model == NULL && options->shape == NULL && fallback == NULL) {
        return failure_usage(
            self->name, "say what to serve: --model, --adapter-shape or --adapter");
    }
    return open_model(self, options, fallback, out);
}

void source_close(source *s)
{
    tensor_list_free(&s->tensors);
    free(s->config);
    if (s->map != NULL) {
        munmap(s->map, s->map_size);
    }
    fanin_safetensors_close(&s->file);
}
