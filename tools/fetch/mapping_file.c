/* SPDX-License-Identifier: Apache-2.0 */
#include "fetch/mapping_file.h"
#include "fetch/failure.h"
#include "fetch/pattern.h"
#include "fetch/output.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define FORMAT "fanin-mapping/1"
/* Beyond it sums of products could overflow. */
#define MOST (UINT64_C(1) << 62)

/* The document, where in it the reading is, and what is wrong. */
typedef struct reading {
    const char *path;
    char where[192];
    fanin_error *error;
} reading;

static bool mapping_wrong(const reading *r, const char *field, const char *what)
{
    failure_set(r->error, FANIN_ERR_ARGUMENT, "save the mapping again",
                "%.300s: %s%s%s %s", r->path, r->where,
                r->where[0] != '\0' && field[0] != '\0' ? "." : "", field, what);
    return false;
}

static const char *text(const reading *r, const json_t *object, const char *field)
{
    const char *value = json_string_value(json_object_get(object, field));
    if (value == NULL)
        mapping_wrong(r, field, "is no string");
    return value;
}

static bool mapping_number(const reading *r, const json_t *value, const char *field,
                           uint64_t *out)
{
    if (!json_is_integer(value) || json_integer_value(value) < 0 ||
        (uint64_t)json_integer_value(value) >= MOST)
        return mapping_wrong(r, field, "is no integer from 0 on");
    *out = (uint64_t)json_integer_value(value);
    return true;
}

static bool numbers(const reading *r, const json_t *object, const char *field,
                    uint32_t count, uint64_t out[FANIN_MAX_DIMS])
{
    const json_t *list = json_object_get(object, field);
    if (!json_is_array(list) || json_array_size(list) != count)
        return mapping_wrong(r, field, "does not have a number for each dimension");
    for (uint32_t d = 0; d < count; d++)
        if (!mapping_number(r, json_array_get(list, d), field, &out[d]))
            return false;
    return true;
}

/* "shape", which says how many dimensions there are. */
static bool mapping_read_shape(const reading *r, const json_t *object, uint32_t *n_dims,
                               uint64_t out[FANIN_MAX_DIMS])
{
    size_t count = json_array_size(json_object_get(object, "shape"));
    if (count > FANIN_MAX_DIMS)
        return mapping_wrong(r, "shape", "has more than 8 dimensions");
    *n_dims = (uint32_t)count;
    return numbers(r, object, "shape", *n_dims, out);
}

static bool read_dtype(const reading *r, const json_t *object, fanin_dtype *out)
{
    const char *name = text(r, object, "dtype");
    if (name == NULL)
        return false;
    *out = fanin_dtype_from_name(name);
    return *out != 0 || mapping_wrong(r, "dtype", "is no element type");
}

static uint64_t mapping_size_of(fanin_dtype dtype)
{
    uint64_t bits = fanin_dtype_bits(dtype);
    return bits < 8 ? 1 : bits / 8;
}

/* Bytes from the first element's first to the last one's last; UINT64_MAX: more than there are. */
static uint64_t span_of(uint32_t n_dims, const uint64_t *extent, const uint64_t *stride,
                        fanin_dtype dtype)
{
    uint64_t span = mapping_size_of(dtype);
    for (uint32_t d = 0; d < n_dims; d++) {
        if (extent[d] == 0)
            return 0;
        uint64_t reach;
        if (__builtin_mul_overflow(extent[d] - 1, stride[d], &reach) ||
            __builtin_add_overflow(span, reach, &span) || span >= MOST)
            return UINT64_MAX;
    }
    return span;
}

