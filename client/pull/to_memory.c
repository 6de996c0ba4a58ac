/* SPDX-License-Identifier: Apache-2.0 */
/* Pulling into memory of the caller. */
#include "dtype.h"
#include "error_set.h"
#include "pull/described.h"
#include "pull/pull.h"
#include "pull/pull_session.h"
#include "text.h"
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#define PAGE ((uintptr_t)4096)

typedef struct memory_destination {
    const described *all;
    const places *places;
    fanin_dtype dtype; /* what F32 arrives as, unless F32 is wanted; 0: F32 */
    int64_t *keys;     /* of each tensor in `matched`, -1: none; NULL: not looked up */
    digest matched;
    digest prepared; /* the key table that targets, if there are any, are of */
    plan_target *targets;
    size_t n_targets;
    memory_range *ranges;
    size_t n_ranges;
    gpu_finder finder; /* without a driver: nothing in this process is device memory */
} memory_destination;

static digest layout(void *cookie)
{
    const memory_destination *m = cookie;
    return m->places->layout;
}

/* ------------------------------------------------------------------ targets */

/* The tensors' keys: looked up once a key table, as what a first pull fetches follows from them,
   and then what it plans. */
static bool find_keys(memory_destination *m, const key_table *keys)
{
    if (m->keys && digest_equal(&m->matched, &keys->id))
        return true;
    if (!m->keys && !(m->keys = malloc(m->all->count * sizeof *m->keys)))
        return false;
    uint32_t near = 0;
    for (size_t i = 0; i < m->all->count; i++)
        m->keys[i] = key_table_find_near(keys, described_at(m->all, i)->name, &near);
    m->matched = keys->id;
    return true;
}

/* What has no such key is told when the plan is made. */
static void mark(void *cookie, const key_table *keys, bool *marks)
{
    memory_destination *m = cookie;
    if (!find_keys(m, keys)) {
        memset(marks, true, keys->count * sizeof *marks); /* more than needed will do */
        return;
    }
    for (size_t i = 0; i < m->all->count; i++) {
        if (m->keys[i] >= 0)
            marks[m->keys[i]] = true;
    }
}

static fanin_status shape_error(const key_entry *e, const fanin_tensor *t,
                                const error_place *place, fanin_error *error)
{
    char both[400];
    text words = text_in(both, sizeof both);
    text_add_shape(&words, e->shape, e->n_dims);
    text_add(&words, ", not as ");
    text_add_shape(&words, t->shape, t->n_dims);
    return error_set(error, FANIN_ERR_MISMATCH, place,
                     "the tensor is published with another global shape: as %s", both);
}

static fanin_status match_tensor(const memory_destination *m, size_t index,
                                 const key_table *keys, fanin_error *error)
{
    const fanin_tensor *t = described_at(m->all, index);
    int64_t key = m->keys[index];
    error_place place = {.phase = "plan", .key = t->name};
    if (key < 0) {
        place.remedy = "`nixl-fetch list` shows the names";
        return error_set(error, FANIN_ERR_NOT_FOUND, &place,
                         "no tensor of that name is published");
    }
    const key_entry *e = &keys->entries[key];
    place.remedy = "describe the tensor as the trainer published it";
    bool converts =
        m->dtype != 0 && e->dtype == FANIN_DTYPE_F32 && t->dtype != e->dtype;
    fanin_dtype arrives = converts ? m->dtype : e->dtype;
    if (arrives != t->dtype)
        return error_set(error, FANIN_ERR_MISMATCH, &place,
                         "the tensor %s %s, not as %s",
                         converts ? "arrives as" : "is published as",
                         fanin_dtype_name(arrives), fanin_dtype_name(t->dtype));
    if (e->n_dims != t->n_dims ||
        memcmp(e->shape, t->shape, t->n_dims * sizeof *t->shape) != 0)
        return shape_error(e, t, &place, error);
    return FANIN_OK;
}

