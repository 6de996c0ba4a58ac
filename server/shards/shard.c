/* SPDX-License-Identifier: Apache-2.0 */
#include "shards/shard.h"
#include "array.h"
#include "dtype.h"
#include "error_set.h"
#include "frame.h"
#include "text.h"
#include "versioned.h"

#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ------------------------------------------------------------------ memory */

static fanin_status wrong(fanin_error *error, const char *remedy, const char *format,
                          ...) __attribute__((format(printf, 3, 4)));

static fanin_status wrong(fanin_error *error, const char *remedy, const char *format,
                          ...)
{
    char why[256];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(why, sizeof why, format, arguments);
    va_end(arguments);
    error_place place = {.phase = "publish", .remedy = remedy};
    return error_set(error, FANIN_ERR_ARGUMENT, &place, "%s", why);
}

static const gpu_range in_host_memory = {.memory = {FANIN_MEMORY_HOST, -1}};

static fanin_status range_at(memory_probe *probe, uint64_t address, gpu_range *out,
                             fanin_error *error)
{
    fanin_error why = FANIN_ERROR_INIT;
    if (gpu_find(&probe->finder, (const void *)(uintptr_t)address, out, &why) ==
        FANIN_OK)
        return FANIN_OK;
    return wrong(error,
                 "put memory that is allocated, and leave it so until it is removed",
                 "CUDA knows no allocation at a box's address: %.180s", why.message);
}

static fanin_status check_ends(memory_probe *probe, const shard_box *b,
                               fanin_error *error)
{
    if (gpu_find_holds(&probe->finder, &b->in, b->low, b->high))
        return FANIN_OK;
    return wrong(error, "check the box's address, extent and strides",
                 "a box reaches beyond its allocation of %" PRIu64
                 " bytes on CUDA device %d",
                 b->in.length, (int)b->in.memory.device);
}

/* Box @p index of the shard against what was said and against the first box. */
static fanin_status check_place(fanin_memory said, const shard *s, size_t index,
                                fanin_error *error)
{
    fanin_memory here = s->boxes[index].in.memory, first = s->boxes[0].in.memory;
    char why[160];
    const char *remedy = gpu_contradiction(said, &s->boxes[index].in, why);
    if (remedy)
        return wrong(error, remedy, "%s", why);
    if (here.kind == first.kind && here.device == first.device)
        return FANIN_OK;
    if (here.kind != first.kind)
        return wrong(
            error, "put them as two tensors, or move the one to the other",
            "some boxes of the tensor are in host memory, some on CUDA device %d",
            (int)(here.kind == FANIN_MEMORY_CUDA ? here : first).device);
    return wrong(error, "put them as two tensors, or move the one to the other",
                 "boxes of the tensor are on CUDA devices %d and %d", (int)first.device,
                 (int)here.device);
}

/* What is said to be host memory, against the driver, which may know nothing of it. */
static fanin_status check_host(memory_probe *probe, fanin_memory said,
                               const shard_box *b, fanin_error *error)
{
    gpu_range here;
    char why[160];
    const char *remedy = NULL;
    if (range_at(probe, (uintptr_t)b->first, &here, NULL) == FANIN_OK)
        remedy = gpu_contradiction(said, &here, why);
    return remedy ? wrong(error, remedy, "%s", why) : FANIN_OK;
}

static fanin_status ask(memory_probe *probe, bool needed, fanin_error *error)
{
    if (!probe->asked)
        probe->finder.g = gpu_present();
    probe->asked = true;
    if (!needed || probe->finder.g)
        return FANIN_OK;
    return gpu_load(probe->log, &probe->finder.g, error);
}

