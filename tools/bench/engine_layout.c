/* SPDX-License-Identifier: Apache-2.0 */
#include "bench/engine_layout.h"
#include "fetch/failure.h"
#include "fetch/output.h"
#include "trainer/shard.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

bool engine_shape_parse(const char *text, engine_shape *out)
{
    *out = (engine_shape){0, 0, 0};
    for (;;) {
        char *end;
        uint32_t *size = strncmp(text, "tp", 2) == 0   ? &out->tp
                         : strncmp(text, "ep", 2) == 0 ? &out->ep
                         : strncmp(text, "pp", 2) == 0 ? &out->pp
                                                       : NULL;
        if (size == NULL || *size != 0 || text[2] < '1' || text[2] > '9') {
            return false;
        }
        unsigned long value = strtoul(text + 2, &end, 10);
        if (value > 65536 || (*end != '\0' && *end != ',')) {
            return false;
        }
        *size = (uint32_t)value;
        if (*end == '\0') {
            break;
        }
        text = end + 1;
    }
    out->tp = out->tp > 0 ? out->tp : 1;
    out->ep = out->ep > 0 ? out->ep : 1;
    out->pp = out->pp > 0 ? out->pp : 1;
    return true;
}

static uint32_t ranks_of_stage(engine_shape shape)
{
    return shape.tp > shape.ep ? shape.tp : shape.ep;
}

uint32_t engine_shape_ranks(engine_shape shape)
{
    return ranks_of_stage(shape) * shape.pp;
}

engine_model engine_model_of(const char *config)
{
    json_t *root = config != NULL ? json_loads(config, 0, NULL) : NULL;
    json_int_t heads = json_integer_value(json_object_get(root, "num_key_value_heads"));
    if (heads <= 0) {
        heads = json_integer_value(json_object_get(root, "num_attention_heads"));
    }
    json_decref(root);
    return (engine_model){.kv_heads = heads > 0 ? (uint64_t)heads : 0};
}

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

/* ------------------------------------------------------------ what engines do */

/* How a tensor is cut over tp. */
typedef enum cutting { WHOLE, ROWS, COLUMNS, HEADS, WORDS } cutting;

/* A kind of module: how it is cut, and of which parameter it is which part. */
typedef struct rule {
    const char *module;
    cutting cutting;
    const char *parameter; /**< NULL: one of its own */
    uint32_t slot;
} rule;

static const rule rules[] = {
    {"q_proj", ROWS, "qkv_proj", 0},
    {"k_proj", HEADS, "qkv_proj", 1},
    {"v_proj", HEADS, "qkv_proj", 2},
    {"gate_proj", ROWS, "gate_up_proj", 0},
    {"up_proj", ROWS, "gate_up_proj", 1},
    {"q_a_proj", WHOLE, "fused_qkv_a_proj", 0},
    {"kv_a_proj_with_mqa", WHOLE, "fused_qkv_a_proj", 1},
    {"q_b_proj", ROWS, NULL, 0},
    {"kv_b_proj", ROWS, NULL, 0},
    {"o_proj", COLUMNS, NULL, 0},
    {"down_proj", COLUMNS, NULL, 0},
    {"embed_tokens", WORDS, NULL, 0},
    {"lm_head", WORDS, NULL, 0},
};

/* A name taken apart: "<prefix>.experts.<expert>.<module>.<leaf>". */
typedef struct parts {
    char prefix[FANIN_MAX_NAME + 1];
    char module[FANIN_MAX_NAME + 1];
    const char *leaf;
    int64_t expert; /**< -1: none */
} parts;

/* Cuts the last component off @p text; what is cut, or all of it if there was only one. */
static char *cut_last(char *text)
{
    char *dot = strrchr(text, '.');
    if (dot == NULL) {
        return text;
    }
    *dot = '\0';
    return dot + 1;
}

static void take_apart(const char *name, parts *out)
{
    char *dot;
    *out = (parts){.leaf = "", .expert = -1};
    snprintf(out->prefix, sizeof out->prefix, "%s", name);
    char *leaf = cut_last(out->prefix);
    if (leaf == out->prefix) {
        return;
    }
    out->leaf = name + (leaf - out->prefix);
    snprintf(out->module, sizeof out->module, "%s", cut_last(out->prefix));
    if (strcmp(out->module, out->prefix) == 0) {
        out->prefix[0] = '\0'; /* "lm_head.weight" */
    }
    size_t length = strlen(out->prefix);
    dot = strrchr(out->prefix, '.');
    char *end;
    if (dot == NULL || dot[1] < '0' || dot[1] > '9' || length < 10 ||
        dot - out->prefix < 8 || strncmp(dot - 8, ".experts", 8) != 0) {
        return;
    }
    long long number = strtoll(dot + 1, &end, 10);
    if (*end == '\0') {
        out->expert = number;
        *dot = '\0';
    }
}

