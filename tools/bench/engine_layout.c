/* SPDX-License-Identifier: Apache-2.0 */
#include "bench/engine_layout.h"
#include "fetch/failure.h"
#include "fetch/output.h"

#include <stdlib.h>
#include <string.h>

void engine_layout_free(engine_layout *l)
{
    free(l->boxes);
    free(l->parameters);
    *l = (engine_layout){.boxes = NULL};
}

static placed_box *add_box(engine_layout *l)
{
    l->boxes = output_room(l->boxes, l->count, &l->capacity, sizeof l->boxes[0]);
    l->boxes[l->count] = (placed_box){.tensor = 0};
    return &l->boxes[l->count++];
}

static size_t add_parameter(engine_layout *l)
{
    l->parameters = output_room(l->parameters, l->n_parameters, &l->parameter_capacity,
                                sizeof l->parameters[0]);
    l->parameters[l->n_parameters] = (placed_parameter){.bytes = 0};
    return l->n_parameters++;
}

uint64_t engine_tensor_bytes(const fanin_tensor *t, const uint64_t *extent)
{
    uint64_t bits = fanin_dtype_bits(t->dtype);
    for (uint32_t d = 0; d < t->n_dims; d++) {
        bits *= extent[d];
    }
    return bits / 8;
}

void engine_layout_add_whole(engine_layout *l, const fanin_tensor *tensors, size_t i)
{
    uint64_t bytes = engine_tensor_bytes(&tensors[i], tensors[i].shape);
    if (bytes > 0) {
        size_t parameter = add_parameter(l);
        placed_box *b = add_box(l);
        b->tensor = i;
        b->parameter = parameter;
        memcpy(b->box.extent, tensors[i].shape, sizeof b->box.extent);
        l->parameters[parameter].bytes = bytes;
    }
}

/* ------------------------------------------------------------------ a mapping */

static int engine_layout_by_name(const void *a, const void *b)
{
    const fanin_tensor *const *x = a;
    const fanin_tensor *const *y = b;
    return strcmp((*x)->name, (*y)->name);
}

/* NULL after an error. */
static const fanin_tensor *find_tensor(const fanin_tensor **sorted, size_t count,
                                       const mapping_source *s, fanin_error *error)
{
    const fanin_tensor key = {.name = s->name};
    const fanin_tensor *wanted = &key;
    const fanin_tensor **found =
        count > 0
            ? bsearch(&wanted, sorted, count, sizeof sorted[0], engine_layout_by_name)
            : NULL;
    if (found == NULL || (*found)->n_dims != s->n_dims ||
        memcmp((*found)->shape, s->shape, s->n_dims * sizeof s->shape[0]) != 0) {
        failure_set(error, FANIN_ERR_MISMATCH,
                    "record the mapping for what is published",
                    "%s of the mapping is %s", s->name,
                    found == NULL ? "not published" : "published with another shape");
        return NULL;
    }
    return *found;
}

/* Packed ones lie as bytes. */
static uint32_t element_bits(fanin_dtype dtype)
{
    uint32_t bits = fanin_dtype_bits(dtype);
    return bits < 8 ? 8 : bits;
}

/* Bytes where elements have @p to bits that are @p bytes where they have @p from. */
static uint64_t narrowed(uint64_t bytes, uint32_t from, uint32_t to)
{
    return bytes / (from / 8) *
           (to / 8); /* whole elements, as the mapping was checked */
}

static void place_source(engine_layout *l, const fanin_tensor *tensors,
                         const fanin_tensor *t, const mapping_tensor *parameter,
                         const mapping_source *s)
{
    uint32_t from = element_bits(parameter->dtype);
    uint32_t to = element_bits(t->dtype);
    size_t index = l->n_parameters - 1;
    uint64_t span = narrowed(parameter->span, from, to);
    placed_parameter *p = &l->parameters[index];
    p->bytes = span > p->bytes ? span : p->bytes;
    for (size_t i = 0; i < s->n_boxes; i++) {
        const mapping_box *b = &s->boxes[i];
        placed_box *out = add_box(l);
        out->tensor = (size_t)(t - tensors);
        out->parameter = index;
        out->at = narrowed(b->at, from, to);
        memcpy(out->box.offset, b->offset, sizeof b->offset);
        memcpy(out->box.extent, b->extent, sizeof b->extent);
        for (uint32_t d = 0; d < s->n_dims; d++) {
            out->box.stride[d] = (int64_t)narrowed((uint64_t)b->stride[d], from, to);
        }
    }
}

static int by_tensor(const void *a, const void *b)
{
    const placed_box *x = a;
    const placed_box *y = b;
    if (x->tensor != y->tensor) {
        return x->tensor < y->tensor ? -1 : 1;
    }
    return (x->parameter > y->parameter) - (x->parameter < y->parameter);
}

static fanin_status place_module(engine_layout *l, const fanin_tensor *tensors,
                                 const fanin_tensor **sorted, size_t count,
                                 const mapping_module *m, fanin_error *error)
{
    if (m->fallback != NULL) {
        return failure_set(error, FANIN_ERR_MISMATCH, "give a mapping of boxes alone",
                           "module '%s' needs the engine's loader: %s", m->path,
                           m->fallback);
    }
    for (size_t i = 0; i < m->n_tensors; i++) {
        const mapping_tensor *parameter = &m->tensors[i];
        if (parameter->n_sources > 0) {
            add_parameter(l);
        }
        for (size_t j = 0; j < parameter->n_sources; j++) {
            const mapping_source *s = &parameter->sources[j];
            const fanin_tensor *t = find_tensor(sorted, count, s, error);
            if (t == NULL) {
                return error->status;
            }
            place_source(l, tensors, t, parameter, s);
        }
    }
    return FANIN_OK;
}

fanin_status engine_layout_of_mapping(const fanin_tensor *tensors, size_t count,
                                      const mapping_file *m, engine_layout *out,
                                      fanin_error *error)
{
    fanin_status status = FANIN_OK;
    *out = (engine_layout){.boxes = NULL};
    const fanin_tensor **sorted = output_require(calloc(count + 1, sizeof sorted[0]));
    for (size_t i = 0; i < count; i++) {
        sorted[i] = &tensors[i];
    }
    qsort(sorted, count, sizeof sorted[0], engine_layout_by_name);
    for (size_t i = 0; status == FANIN_OK && i < m->n_modules; i++) {
        status = place_module(out, tensors, sorted, count, &m->modules[i], error);
    }
    free(sorted);
    if (status != FANIN_OK) {
        engine_layout_free(out);
    } else if (out->count > 0) {
        qsort(out->boxes, out->count, sizeof out->boxes[0], by_tensor);
    }
    return status;
}