static bool mapping_read_box(const reading *r, const json_t *from,
                             const mapping_source *s, const mapping_tensor *t,
                             mapping_box *out)
{
    uint64_t stride[FANIN_MAX_DIMS] = {0};
    if (!numbers(r, from, "offset", s->n_dims, out->offset) ||
        !numbers(r, from, "extent", s->n_dims, out->extent) ||
        !numbers(r, from, "stride", s->n_dims, stride) ||
        !mapping_number(r, json_object_get(from, "at"), "at", &out->at))
        return false;
    uint64_t size = mapping_size_of(t->dtype);
    bool whole = out->at % size == 0;
    for (uint32_t d = 0; d < s->n_dims; d++) {
        if (out->extent[d] < 1 || out->extent[d] > s->shape[d] ||
            out->offset[d] > s->shape[d] - out->extent[d])
            return mapping_wrong(r, "offset",
                                 "and extent are not inside of the source's shape");
        if (out->extent[d] > 1 && stride[d] == 0)
            return mapping_wrong(r, "stride", "writes elements over each other");
        whole = whole && stride[d] % size == 0;
        out->stride[d] = (int64_t)stride[d];
    }
    uint64_t span = span_of(s->n_dims, out->extent, stride, t->dtype);
    if (span > t->span || out->at > t->span - span)
        return mapping_wrong(r, "at", "and stride end after the tensor");
    return whole || mapping_wrong(r, "at", "and stride are not of whole elements");
}

/* Equal, or what a pull or the engine makes of it. */
static bool mapping_fits(fanin_dtype from, fanin_dtype to)
{
    return from == to || half_converts(from, to) || half_converts(to, from);
}

static bool read_source(reading *r, const json_t *from, const mapping_tensor *t,
                        mapping_source *out)
{
    uint64_t all = 0;
    size_t length = strlen(r->where);
    const json_t *boxes = json_object_get(from, "boxes");
    out->name = text(r, from, "name");
    if (out->name == NULL || !read_dtype(r, from, &out->dtype) ||
        !mapping_read_shape(r, from, &out->n_dims, out->shape))
        return false;
    if (!mapping_fits(out->dtype, t->dtype))
        return mapping_wrong(r, "dtype", "does not become that of the parameter");
    if (json_array_size(boxes) == 0)
        return mapping_wrong(r, "boxes", "is empty");
    out->n_boxes = json_array_size(boxes);
    out->boxes = output_require(calloc(out->n_boxes, sizeof out->boxes[0]));
    for (size_t i = 0; i < out->n_boxes; i++) {
        uint64_t elements = 1;
        output_append(r->where, sizeof r->where, ".boxes[%zu]", i);
        if (!mapping_read_box(r, json_array_get(boxes, i), out, t, &out->boxes[i]))
            return false;
        r->where[length] = '\0';
        bool large = false;
        for (uint32_t d = 0; d < out->n_dims; d++)
            large =
                __builtin_mul_overflow(elements, out->boxes[i].extent[d], &elements) ||
                elements >= MOST || large;
        all += elements;
        if (large || all >= MOST)
            return mapping_wrong(r, "boxes", "are larger than any memory");
    }
    return true;
}

static bool read_tensor(reading *r, const json_t *from, mapping_tensor *out)
{
    size_t length = strlen(r->where);
    const json_t *sources = json_object_get(from, "sources");
    out->name = text(r, from, "name");
    if (out->name == NULL || text(r, from, "role") == NULL ||
        !read_dtype(r, from, &out->dtype) ||
        !mapping_read_shape(r, from, &out->n_dims, out->shape) ||
        !numbers(r, from, "stride", out->n_dims, out->stride))
        return false;
    out->span = span_of(out->n_dims, out->shape, out->stride, out->dtype);
    if (out->span == UINT64_MAX)
        return mapping_wrong(r, "shape", "and stride are larger than any memory");
    if (json_is_string(json_object_get(from, "own")) && json_array_size(sources) > 0)
        return mapping_wrong(r, "", "is the engine's own and has sources");
    out->n_sources = json_array_size(sources);
    out->sources = output_require(calloc(out->n_sources + 1, sizeof out->sources[0]));
    for (size_t i = 0; i < out->n_sources; i++) {
        output_append(r->where, sizeof r->where, ".sources[%zu]", i);
        if (!read_source(r, json_array_get(sources, i), out, &out->sources[i]))
            return false;
        r->where[length] = '\0';
    }
    return true;
}