static const rule *rule_of(const parts *p)
{
    static const rule whole = {"", WHOLE, NULL, 0};
    for (size_t i = 0; i < sizeof rules / sizeof rules[0]; i++) {
        if (strcmp(p->module, rules[i].module) == 0) {
            return &rules[i];
        }
    }
    return &whole;
}

static uint64_t bytes_of(const fanin_tensor *t, const uint64_t *extent)
{
    uint64_t bits = fanin_dtype_bits(t->dtype);
    for (uint32_t d = 0; d < t->n_dims; d++) {
        bits *= extent[d];
    }
    return bits / 8;
}

void engine_layout_add_whole(engine_layout *l, const fanin_tensor *tensors, size_t i)
{
    uint64_t bytes = bytes_of(&tensors[i], tensors[i].shape);
    if (bytes > 0) {
        size_t parameter = add_parameter(l);
        placed_box *b = add_box(l);
        b->tensor = i;
        b->parameter = parameter;
        memcpy(b->box.extent, tensors[i].shape, sizeof b->box.extent);
        l->parameters[parameter].bytes = bytes;
    }
}

/* What is being laid out, and the parameters by name. */
typedef struct maker {
    engine_layout *layout;
    json_t *names;
    engine_shape shape;
    engine_model model;
    uint32_t rank, stage; /**< rank: in its stage */
    uint64_t experts;     /**< of each layer */
    uint64_t layers;
    bool tied; /**< the embedding is the lm_head */
} maker;

static size_t parameter_of(maker *m, const char *name)
{
    const json_t *known = json_object_get(m->names, name);
    if (known != NULL) {
        return (size_t)json_integer_value(known);
    }
    size_t index = add_parameter(m->layout);
    json_object_set_new(m->names, name, json_integer((json_int_t)index));
    return index;
}

/* The part of dimension @p dim that this rank holds; false: nothing. */
static bool cut(const maker *m, const fanin_tensor *t, uint32_t dim, fanin_box *box)
{
    uint64_t begin, end;
    shard_chunk(t->shape[dim], m->shape.tp, m->rank % m->shape.tp, 1, &begin, &end);
    box->offset[dim] = begin;
    box->extent[dim] = end - begin;
    return end > begin;
}

/* Ranks that are more than the heads share them: several have the same one. */
static bool cut_heads(const maker *m, const fanin_tensor *t, fanin_box *box)
{
    uint64_t heads = m->model.kv_heads, tp = m->shape.tp;
    if (heads == 0 || tp <= heads || tp % heads != 0 || t->shape[0] % heads != 0) {
        return cut(m, t, 0, box);
    }
    box->extent[0] = t->shape[0] / heads;
    box->offset[0] = m->rank % tp / (tp / heads) * box->extent[0];
    return true;
}

/* Rows of the vocabulary with those that pad it, of each rank as many. */
static uint64_t padded_rows(const maker *m, const fanin_tensor *t)
{
    enum { PADDING = 64 };
    uint64_t padded = (t->shape[0] + PADDING - 1) / PADDING * PADDING;
    return (padded + m->shape.tp - 1) / m->shape.tp;
}

static bool cut_words(const maker *m, const fanin_tensor *t, fanin_box *box)
{
    uint64_t rows = padded_rows(m, t), begin = rows * (m->rank % m->shape.tp);
    uint64_t left = begin < t->shape[0] ? t->shape[0] - begin : 0;
    box->offset[0] = left > 0 ? begin : 0;
    box->extent[0] = left < rows ? left : rows;
    return left > 0;
}

/* Its expert's part of [E, 2I, H] or [E, H, I]; false: another rank holds it. */
static bool place_expert(maker *m, const fanin_tensor *t, const parts *p, const rule *r,
                         placed_box *out)
{
    char name[FANIN_MAX_NAME + 8];
    uint64_t expert = (uint64_t)p->expert;
    uint64_t begin = 0, end = m->experts;
    if (m->shape.ep > 1) {
        shard_chunk(m->experts, m->shape.ep, m->rank % m->shape.ep, 1, &begin, &end);
    } else if (!cut(m, t, r->cutting == COLUMNS && t->n_dims > 1 ? 1 : 0, &out->box)) {
        return false;
    }
    if (expert < begin || expert >= end) {
        return false;
    }
    bool down = r->cutting == COLUMNS;
    uint64_t bytes = bytes_of(t, out->box.extent);
    snprintf(name, sizeof name, "%s.%s", p->prefix, down ? "w2" : "w13");
    out->parameter = parameter_of(m, name);
    out->at = (expert - begin) * (down ? 1 : 2) * bytes + r->slot * bytes;
    placed_parameter *to = &m->layout->parameters[out->parameter];
    to->bytes = out->at + bytes > to->bytes ? out->at + bytes : to->bytes;
    return true;
}

/* False: this rank holds nothing of it. */
static bool cut_as(const maker *m, const fanin_tensor *t, cutting how, fanin_box *box)
{
    switch (t->n_dims > 0 ? how : WHOLE) {
    case ROWS:
        return cut(m, t, 0, box);
    case COLUMNS:
        return t->n_dims < 2 || cut(m, t, 1, box);
    case HEADS:
        return cut_heads(m, t, box);
    case WORDS:
        return cut_words(m, t, box);
    default:
        return true;
    }
}