static fanin_status shard_locate(memory_probe *probe, fanin_memory said, shard *s,
                                 fanin_error *error)
{
    fanin_status status = FANIN_OK;
    s->memory = in_host_memory.memory;
    if (said.kind != FANIN_MEMORY_DETECT && said.kind != FANIN_MEMORY_HOST &&
        said.kind != FANIN_MEMORY_CUDA)
        return wrong(error, "use one of FANIN_MEMORY_...",
                     "the kind of memory is unknown");
    if (s->n_boxes > 0)
        status = ask(probe, said.kind == FANIN_MEMORY_CUDA, error);
    bool host = said.kind == FANIN_MEMORY_HOST, look = probe->finder.g && !host;
    for (size_t i = 0; status == FANIN_OK && i < s->n_boxes; i++) {
        shard_box *b = &s->boxes[i];
        b->in = in_host_memory;
        if (host && probe->finder.g)
            status = check_host(probe, said, b, error);
        if (look)
            status = range_at(probe, (uintptr_t)b->first, &b->in, error);
        if (status == FANIN_OK && look)
            status = check_place(said, s, i, error);
        if (status == FANIN_OK && b->in.memory.kind == FANIN_MEMORY_CUDA)
            status = check_ends(probe, b, error);
    }
    if (status == FANIN_OK && s->n_boxes > 0)
        s->memory = s->boxes[0].in.memory;
    probe->found_device = probe->found_device || s->memory.kind == FANIN_MEMORY_CUDA;
    return status;
}

void shard_set_log_origins(const shard_set *set, const char *publication,
                           const logger *log)
{
    size_t count[GPU_ORIGIN_MANAGED + 1] = {0}, all = 0;
    for (size_t i = 0; i < set->count; i++)
        for (size_t j = 0; j < set->shards[i]->n_boxes; j++) {
            gpu_origin origin = set->shards[i]->boxes[j].in.origin;
            if (origin == GPU_ORIGIN_HOST || origin == GPU_ORIGIN_MALLOC)
                continue;
            count[origin]++;
            all++;
        }
    if (all == 0)
        return;
    char origins[160];
    text t = text_in(origins, sizeof origins);
    for (int i = GPU_ORIGIN_VIRTUAL; i <= GPU_ORIGIN_MANAGED; i++)
        if (count[i] > 0)
            text_add(&t, "%s%zu of %s", t.used ? ", " : "", count[i],
                     gpu_origin_name((gpu_origin)i));
    log_write(
        log, FANIN_LOG_WARNING, "no-ipc",
        "%s: %zu boxes are in CUDA memory that has no IPC handle (%s): they are served "
        "by stream; run the trainer with "
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False and without "
        "cudaMallocAsync, or commit snapshots",
        publication, all, origins);
}

/* ----------------------------------------------------------------- names */

fanin_status publication_name_check(const char *name, fanin_error *error)
{
    error_place place = {
        .phase = "publish",
        .remedy = "name it \"lora:<run>\", run being 1 to 64 of A-Z a-z 0-9 . _ -"};
    const char *run = NULL;
    if (name && (strncmp(name, "lora:", 5) == 0 || strncmp(name, "full:", 5) == 0))
        run = name + 5;
    size_t length = run ? strspn(run, "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuv"
                                      "wxyz0123456789._-")
                        : 0;
    if (length == 0 || length > FANIN_MAX_RUN || run[length] != '\0' ||
        strcmp(run, ".") == 0 || strcmp(run, "..") == 0)
        return error_set(error, FANIN_ERR_ARGUMENT, &place,
                         "\"%s\" is no name of a publication", name ? name : "");
    return FANIN_OK;
}

static const char *name_fault(const char *name)
{
    if (!name || !*name)
        return "a tensor has no name";
    size_t length = strnlen(name, FANIN_MAX_NAME + 1);
    if (length > FANIN_MAX_NAME)
        return "the tensor's name is longer than 512 bytes";
    for (size_t i = 0; i < length; i++)
        if ((uint8_t)name[i] < 0x20 || name[i] == 0x7f)
            return "the tensor's name holds a control character";
    if (!utf8_valid(name, length))
        return "the tensor's name is not UTF-8";
    return NULL;
}

/* ------------------------------------------------------------- one shard */

typedef struct shard_context {
    const char *publication;
    memory_probe *probe;
    fanin_error *error;
} shard_context;