static bool read_module(reading *r, const json_t *from, mapping_module *out)
{
    size_t length = strlen(r->where);
    const json_t *tensors = json_object_get(from, "tensors");
    const json_t *fallback = json_object_get(from, "fallback");
    out->path = text(r, from, "path");
    if (out->path == NULL || text(r, from, "class") == NULL)
        return false;
    if (fallback != NULL) {
        out->fallback = text(r, fallback, "why");
        if (out->fallback == NULL || !json_is_array(json_object_get(fallback, "taken")))
            return mapping_wrong(r, "fallback", "does not say why, and what is taken");
    }
    if (!json_is_array(tensors))
        return mapping_wrong(r, "tensors", "is no list");
    out->n_tensors = json_array_size(tensors);
    out->tensors = output_require(calloc(out->n_tensors + 1, sizeof out->tensors[0]));
    for (size_t i = 0; i < out->n_tensors; i++) {
        output_append(r->where, sizeof r->where, ".tensors[%zu]", i);
        if (!read_tensor(r, json_array_get(tensors, i), &out->tensors[i]))
            return false;
        r->where[length] = '\0';
    }
    return true;
}

/* A text of the document, or of an object in it. */
static bool has_text(reading *r, const json_t *root, const char *object,
                     const char *field)
{
    snprintf(r->where, sizeof r->where, "%s", object);
    root = object[0] != '\0' ? json_object_get(root, object) : root;
    bool there = text(r, root, field) != NULL;
    r->where[0] = '\0';
    return there;
}

/* What Python tells, and nothing here needs. */
static bool check_about(reading *r, const json_t *root)
{
    const json_t *published = json_object_get(root, "published");
    uint64_t count;
    if (!has_text(r, root, "", "format"))
        return false;
    if (strcmp(json_string_value(json_object_get(root, "format")), FORMAT) != 0)
        return mapping_wrong(r, "format", "is not \"" FORMAT "\"");
    if (!has_text(r, root, "engine", "name") ||
        !has_text(r, root, "engine", "version") || !has_text(r, root, "", "model") ||
        !has_text(r, root, "published", "digest"))
        return false;
    if (!json_is_object(json_object_get(root, "ranks")) ||
        !json_is_array(json_object_get(published, "unwanted")))
        return mapping_wrong(r, "", "lacks \"ranks\" or \"published.unwanted\"");
    return mapping_number(r, json_object_get(published, "count"), "published.count",
                          &count);
}

static bool mapping_read_all(reading *r, mapping_file *m)
{
    const json_t *modules = json_object_get(m->root, "modules");
    if (!check_about(r, m->root))
        return false;
    if (!json_is_array(modules))
        return mapping_wrong(r, "modules", "is no list");
    m->n_modules = json_array_size(modules);
    m->modules = output_require(calloc(m->n_modules + 1, sizeof m->modules[0]));
    for (size_t i = 0; i < m->n_modules; i++) {
        snprintf(r->where, sizeof r->where, "modules[%zu]", i);
        if (!read_module(r, json_array_get(modules, i), &m->modules[i]))
            return false;
    }
    return true;
}

static json_t *mapping_load(const char *path, fanin_error *error)
{
    json_error_t why;
    int reason;
    json_t *root = json_file_read(path, JSON_FILE_ANY, &why, &reason);
    if (reason != 0) {
        failure_set(error, reason == ENOENT ? FANIN_ERR_NOT_FOUND : FANIN_ERR_IO,
                    "give the file of a mapping", "%.300s: %s", path, why.text);
        return NULL;
    }
    if (!json_is_object(root)) {
        json_decref(root);
        failure_set(error, FANIN_ERR_ARGUMENT, "give the file of a mapping",
                    "%.300s is no mapping: %s", path,
                    why.text[0] != '\0' ? why.text : "no JSON object");
        return NULL;
    }
    return root;
}

fanin_status mapping_read(const char *path, mapping_file *out, fanin_error *error)
{
    reading r = {.path = path, .error = error};
    *out = (mapping_file){.root = mapping_load(path, error)};
    if (out->root != NULL && mapping_read_all(&r, out))
        return FANIN_OK;
    mapping_free(out);
    return error->status;
}

static void free_tensor(mapping_tensor *t)
{
    for (size_t i = 0; t->sources != NULL && i < t->n_sources; i++)
        free(t->sources[i].boxes);
    free(t->sources);
}

void mapping_free(mapping_file *m)
{
    for (size_t i = 0; m->modules != NULL && i < m->n_modules; i++) {
        mapping_module *module = &m->modules[i];
        for (size_t j = 0; module->tensors != NULL && j < module->n_tensors; j++)
            free_tensor(&module->tensors[j]);
        free(module->tensors);
    }
    free(m->modules);
    json_decref(m->root);
    *m = (mapping_file){.root = NULL};
}
