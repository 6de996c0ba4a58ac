/* SPDX-License-Identifier: Apache-2.0 */
/* Pulling into memory of the caller. */
#include "dtype.h"
#include "error_set.h"
#include "pull.h"
#include <stdlib.h>
#include <string.h>

#define PAGE ((uintptr_t)4096)

typedef struct memory_destination {
    const fanin_tensor *tensors;
    size_t count;
    plan_target *targets;
    size_t n_targets;
    memory_range *ranges;
    size_t n_ranges;
} memory_destination;

/* The caller's array may have larger elements than this version knows. */
static const fanin_tensor *tensor_at(const memory_destination *m, size_t index)
{
    return (const fanin_tensor *)((const char *)m->tensors +
                                  index * m->tensors->struct_size);
}

static digest layout(void *cookie)
{
    const memory_destination *m = cookie;
    buffer b = {0};
    buffer_reserve(&b, m->count * 384);
    for (size_t i = 0; i < m->count; i++) {
        const fanin_tensor *t = tensor_at(m, i);
        buffer_append(&b, t->name, strlen(t->name) + 1);
        buffer_append(&b, &t->dtype, sizeof(t->dtype));
        buffer_append(&b, &t->n_dims, sizeof(t->n_dims));
        buffer_append(&b, t->shape, t->n_dims * sizeof(*t->shape));
        for (size_t j = 0; j < t->n_boxes; j++) {
            const fanin_box *box = &t->boxes[j];
            buffer_append(&b, box->offset, t->n_dims * sizeof(*box->offset));
            buffer_append(&b, box->extent, t->n_dims * sizeof(*box->extent));
            buffer_append(&b, box->stride, t->n_dims * sizeof(*box->stride));
            buffer_append(&b, &box->address, sizeof(box->address));
        }
    }
    digest result = {{0}};
    if (b.failed)
        (void)random_bytes(result.bytes, sizeof(result.bytes)); /* equals nothing */
    else
        result = digest_of(b.data, b.size);
    buffer_free(&b);
    return result;
}

/* ------------------------------------------------------------------ targets */

static fanin_status check_tensor(const fanin_tensor *t, size_t index,
                                 fanin_error *error)
{
    error_place place = {.phase = "plan", .key = t->name};
    if (!t->name || t->n_dims > FANIN_MAX_DIMS || !fanin_dtype_name(t->dtype) ||
        (t->n_boxes > 0 && !t->boxes))
        return error_set(error, FANIN_ERR_ARGUMENT, &place,
                         "tensor %zu: name, dtype, dimensions or boxes are invalid",
                         index);
    if (t->memory.kind == FANIN_MEMORY_CUDA) {
        place.remedy = "pull into host memory and copy";
        return error_set(error, FANIN_ERR_UNSUPPORTED, &place,
                         "this build fills host memory only");
    }
    return FANIN_OK;
}

static fanin_status match(const fanin_tensor *t, const key_table *keys,
                          uint32_t *key_out, fanin_error *error)
{
    int64_t key = key_table_find(keys, t->name);
    error_place place = {.phase = "plan", .key = t->name};
    if (key < 0) {
        place.remedy = "`nixl-fetch list` shows the names";
        return error_set(error, FANIN_ERR_NOT_FOUND, &place,
                         "no tensor of that name is published");
    }
    const key_entry *e = &keys->entries[key];
    place.remedy = "describe the tensor as the trainer published it";
    if (e->dtype != t->dtype)
        return error_set(error, FANIN_ERR_MISMATCH, &place,
                         "the tensor is published as %s, not as %s",
                         fanin_dtype_name(e->dtype), fanin_dtype_name(t->dtype));
    if (e->n_dims != t->n_dims ||
        memcmp(e->shape, t->shape, t->n_dims * sizeof(*t->shape)) != 0)
        return error_set(error, FANIN_ERR_MISMATCH, &place,
                         "the tensor is published with another global shape");
    *key_out = (uint32_t)key;
    return FANIN_OK;
}

static fanin_status add_targets(memory_destination *m, const fanin_tensor *t,
                                uint32_t key, fanin_error *error)
{
    for (size_t i = 0; i < t->n_boxes; i++) {
        const fanin_box *box = &t->boxes[i];
        plan_target *target = &m->targets[m->n_targets];
        *target = (plan_target){.key = key, .to = (uint64_t)(uintptr_t)box->address};
        target->block.n_dims = t->n_dims;
        memcpy(target->block.offset, box->offset, t->n_dims * sizeof(*box->offset));
        memcpy(target->block.extent, box->extent, t->n_dims * sizeof(*box->extent));
        memcpy(target->stride, box->stride, t->n_dims * sizeof(*box->stride));
        if (block_is_empty(&target->block))
            continue;
        error_place place = {.phase = "plan", .key = t->name};
        if (!box->address)
            return error_set(error, FANIN_ERR_ARGUMENT, &place,
                             "box %zu is not empty and has no address", i);
        m->n_targets++;
    }
    return FANIN_OK;
}