static fanin_status fault(const shard_context *c, fanin_status status, const char *name,
                          const char *why, const char *remedy)
{
    char key[640];
    snprintf(key, sizeof key, "%s:%.*s", c->publication, FANIN_MAX_NAME,
             name ? name : "");
    error_place place = {.phase = "publish", .key = key, .remedy = remedy};
    return error_set(c->error, status, &place, "%s", why);
}

/* Copies one non-empty box; NULL or what is wrong with it. */
static const char *fill_box(shard_box *out, const fanin_tensor *t, const block *where,
                            const fanin_box *from)
{
    dtype_unit unit = dtype_get_unit(t->dtype);
    block units;
    int64_t packed[FANIN_MAX_DIMS] = {0};
    bool whole = block_in_units(where, unit.elements, &units);
    const uint64_t *extent = units.extent;
    if (!whole && t->n_dims > 0 && where->offset[t->n_dims - 1] % unit.elements != 0)
        return "a box of a packed dtype begins inside a byte";
    if (!whole || !dtype_bytes(t->dtype, t->n_dims, where->extent, &out->bytes) ||
        out->bytes > INT64_MAX)
        return "a box of a packed dtype ends inside a byte";
    block_packed_strides(t->n_dims, extent, unit.bytes, packed);
    bool given = false, differs = false;
    for (uint32_t i = 0; i < t->n_dims; i++) {
        given = given || from->stride[i] != 0;
        differs = differs || (extent[i] > 1 && from->stride[i] != packed[i]);
    }
    out->block = *where;
    out->packed = !given || !differs;
    memcpy(out->stride, packed, sizeof packed);
    /* The stride of a dimension that is one element long means nothing. */
    for (uint32_t i = 0; i < t->n_dims && !out->packed; i++)
        if (extent[i] > 1)
            out->stride[i] = from->stride[i];
    out->first = from->address;
    if (!from->address)
        return "a box that is not empty has the address NULL";
    if (!block_range(t->n_dims, extent, out->stride, unit.bytes, from->address,
                     &out->low, &out->high))
        return "a box reaches beyond the address space";
    return NULL;
}

static int by_first_dim(const void *a, const void *b)
{
    const block *x = *(const block *const *)a, *y = *(const block *const *)b;
    return (x->offset[0] > y->offset[0]) - (x->offset[0] < y->offset[0]);
}

/* Whether two boxes of one shard overlap: a sweep along the first dimension. */
static fanin_status check_overlap(const shard_context *c, const shard *s)
{
    if (s->n_boxes < 2)
        return FANIN_OK;
    if (s->n_dims == 0)
        return fault(c, FANIN_ERR_ARGUMENT, s->name, "a scalar has two boxes", NULL);
    const block **sorted = malloc(s->n_boxes * sizeof *sorted);
    if (!sorted)
        return error_set_memory(c->error);
    for (size_t i = 0; i < s->n_boxes; i++)
        sorted[i] = &s->boxes[i].block;
    qsort(sorted, s->n_boxes, sizeof *sorted, by_first_dim);
    bool overlap = false;
    for (size_t i = 0; i < s->n_boxes && !overlap; i++) {
        uint64_t end = sorted[i]->offset[0] + sorted[i]->extent[0];
        for (size_t j = i + 1; j < s->n_boxes && sorted[j]->offset[0] < end; j++)
            overlap = overlap || block_intersect(sorted[i], sorted[j], NULL);
    }
    free(sorted);
    if (overlap)
        return fault(c, FANIN_ERR_ARGUMENT, s->name, "two boxes of the shard overlap",
                     "list every element once");
    return FANIN_OK;
}