static bool place(maker *m, const fanin_tensor *t, const parts *p, const rule *r,
                  placed_box *out)
{
    char name[2 * FANIN_MAX_NAME + 8];
    if (!cut_as(m, t, r->cutting, &out->box)) {
        return false;
    }
    if (r->parameter != NULL) {
        snprintf(name, sizeof name, "%s.%s.%s", p->prefix, r->parameter, p->leaf);
        out->parameter = parameter_of(m, name);
    } else {
        out->parameter = add_parameter(m->layout);
    }
    out->slot = r->slot;
    fanin_box held = out->box;
    held.extent[0] = r->cutting == WORDS ? padded_rows(m, t) : held.extent[0];
    m->layout->parameters[out->parameter].slots[r->slot] = bytes_of(t, held.extent);
    return true;
}

/* The stages' layers: [*first, *end). */
static void layers_of(const maker *m, uint64_t *first, uint64_t *end)
{
    uint64_t pp = m->shape.pp, each = m->layers / pp, more = m->layers % pp;
    *first = 0;
    for (uint64_t stage = 0; stage <= m->stage; stage++) {
        bool longer = stage + 1 < pp && stage + 1 + more >= pp;
        *end = *first + each + (longer ? 1 : 0);
        *first = stage < m->stage ? *end : *first;
    }
}

/* The number behind ".layers."; -1: it is of no layer. */
static int64_t layer_of(const char *name)
{
    static const char mark[] = ".layers.";
    const char *at = strstr(name, mark);
    return at != NULL && at[8] >= '0' && at[8] <= '9' ? strtoll(at + 8, NULL, 10) : -1;
}

static bool is_of_stage(const maker *m, const fanin_tensor *t, const parts *p)
{
    uint64_t first, end;
    int64_t layer = layer_of(t->name);
    bool last = m->stage + 1 == m->shape.pp;
    if (layer >= 0) {
        layers_of(m, &first, &end);
        return (uint64_t)layer >= first && (uint64_t)layer < end;
    }
    if (strcmp(p->module, "embed_tokens") == 0) {
        return m->stage == 0 || (last && m->tied);
    }
    return last;
}

/* Slots lie one after the other. */
static void settle(engine_layout *l)
{
    for (size_t i = 0; i < l->n_parameters; i++) {
        placed_parameter *p = &l->parameters[i];
        p->bytes += p->slots[0] + p->slots[1] + p->slots[2];
    }
    for (size_t i = 0; i < l->count; i++) {
        placed_box *b = &l->boxes[i];
        const placed_parameter *p = &l->parameters[b->parameter];
        for (uint32_t slot = 0; slot < b->slot; slot++) {
            b->at += p->slots[slot];
        }
    }
}

static void look_at_names(maker *m, const fanin_tensor *tensors, size_t count)
{
    parts p;
    m->tied = true;
    for (size_t i = 0; i < count; i++) {
        int64_t layer = layer_of(tensors[i].name);
        take_apart(tensors[i].name, &p);
        if (p.expert >= 0 && (uint64_t)p.expert >= m->experts) {
            m->experts = (uint64_t)p.expert + 1;
        }
        if (layer >= 0 && (uint64_t)layer >= m->layers) {
            m->layers = (uint64_t)layer + 1;
        }
        m->tied = m->tied && strcmp(p.module, "lm_head") != 0;
    }
}

void engine_layout_make(const fanin_tensor *tensors, size_t count, engine_shape shape,
                        engine_model model, uint32_t rank, engine_layout *out)
{
    *out = (engine_layout){.boxes = NULL};
    maker m = {.layout = out,
               .names = output_require(json_object()),
               .shape = shape,
               .model = model,
               .rank = rank % ranks_of_stage(shape),
               .stage = rank / ranks_of_stage(shape)};
    parts p;
    look_at_names(&m, tensors, count);
    for (size_t i = 0; i < count; i++) {
        const fanin_tensor *t = &tensors[i];
        placed_box box = {.tensor = i};
        memcpy(box.box.extent, t->shape, sizeof t->shape);
        take_apart(t->name, &p);
        const rule *r = rule_of(&p);
        bool expert = p.expert >= 0 && r->cutting != WHOLE;
        bool there = is_of_stage(&m, t, &p) &&
                     (expert ? place_expert : place)(&m, t, &p, r, &box);
        if (there && bytes_of(t, box.box.extent) > 0) {
            *add_box(out) = box;
        }
    }
    settle(out);
    json_decref(m.names);
}

/* ------------------------------------------------------------------ a mapping */

static int by_name(const void *a, const void *b)
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
        count > 0 ? bsearch(&wanted, sorted, count, sizeof sorted[0], by_name) : NULL;
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
    qsort(sorted, count, sizeof sorted[0], by_name);
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