static fanin_status prepare(void *cookie, const key_table *keys,
                            const plan_target **targets, size_t *n_targets,
                            const uint64_t **to_of_key, fanin_error *error)
{
    memory_destination *m = cookie;
    size_t boxes = 0;
    for (size_t i = 0; i < m->count; i++)
        boxes += tensor_at(m, i)->n_boxes;
    free(m->targets);
    m->n_targets = 0;
    m->targets = calloc(boxes + 1, sizeof(*m->targets));
    if (!m->targets)
        return error_set_memory(error);
    for (size_t i = 0; i < m->count; i++) {
        uint32_t key = 0;
        fanin_status status = match(tensor_at(m, i), keys, &key, error);
        if (status == FANIN_OK)
            status = add_targets(m, tensor_at(m, i), key, error);
        if (status != FANIN_OK)
            return status;
    }
    if (m->n_targets == 0) {
        /* An empty plan would mean "everything". */
        return error_set(error, FANIN_ERR_ARGUMENT, NULL, "all boxes are empty");
    }
    *targets = m->targets;
    *n_targets = m->n_targets;
    *to_of_key = NULL;
    return FANIN_OK;
}

static fanin_status agreed(void *cookie, const key_table *keys,
                           const adapter_identity *identity, uint8_t **base_out,
                           bool *skip_out, fanin_error *error)
{
    (void)cookie;
    (void)keys;
    (void)identity;
    (void)error;
    *base_out = NULL; /* targets hold addresses */
    *skip_out = false;
    return FANIN_OK;
}

/* ------------------------------------------------------------------- ranges */

static memory_range range_of(const fanin_tensor *t, const fanin_box *box)
{
    dtype_unit unit = dtype_get_unit(t->dtype);
    uint64_t bytes = 0;
    bool packed = true;
    for (uint32_t d = 0; d < t->n_dims; d++)
        packed = packed && box->stride[d] == 0;
    if (packed) {
        (void)dtype_bytes(t->dtype, t->n_dims, box->extent, &bytes);
        return (memory_range){box->address, bytes};
    }
    int64_t low = 0, high = (int64_t)unit.bytes;
    for (uint32_t d = 0; d < t->n_dims; d++) {
        uint64_t steps = box->extent[d] / (d + 1 == t->n_dims ? unit.elements : 1) - 1;
        int64_t reach = (int64_t)steps * box->stride[d];
        low += reach < 0 ? reach : 0;
        high += reach > 0 ? reach : 0;
    }
    return (memory_range){(uint8_t *)box->address + low, (size_t)(high - low)};
}

static int by_base(const void *a, const void *b)
{
    const memory_range *x = a, *y = b;
    return x->base < y->base ? -1 : x->base > y->base;
}

/* Ranges grow together if every page between them holds bytes of the caller. */
static void merge_ranges(memory_destination *m)
{
    size_t last = 0;
    qsort(m->ranges, m->n_ranges, sizeof(*m->ranges), by_base);
    for (size_t i = 1; i < m->n_ranges; i++) {
        memory_range *a = &m->ranges[last];
        const memory_range *b = &m->ranges[i];
        uint8_t *end = a->base + a->length;
        if ((uintptr_t)b->base / PAGE <= ((uintptr_t)end - 1) / PAGE + 1) {
            if (b->base + b->length > end)
                a->length = (size_t)(b->base + b->length - a->base);
        } else {
            m->ranges[++last] = *b;
        }
    }
    m->n_ranges = m->n_ranges ? last + 1 : 0;
}

static void ranges(void *cookie, const memory_range **out, size_t *n)
{
    memory_destination *m = cookie;
    if (!m->ranges) {
        size_t boxes = 0;
        for (size_t i = 0; i < m->count; i++)
            boxes += tensor_at(m, i)->n_boxes;
        m->ranges = calloc(boxes + 1, sizeof(*m->ranges));
        for (size_t i = 0; i < m->count && m->ranges; i++) {
            const fanin_tensor *t = tensor_at(m, i);
            for (size_t j = 0; j < t->n_boxes; j++) {
                block b = {.n_dims = t->n_dims};
                memcpy(b.extent, t->boxes[j].extent, t->n_dims * sizeof(*b.extent));
                if (!block_is_empty(&b))
                    m->ranges[m->n_ranges++] = range_of(t, &t->boxes[j]);
            }
        }
        if (m->ranges)
            merge_ranges(m);
    }
    *out = m->ranges;
    *n = m->n_ranges;
}

/* -------------------------------------------------------------------- whole */

fanin_status fanin_client_pull(fanin_client *client, const fanin_pull_options *options,
                               const fanin_tensor *tensors, size_t count,
                               fanin_result **result_out, fanin_error *error)
{
    fanin_pull_options checked;
    fanin_status status = pull_check(client, options, &checked, error);
    if (status != FANIN_OK)
        return status;
    if (!tensors || count == 0 || tensors->struct_size < sizeof(fanin_tensor))
        return error_set(error, FANIN_ERR_ARGUMENT, NULL,
                         "no tensors were given, or their struct_size is not set");
    memory_destination m = {.tensors = tensors, .count = count};
    for (size_t i = 0; i < count; i++) {
        status = check_tensor(tensor_at(&m, i), i, error);
        if (status != FANIN_OK)
            return status;
    }
    destination d = {.cookie = &m,
                     .plan_slot = 0,
                     .layout = layout,
                     .prepare = prepare,
                     .agreed = agreed,
                     .ranges = ranges};
    status = pull_run(client, &checked, &d, result_out, error);
    free(m.targets);
    if (!d.leak)
        free(m.ranges);
    return status;
}