/* What of a description does not depend on its boxes. */
static fanin_status check_tensor(const shard_context *c, const fanin_tensor *t,
                                 uint64_t *bytes_out)
{
    const char *why = name_fault(t->name);
    if (why)
        return fault(c, FANIN_ERR_ARGUMENT, t->name, why, NULL);
    if (dtype_get_unit(t->dtype).bytes == 0)
        return fault(c, FANIN_ERR_ARGUMENT, t->name, "the dtype is unknown",
                     "use one of FANIN_DTYPE_...");
    if (t->n_dims > FANIN_MAX_DIMS)
        return fault(c, FANIN_ERR_ARGUMENT, t->name,
                     "the tensor has more than 8 dimensions", NULL);
    if (!dtype_bytes(t->dtype, t->n_dims, t->shape, bytes_out) ||
        *bytes_out > INT64_MAX)
        return fault(c, FANIN_ERR_ARGUMENT, t->name,
                     "the shape is too large, or ends inside a byte of a packed dtype",
                     NULL);
    if (t->flags & ~(uint32_t)FANIN_TENSOR_KEEP)
        return fault(c, FANIN_ERR_ARGUMENT, t->name, "a flag is unknown",
                     "set all of the tensor's fields, flags to 0 or FANIN_TENSOR_...");
    if (t->n_boxes > 0 && !t->boxes)
        return fault(c, FANIN_ERR_ARGUMENT, t->name, "the array of boxes is NULL",
                     NULL);
    if (t->n_boxes > LIMIT_BOXES)
        return fault(c, FANIN_ERR_LIMIT, t->name,
                     "the shard has more than 4194304 boxes", NULL);
    return FANIN_OK;
}

static fanin_status shard_make(const shard_context *c, const fanin_tensor *t,
                               shard **out)
{
    uint64_t bytes = 0;
    fanin_status status = check_tensor(c, t, &bytes);
    if (status != FANIN_OK)
        return status;
    size_t name_size = strlen(t->name) + 1;
    shard *s = malloc(sizeof *s + t->n_boxes * sizeof s->boxes[0] + name_size);
    if (!s)
        return error_set_memory(c->error);
    *out = s;
    memset(s, 0, sizeof *s);
    s->name = memcpy((char *)&s->boxes[t->n_boxes], t->name, name_size);
    s->dtype = t->dtype;
    s->keep = t->flags & FANIN_TENSOR_KEEP;
    s->n_dims = t->n_dims;
    memcpy(s->shape, t->shape, t->n_dims * sizeof s->shape[0]);
    s->shape_bytes = bytes;
    for (size_t i = 0; i < t->n_boxes; i++) {
        block where = {.n_dims = t->n_dims};
        memcpy(where.offset, t->boxes[i].offset, t->n_dims * sizeof where.offset[0]);
        memcpy(where.extent, t->boxes[i].extent, t->n_dims * sizeof where.extent[0]);
        if (!block_inside(&where, t->shape))
            return fault(c, FANIN_ERR_ARGUMENT, t->name,
                         "a box lies outside of the global shape",
                         "offset and extent count elements of the whole tensor");
        if (block_is_empty(&where))
            continue;
        const char *why = fill_box(&s->boxes[s->n_boxes], t, &where, &t->boxes[i]);
        if (why)
            return fault(c, FANIN_ERR_ARGUMENT, t->name, why, NULL);
        s->n_boxes++;
    }
    fanin_error why = FANIN_ERROR_INIT;
    status = shard_locate(c->probe, t->memory, s, &why);
    if (status != FANIN_OK)
        return fault(c, status, t->name, why.message, why.remedy);
    return check_overlap(c, s);
}

void shard_box_view(const shard *s, const shard_box *b, strided *out)
{
    dtype_unit unit = dtype_get_unit(s->dtype);
    block units;
    int64_t packed[FANIN_MAX_DIMS] = {0};
    block_in_units(&b->block, unit.elements, &units);
    block_packed_strides(s->n_dims, units.extent, unit.bytes, packed);
    strided_init(out, s->n_dims, units.extent, b->stride, packed, unit.bytes);
}