/* A box's bytes, unless it is empty. */
static fanin_status box_range(const fanin_tensor *t, const fanin_box *box,
                              memory_range *out, fanin_error *error)
{
    dtype_unit unit = dtype_get_unit(t->dtype);
    uint64_t extent[FANIN_MAX_DIMS] = {0}, low, high;
    int64_t packed[FANIN_MAX_DIMS] = {0};
    bool given = false;
    for (uint32_t d = 0; d < t->n_dims; d++) {
        uint32_t elements = d + 1 == t->n_dims ? unit.elements : 1;
        extent[d] = box->extent[d] / elements + (box->extent[d] % elements != 0);
        given = given || box->stride[d] != 0;
    }
    block_packed_strides(t->n_dims, extent, unit.bytes, packed);
    if (!block_range(t->n_dims, extent, given ? box->stride : packed, unit.bytes,
                     box->address, &low, &high))
        return described_refuse(t, "check the box's address, extent and strides", error,
                                "a box reaches beyond the address space");
    *out = (memory_range){(uint8_t *)box->address - ((uintptr_t)box->address - low),
                          (size_t)(high - low), -1};
    return FANIN_OK;
}

static fanin_status add_targets(memory_destination *m, size_t index, fanin_error *error)
{
    const fanin_tensor *t = described_at(m->all, index);
    uint32_t key = (uint32_t)m->keys[index];
    memory_range lies;
    for (size_t i = 0; i < t->n_boxes; i++) {
        const fanin_box *box = &t->boxes[i];
        plan_target *target = &m->targets[m->n_targets];
        *target = (plan_target){.key = key,
                                .to = (uint64_t)(uintptr_t)box->address,
                                .as_is = t->dtype == FANIN_DTYPE_F32,
                                .group = (uint32_t)index};
        target->block.n_dims = t->n_dims;
        memcpy(target->block.offset, box->offset, t->n_dims * sizeof *box->offset);
        memcpy(target->block.extent, box->extent, t->n_dims * sizeof *box->extent);
        memcpy(target->stride, box->stride, t->n_dims * sizeof *box->stride);
        if (block_is_empty(&target->block))
            continue;
        if (!box->address)
            return described_refuse(t, NULL, error,
                                    "box %zu is not empty and has no address", i);
        fanin_status status = box_range(t, box, &lies, error);
        if (status != FANIN_OK)
            return status;
        m->n_targets++;
    }
    return FANIN_OK;
}

static fanin_status make_targets(memory_destination *m, const key_table *keys,
                                 fanin_error *error)
{
    size_t boxes = 0;
    for (size_t i = 0; i < m->all->count; i++)
        boxes += described_at(m->all, i)->n_boxes;
    free(m->targets);
    m->n_targets = 0;
    m->prepared = (digest){0};
    m->targets = array_large(boxes + 1, sizeof *m->targets);
    if (!m->targets || !find_keys(m, keys))
        return error_set_memory(error);
    for (size_t i = 0; i < m->all->count; i++) {
        fanin_status status = match_tensor(m, i, keys, error);
        if (status == FANIN_OK)
            status = add_targets(m, i, error);
        if (status != FANIN_OK)
            return status;
    }
    m->prepared = keys->id;
    return FANIN_OK;
}

static fanin_status prepare(void *cookie, const key_table *keys,
                            const plan_target **targets, size_t *n_targets,
                            const uint64_t **to_of_key, fanin_error *error)
{
    memory_destination *m = cookie;
    fanin_status status = m->targets && digest_equal(&m->prepared, &keys->id)
                              ? FANIN_OK
                              : make_targets(m, keys, error);
    if (status != FANIN_OK)
        return status;
    if (m->n_targets == 0) {
        /* An empty plan would mean "everything". */
        return error_set(error, FANIN_ERR_ARGUMENT, NULL, "all boxes are empty");
    }
    *targets = m->targets;
    *n_targets = m->n_targets;
    *to_of_key = NULL;
    return FANIN_OK;
}

