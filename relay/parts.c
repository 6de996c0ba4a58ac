/* SPDX-License-Identifier: Apache-2.0 */
#include "parts.h"

#include "array.h"
#include "block.h"
#include "dtype.h"
#include "error_set.h"
#include "versioned.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define OWN_NAME 9 /* "%08x" */
#define PARTS_MOST ((size_t)1 << 20)

/* One box of the caller's, with the strides that it means. */
typedef struct wanted_box {
    const fanin_tensor *tensor;
    const fanin_box *box;
    bool packed;
    int64_t
        stride[FANIN_MAX_DIMS]; /* bytes between neighbours, of units of the dtype */
    uint64_t bytes;
    size_t name; /* where the copy of the tensor's begins */
} wanted_box;

typedef struct cutter {
    fanin_tensor *tensors; /* the caller's, of this version's size */
    wanted_box *wanted;
    size_t n_wanted, names_size;
    fanin_box *boxes; /* of parts */
    uint32_t *of;     /* which wanted box each is of */
    size_t n, capacity, of_capacity;
    parts *out;
} cutter;

/* ----------------------------------------------------------------- the caller's */

static fanin_status refuse_wanted(const fanin_tensor *t, fanin_error *error)
{
    error_place place = {.phase = "plan", .key = t->name};
    return error_set(error, FANIN_ERR_ARGUMENT, &place,
                     "a box of the tensor is beyond its shape, has no address, or cuts "
                     "packed elements");
}

/* FANIN_OK without adding anything if the box is empty. */
static fanin_status add_wanted(cutter *c, const fanin_tensor *t, const fanin_box *box,
                               fanin_error *error)
{
    block b = {.n_dims = t->n_dims}, units;
    dtype_unit unit = dtype_get_unit(t->dtype);
    memcpy(b.offset, box->offset, t->n_dims * sizeof *b.offset);
    memcpy(b.extent, box->extent, t->n_dims * sizeof *b.extent);
    if (t->n_dims > 0 && block_is_empty(&b))
        return FANIN_OK;
    wanted_box *w = &c->wanted[c->n_wanted];
    *w = (wanted_box){.tensor = t, .box = box, .packed = true};
    if (!box->address || !block_inside(&b, t->shape) ||
        !block_in_units(&b, unit.elements, &units) ||
        !dtype_bytes(t->dtype, t->n_dims, box->extent, &w->bytes))
        return refuse_wanted(t, error);
    for (uint32_t d = 0; d < t->n_dims; d++)
        w->packed = w->packed && box->stride[d] == 0;
    if (w->packed)
        block_packed_strides(t->n_dims, units.extent, unit.bytes, w->stride);
    else
        memcpy(w->stride, box->stride, t->n_dims * sizeof *w->stride);
    c->out->bytes += w->bytes;
    c->n_wanted++;
    return FANIN_OK;
}

static int compare_lines(const uint64_t *a, const uint64_t *b, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++) {
        if (a[i] != b[i])
            return a[i] < b[i] ? -1 : 1;
    }
    return 0;
}

/* By what is the same on all readers. */
static int compare_wanted(const void *left, const void *right)
{
    const wanted_box *a = left, *b = right;
    int order = strcmp(a->tensor->name, b->tensor->name);
    if (order == 0)
        order = compare_lines(a->box->offset, b->box->offset, a->tensor->n_dims);
    return order ? order
                 : compare_lines(a->box->extent, b->box->extent, a->tensor->n_dims);
}

static fanin_status collect_wanted(cutter *c, const fanin_tensor *tensors, size_t count,
                                   fanin_error *error)
{
    size_t boxes = 0;
    fanin_status status = FANIN_OK;
    c->tensors = calloc(count, sizeof *c->tensors);
    for (size_t i = 0; c->tensors && i < count; i++) {
        fanin_tensor *t = &c->tensors[i];
        versioned_element(t, sizeof *t, tensors, i);
        if (!t->name || t->n_dims > FANIN_MAX_DIMS || !fanin_dtype_name(t->dtype) ||
            (t->n_boxes > 0 && !t->boxes))
            return error_set(error, FANIN_ERR_ARGUMENT, NULL,
                             "tensor %zu: name, dtype, dimensions or boxes are invalid",
                             i);
        boxes += t->n_boxes;
    }
    c->wanted = calloc(boxes + 1, sizeof *c->wanted);
    if (!c->tensors || !c->wanted)
        return error_set_memory(error);
    for (size_t i = 0; i < count; i++) {
        const fanin_tensor *t = &c->tensors[i];
        for (size_t j = 0; j < t->n_boxes && status == FANIN_OK; j++)
            status = add_wanted(c, t, &t->boxes[j], error);
    }
    if (status == FANIN_OK && c->n_wanted == 0)
        status = error_set(error, FANIN_ERR_ARGUMENT, NULL,
                           "no tensor has a box that is not empty");
    qsort(c->wanted, c->n_wanted, sizeof *c->wanted, compare_wanted);
    return status;
}