bool shard_equal(const shard *a, const shard *b)
{
    if (a->dtype != b->dtype || a->n_dims != b->n_dims || a->n_boxes != b->n_boxes ||
        a->keep != b->keep || memcmp(a->shape, b->shape, sizeof a->shape) != 0)
        return false;
    for (size_t i = 0; i < a->n_boxes; i++) {
        const shard_box *x = &a->boxes[i], *y = &b->boxes[i];
        if (x->first != y->first || x->in.id != y->in.id ||
            !block_equal(&x->block, &y->block) ||
            memcmp(x->stride, y->stride, sizeof x->stride) != 0)
            return false;
    }
    return true;
}

/* ------------------------------------------------------------------ sets */

static int by_name(const void *a, const void *b)
{
    return strcmp((*(shard *const *)a)->name, (*(shard *const *)b)->name);
}

static bool is_sorted(const shard_set *set)
{
    for (size_t i = 1; i < set->count; i++)
        if (strcmp(set->shards[i - 1]->name, set->shards[i]->name) > 0)
            return false;
    return true;
}

fanin_status shard_set_build(memory_probe *probe, const char *publication,
                             const fanin_tensor *tensors, size_t count, shard_set *out,
                             fanin_error *error)
{
    shard_context c = {.publication = publication, .probe = probe, .error = error};
    memset(out, 0, sizeof *out);
    if (count == 0)
        return FANIN_OK;
    if (!tensors || tensors->struct_size < TENSOR_LEAST)
        return fault(&c, FANIN_ERR_ARGUMENT, "", "the tensors' struct_size is not set",
                     "set it to sizeof(fanin_tensor) in every element");
    if (count > LIMIT_KEYS)
        return fault(&c, FANIN_ERR_LIMIT, "", "more than 1048576 tensors", NULL);
    out->shards = calloc(count, sizeof *out->shards);
    if (!out->shards)
        return error_set_memory(error);
    out->capacity = count;
    for (size_t i = 0; i < count; i++) {
        const fanin_tensor *given =
            (const void *)((const char *)tensors + i * tensors->struct_size);
        fanin_tensor t;
        if (given->struct_size != tensors->struct_size)
            return fault(&c, FANIN_ERR_ARGUMENT, "",
                         "the tensors' struct_size is not the same in all elements",
                         "set it to sizeof(fanin_tensor) in every element");
        shard *made = NULL;
        versioned_element(&t, sizeof t, tensors, i);
        fanin_status status = shard_make(&c, &t, &made);
        if (made) {
            out->shards[out->count++] = made;
            out->n_boxes += made->n_boxes;
        }
        if (status != FANIN_OK)
            return status;
    }
    if (!is_sorted(out))
        qsort(out->shards, out->count, sizeof *out->shards, by_name);
    for (size_t i = 1; i < out->count; i++)
        if (strcmp(out->shards[i - 1]->name, out->shards[i]->name) == 0)
            return fault(&c, FANIN_ERR_ARGUMENT, out->shards[i]->name,
                         "the name is there twice in one call", NULL);
    return FANIN_OK;
}

void shard_set_free(shard_set *set)
{
    for (size_t i = 0; i < set->count; i++)
        free(set->shards[i]);
    free(set->shards);
    memset(set, 0, sizeof *set);
}

static int compare_name(const void *key, const void *element)
{
    return strcmp(key, (*(shard *const *)element)->name);
}

const char *shard_set_holder(const shard_set *set, uint64_t address)
{
    for (size_t i = 0; i < set->count; i++) {
        const shard *s = set->shards[i];
        for (size_t j = 0; j < s->n_boxes; j++)
            if (address >= s->boxes[j].low && address < s->boxes[j].high)
                return s->name;
    }
    return "a tensor";
}

ptrdiff_t shard_set_find(const shard_set *set, const char *name)
{
    /* Names often arrive in order. */
    if (set->count > 0 && strcmp(set->shards[set->count - 1]->name, name) < 0)
        return -1 - (ptrdiff_t)set->count;
    bool found;
    ptrdiff_t at = (ptrdiff_t)array_search(name, set->shards, set->count,
                                           sizeof *set->shards, compare_name, &found);
    return found ? at : -1 - at;
}