static void outline(void *cookie, path_outline *out)
{
    const memory_destination *m = cookie;
    for (size_t i = 0; i < m->all->count; i++) {
        const fanin_tensor *t = described_at(m->all, i);
        uint64_t bytes = 0;
        for (size_t j = 0; j < t->n_boxes; j++) {
            if (dtype_bytes(t->dtype, t->n_dims, t->boxes[j].extent, &bytes))
                out->bytes += bytes;
        }
        device_set_add(&out->devices, m->places->device[i]);
    }
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

/* A box's bytes, and what holds them. */
typedef struct stretch {
    memory_range range;
    gpu_range in;
} stretch;

static fanin_status box_stretch(memory_destination *m, size_t index,
                                const fanin_box *box, stretch *out, fanin_error *error)
{
    const fanin_tensor *t = described_at(m->all, index);
    *out = (stretch){.in.memory = {FANIN_MEMORY_HOST, -1}};
    fanin_status status = box_range(t, box, &out->range, error);
    out->range.device = m->places->device[index];
    if (status != FANIN_OK || out->range.device < 0)
        return status;
    status = gpu_find(&m->finder, box->address, &out->in, error);
    uint64_t low = (uintptr_t)out->range.base;
    if (status != FANIN_OK ||
        gpu_find_holds(&m->finder, &out->in, low, low + out->range.length))
        return status;
    return described_refuse(t, "check the box's address, extent and strides", error,
                            "a box reaches beyond its allocation of %" PRIu64
                            " bytes on CUDA device %d",
                            out->in.length, (int)out->in.memory.device);
}

static int by_base(const void *a, const void *b)
{
    const stretch *x = a, *y = b;
    return x->range.base < y->range.base ? -1 : x->range.base > y->range.base;
}

static size_t merge_stretches(stretch *all, size_t n)
{
    size_t last = 0, sorted = 1;
    while (sorted < n && by_base(&all[sorted - 1], &all[sorted]) <= 0)
        sorted++;
    if (sorted < n) /* tensors are mostly described as they lie */
        qsort(all, n, sizeof *all, by_base);
    for (size_t i = 1; i < n; i++) {
        stretch *a = &all[last];
        const stretch *b = &all[i];
        const uint8_t *end = b->range.base + b->range.length;
        const uint8_t *before = a->range.base + a->range.length;
        if (!gpu_range_continues(&a->in, (uintptr_t)before, &b->in,
                                 (uintptr_t)b->range.base, PAGE))
            all[++last] = *b;
        else if (end > before)
            a->range.length = (size_t)(end - a->range.base);
    }
    return n ? last + 1 : 0;
}

static fanin_status collect_stretches(memory_destination *m, stretch *all,
                                      size_t *n_out, fanin_error *error)
{
    size_t n = 0;
    for (size_t i = 0; i < m->all->count; i++) {
        const fanin_tensor *t = described_at(m->all, i);
        for (size_t j = 0; j < t->n_boxes; j++) {
            if (described_box_is_empty(t, &t->boxes[j]))
                continue;
            fanin_status status = box_stretch(m, i, &t->boxes[j], &all[n++], error);
            if (status != FANIN_OK)
                return status;
        }
    }
    *n_out = merge_stretches(all, n);
    return FANIN_OK;
}

static fanin_status find_ranges(memory_destination *m, fanin_error *error)
{
    size_t boxes = 0, n = 0;
    for (size_t i = 0; i < m->all->count; i++)
        boxes += described_at(m->all, i)->n_boxes;
    stretch *all = array_large(boxes + 1, sizeof *all);
    fanin_status status =
        all ? collect_stretches(m, all, &n, error) : error_set_memory(error);
    memory_range *found = NULL;
    if (status == FANIN_OK && !(found = malloc((n + 1) * sizeof *found)))
        status = error_set_memory(error);
    for (size_t i = 0; i < n && status == FANIN_OK; i++)
        found[i] = all[i].range;
    m->ranges = found;
    m->n_ranges = status == FANIN_OK ? n : 0;
    free(all);
    return status;
}

static fanin_status ranges(void *cookie, const memory_range **out, size_t *n,
                           fanin_error *error)
{
    memory_destination *m = cookie;
    fanin_status status = FANIN_OK;
    if (!m->ranges)
        status = find_ranges(m, error);
    *out = m->ranges;
    *n = m->n_ranges;
    return status;
}

/* Who needs them finds out again what failed. */
static void meanwhile(void *cookie, const key_table *keys)
{
    memory_destination *m = cookie;
    if (!m->ranges)
        (void)find_ranges(m, NULL);
    (void)make_targets(m, keys, NULL);
}

/* -------------------------------------------------------------------- whole */

static void close_memory(memory_destination *m)
{
    free(m->keys);
    free(m->targets);
    gpu_finder_free(&m->finder);
    free(m->ranges);
}

static destination as_destination(memory_destination *m, uint64_t started_ns)
{
    return (destination){
        .cookie = m,
        .wants = {.cookie = m, .name = layout, .mark = mark, .meanwhile = meanwhile},
        .layout = layout,
        .prepare = prepare,
        .agreed = agreed,
        .ranges = ranges,
        .outline = m->places->on_devices ? outline : NULL,
        .lasting_ranges = true,
        .quick = true,
        .dtype = m->dtype,
        .started_ns = started_ns};
}

/* What is done with the destination: a pull that ends here, or a session that begins. */
typedef struct use {
    /* describes it for this call, or takes what was prepared */
    fanin_status (*run)(const struct use *u, fanin_error *error);
    const fanin_tensor *tensors;
    size_t count;
    fanin_destination *prepared;
    fanin_result **result_out;
    bool begins; /* a session */
    fanin_session **session_out;
    fanin_client *client;
    const fanin_pull_options *options;
    uint64_t started_ns;
} use;

/* @p base: what the memory holds; NULL: it was described for this call. */
static fanin_status fill_memory(const use *u, memory_destination *m, delta_base *base,
                                fanin_error *error)
{
    destination d = as_destination(m, u->started_ns);
    d.base = base;
    if (u->begins)
        return pull_session_open(u->client, u->options, &d, m->all->count,
                                 u->session_out, error);
    return pull_run(u->client, u->options, &d, u->result_out, error);
}

static fanin_status run_described(const use *u, fanin_error *error)
{
    described all;
    places found = {0};
    memory_destination m = {.all = &all,
                            .places = &found,
                            .dtype = u->options->dtype,
                            .finder = {.g = gpu_present()}};
    fanin_status status = described_open(&all, u->tensors, u->count, error);
    if (status == FANIN_OK)
        status = places_find(&all, &m.finder, &found, error);
    if (status == FANIN_OK)
        status = fill_memory(u, &m, NULL, error);
    close_memory(&m);
    places_clear(&found);
    described_close(&all);
    return status;
}

static fanin_status run_prepared(const use *u, fanin_error *error)
{
    memory_destination m = {.dtype = u->options->dtype, .finder = {.g = gpu_present()}};
    if (!u->prepared)
        return error_set(error, FANIN_ERR_ARGUMENT, NULL, "the destination is NULL");
    fanin_status status =
        prepared_take(u->prepared, &m.finder, &m.all, &m.places, error);
    if (status == FANIN_OK)
        status = fill_memory(u, &m, prepared_base(u->prepared), error);
    close_memory(&m);
    prepared_give(u->prepared, m.places);
    return status;
}

static fanin_status run_use(use u, fanin_client *client,
                            const fanin_pull_options *options, fanin_error *error)
{
    fanin_pull_options checked;
    u.client = client;
    u.options = &checked;
    u.started_ns = clock_ns();
    fanin_status status = pull_check(client, options, &checked, error);
    if (status == FANIN_OK && u.begins && !u.session_out)
        status = error_set(error, FANIN_ERR_ARGUMENT, NULL, "session_out is NULL");
    return status == FANIN_OK ? u.run(&u, error) : status;
}

fanin_status fanin_client_pull(fanin_client *client, const fanin_pull_options *options,
                               const fanin_tensor *tensors, size_t count,
                               fanin_result **result_out, fanin_error *error)
{
    const use u = {run_described, tensors, count, .result_out = result_out};
    return run_use(u, client, options, error);
}

fanin_status fanin_client_pull_into(fanin_client *client,
                                    const fanin_pull_options *options,
                                    fanin_destination *into, fanin_result **result_out,
                                    fanin_error *error)
{
    const use u = {run_prepared, .prepared = into, .result_out = result_out};
    return run_use(u, client, options, error);
}

fanin_status fanin_client_begin(fanin_client *client, const fanin_pull_options *options,
                                const fanin_tensor *all, size_t count,
                                fanin_session **session_out, fanin_error *error)
{
    const use u = {run_described, all, count, .begins = true,
                   .session_out = session_out};
    return run_use(u, client, options, error);
}

fanin_status fanin_client_begin_into(fanin_client *client,
                                     const fanin_pull_options *options,
                                     fanin_destination *into,
                                     fanin_session **session_out, fanin_error *error)
{
    const use u = {run_prepared, .prepared = into, .begins = true,
                   .session_out = session_out};
    return run_use(u, client, options, error);
}