/* ------------------------------------------------------------------------ cutting */

static bool add_part(cutter *c, size_t of, const fanin_box *box)
{
    if (!array_reserve(&c->boxes, &c->capacity, c->n + 1, sizeof *c->boxes) ||
        !array_reserve(&c->of, &c->of_capacity, c->n + 1, sizeof *c->of))
        return false;
    c->of[c->n] = (uint32_t)of;
    c->boxes[c->n++] = *box;
    return true;
}

/* Cuts along dimension @p d, then along the next ones where one row is still too much. What lies
   before it has one row. False: no memory, or too many. */
static bool cut(cutter *c, size_t of, const fanin_box *box, uint32_t d)
{
    const wanted_box *w = &c->wanted[of];
    const fanin_tensor *t = w->tensor;
    dtype_unit unit = dtype_get_unit(t->dtype);
    uint64_t bytes = 0;
    if (c->n >= PARTS_MOST || !dtype_bytes(t->dtype, t->n_dims, box->extent, &bytes))
        return false;
    while (d < t->n_dims && box->extent[d] == 1)
        d++;
    if (bytes <= c->out->unit_bytes || d == t->n_dims)
        return add_part(c, of, box);
    uint64_t step = d + 1 == t->n_dims ? unit.elements : 1;
    uint64_t rows = box->extent[d] / step, row = bytes / rows;
    uint64_t most = row < c->out->unit_bytes ? c->out->unit_bytes / row : 1;
    bool good = true;
    for (uint64_t at = 0; at < rows && good; at += most) {
        fanin_box some = *box;
        some.offset[d] += at * step;
        some.extent[d] = (rows - at < most ? rows - at : most) * step;
        some.address =
            (void *)((uintptr_t)box->address + (uintptr_t)((int64_t)at * w->stride[d]));
        good = cut(c, of, &some, d + 1);
    }
    return good;
}

static uint64_t choose_unit(uint64_t bytes)
{
    uint64_t share = bytes / PARTS_UNITS;
    uint64_t unit = (share + PARTS_UNIT_STEP - 1) / PARTS_UNIT_STEP * PARTS_UNIT_STEP;
    if (unit < PARTS_UNIT_STEP)
        unit = PARTS_UNIT_STEP;
    return unit < PARTS_UNIT_MOST ? unit : PARTS_UNIT_MOST;
}

/* ----------------------------------------------------------------------- describing */

static void describe_part(const cutter *c, size_t i)
{
    parts *p = c->out;
    const wanted_box *w = &c->wanted[c->of[i]];
    fanin_tensor *t = &p->origin[i], *own = &p->own[i];
    fanin_box *box = &p->boxes[i], *own_box = &p->boxes[p->n + i];
    *box = c->boxes[i];
    *t = *w->tensor;
    t->struct_size = sizeof *t;
    t->name = p->names + w->name;
    t->boxes = box;
    t->n_boxes = 1;
    *own = *t;
    own->name = p->names + c->names_size + i * OWN_NAME;
    own->boxes = own_box;
    own->flags = 0;
    *own_box = *box;
    memset(own_box->offset, 0, sizeof own_box->offset);
    memset(own->shape, 0, sizeof own->shape);
    memcpy(own->shape, box->extent, t->n_dims * sizeof *own->shape);
    snprintf(p->names + c->names_size + i * OWN_NAME, OWN_NAME, "%08x", (unsigned)i);
}

/* The names of the tensors, then those of parts. */
static size_t place_names(cutter *c)
{
    size_t size = 0;
    for (size_t i = 0; i < c->n_wanted; i++) {
        wanted_box *w = &c->wanted[i];
        bool same = i > 0 && strcmp(w->tensor->name, w[-1].tensor->name) == 0;
        w->name = same ? w[-1].name : size;
        size += same ? 0 : strlen(w->tensor->name) + 1;
    }
    return c->names_size = size;
}

static void form_units(parts *p)
{
    p->n_units = 0;
    for (size_t i = 0; i < p->n; i++) {
        uint64_t bytes = 0;
        dtype_bytes(p->own[i].dtype, p->own[i].n_dims, p->own[i].shape, &bytes);
        bool fits =
            p->n_units > 0 && p->unit_size[p->n_units - 1] + bytes <= p->unit_bytes;
        if (!fits) {
            p->unit_first[p->n_units] = (uint32_t)i;
            p->unit_size[p->n_units++] = 0;
        }
        p->unit_size[p->n_units - 1] += bytes;
        p->unit_of[i] = (uint32_t)(p->n_units - 1);
    }
    p->unit_first[p->n_units] = (uint32_t)p->n;
}

/* What is digested of one part besides its name. */
typedef struct identity {
    digest before;
    uint64_t dtype, n_dims;
    uint64_t shape[FANIN_MAX_DIMS], offset[FANIN_MAX_DIMS], extent[FANIN_MAX_DIMS];
    digest name;
} identity;

static digest digest_holding(const parts *p)
{
    digest d = digest_of(&p->unit_bytes, sizeof p->unit_bytes);
    for (size_t i = 0; i < p->n; i++) {
        const fanin_tensor *t = &p->origin[i];
        identity id;
        memset(&id, 0, sizeof id);
        id.before = d;
        id.dtype = (uint64_t)t->dtype;
        id.n_dims = t->n_dims;
        memcpy(id.shape, t->shape, t->n_dims * sizeof *id.shape);
        memcpy(id.offset, t->boxes->offset, t->n_dims * sizeof *id.offset);
        memcpy(id.extent, t->boxes->extent, t->n_dims * sizeof *id.extent);
        id.name = digest_of(t->name, strlen(t->name));
        d = digest_of(&id, sizeof id);
    }
    return d;
}

static fanin_status describe(cutter *c, fanin_error *error)
{
    parts *p = c->out;
    size_t names = place_names(c);
    p->n = c->n;
    p->origin = calloc(p->n, sizeof *p->origin);
    p->own = calloc(p->n, sizeof *p->own);
    p->boxes = calloc(p->n, 2 * sizeof *p->boxes);
    p->names = malloc(names + p->n * OWN_NAME);
    p->unit_first = calloc(p->n + 1, sizeof *p->unit_first);
    p->unit_size = calloc(p->n, sizeof *p->unit_size);
    p->unit_of = calloc(p->n, sizeof *p->unit_of);
    if (!p->origin || !p->own || !p->boxes || !p->names || !p->unit_first ||
        !p->unit_size || !p->unit_of)
        return error_set_memory(error);
    for (size_t i = 0; i < c->n_wanted; i++)
        memcpy(p->names + c->wanted[i].name, c->wanted[i].tensor->name,
               strlen(c->wanted[i].tensor->name) + 1);
    for (size_t i = 0; i < p->n; i++)
        describe_part(c, i);
    form_units(p);
    p->holding = digest_holding(p);
    return FANIN_OK;
}

/* --------------------------------------------------------------------------- all of it */

static fanin_status cut_all(cutter *c, fanin_error *error)
{
    for (size_t i = 0; i < c->n_wanted; i++) {
        if (cut(c, i, c->wanted[i].box, 0))
            continue;
        error_place place = {.remedy = "use larger units, or pull fewer tensors"};
        return c->n < PARTS_MOST
                   ? error_set_memory(error)
                   : error_set(error, FANIN_ERR_LIMIT, &place,
                               "a relay hands on at most %zu parts", PARTS_MOST);
    }
    return describe(c, error);
}

fanin_status parts_cut(parts *out, const fanin_tensor *tensors, size_t count,
                       uint64_t unit_bytes, fanin_error *error)
{
    cutter c = {.out = out};
    *out = (parts){0};
    if (!tensors || count == 0 || count > PARTS_MOST ||
        tensors->struct_size < TENSOR_LEAST)
        return error_set(error, FANIN_ERR_ARGUMENT, NULL,
                         "no tensors were given, more than %zu, or their struct_size "
                         "is not set",
                         PARTS_MOST);
    fanin_status status = collect_wanted(&c, tensors, count, error);
    out->unit_bytes = unit_bytes > 0 ? unit_bytes : choose_unit(out->bytes);
    if (status == FANIN_OK)
        status = cut_all(&c, error);
    free(c.tensors);
    free(c.wanted);
    free(c.boxes);
    free(c.of);
    if (status != FANIN_OK)
        parts_free(out);
    return status;
}

void parts_free(parts *p)
{
    free(p->origin);
    free(p->own);
    free(p->boxes);
    free(p->names);
    free(p->unit_first);
    free(p->unit_size);
    free(p->unit_of);
    *p = (parts){0};
}

bool parts_same_memory(const parts *a, const parts *b)
{
    if (a->n != b->n || !digest_equal(&a->holding, &b->holding))
        return false;
    for (size_t i = 0; i < a->n; i++) {
        const fanin_tensor *x = &a->own[i], *y = &b->own[i];
        if (x->boxes->address != y->boxes->address ||
            memcmp(x->boxes->stride, y->boxes->stride, sizeof x->boxes->stride) != 0 ||
            x->memory.kind != y->memory.kind || x->memory.device != y->memory.device)
            return false;
    }
    return true;
}
