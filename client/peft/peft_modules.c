/* SPDX-License-Identifier: Apache-2.0 */
#include "peft/peft_modules.h"
#include "error_set.h"

#include <ctype.h>
#include <stdlib.h>
#include <string.h>

#define PREFIX_SIZE (sizeof(PEFT_PREFIX) - 1)
#define BASE_LAYER ".base_layer"

typedef struct finder {
    const peft_names *names;
    const key_table *keys;
    const char *publication;
    fanin_error *error;
} finder;

static fanin_status refuse(const finder *f, uint32_t key, const char *message)
{
    char full[640];
    error_place place = {
        .phase = "plan",
        .key = peft_full_key(f->publication, f->keys->entries[key].name, full),
        .remedy = "publish every tensor of the adapter, whole, under PEFT's names"};
    return error_set(f->error, FANIN_ERR_MISMATCH, &place, "%s", message);
}

const char *peft_suffix(const char *path, size_t size, size_t *size_out)
{
    size_t start = size + 1;
    do {
        const char *dot = memrchr(path, '.', start - 1);
        start = dot ? (size_t)(dot - path) + 1 : 0;
    } while (start > 0 && isdigit((unsigned char)path[start]));
    *size_out = size - start;
    return path + start;
}

bool peft_ends_with(const char *path, size_t size, const char *end, size_t end_size)
{
    if (end_size > size || memcmp(path + size - end_size, end, end_size) != 0)
        return false;
    return end_size == size || path[size - end_size - 1] == '.';
}

/* The path without wrappers, and whether it is a module that holds all experts at once. */
static void read_path(peft_module *m, const peft_name *name)
{
    m->path = name->text + PREFIX_SIZE;
    m->size = name->module - (uint32_t)PREFIX_SIZE;
    size_t tail = sizeof(BASE_LAYER) - 1;
    while (m->size > tail && memcmp(m->path + m->size - tail, BASE_LAYER, tail) == 0) {
        m->size -= (uint32_t)tail;
        m->depth++;
    }
    m->fused = m->depth > 0 || peft_ends_with(m->path, m->size, "experts", 7);
}

typedef struct layer {
    const peft_tensor *a, *b, *embedding_a, *embedding_b, *magnitude, *bias;
} layer;

static void add_part(layer *l, const peft_tensor *t)
{
    switch (t->name.part) {
    case PEFT_LORA_A:
        l->a = t;
        break;
    case PEFT_LORA_B:
        l->b = t;
        break;
    case PEFT_LORA_B_BIAS:
        l->bias = t;
        break;
    case PEFT_EMBEDDING_A:
        l->embedding_a = t;
        break;
    case PEFT_EMBEDDING_B:
        l->embedding_b = t;
        break;
    case PEFT_MAGNITUDE:
        l->magnitude = t;
        break;
    case PEFT_OTHER:
    case PEFT_SAVED_MODULE:
    case PEFT_MALFORMED:
        break;
    }
}

static bool same_module(const peft_name *a, const peft_name *b)
{
    return a->module == b->module && memcmp(a->text, b->text, a->module) == 0;
}

/* Proves that the matrices of one layer fit each other. */
static fanin_status prove_pair(const finder *f, const layer *l, const peft_tensor *any,
                               peft_module *m)
{
    const peft_tensor *a = l->a ? l->a : l->embedding_a;
    const peft_tensor *b = l->a ? l->b : l->embedding_b;
    if (!a)
        return refuse(f, any->key,
                      l->b || l->embedding_b
                          ? "lora_B is published without its lora_A"
                          : "a part of a LoRA layer is published without its "
                            "lora_A and lora_B");
    if (!b)
        return refuse(f, a->key, "lora_A is published without its lora_B");
    if (l->a && (l->embedding_a || l->embedding_b))
        return refuse(f, a->key, "one module has both lora_A and lora_embedding_A");

    const key_entry *rows = &f->keys->entries[a->key],
                    *columns = &f->keys->entries[b->key];
    m->key = a->key;
    if (rows->n_dims < 2 || columns->n_dims < 2)
        return refuse(f, rows->n_dims < 2 ? a->key : b->key,
                      "a LoRA matrix has fewer than two dimensions");
    m->rank = rows->shape[0];
    m->in = rows->shape[1];
    m->out = columns->shape[0];
    uint64_t r = columns->shape[1];
    /* A convolution with groups has its rank divided among them. */
    bool fits = r == m->rank || (columns->n_dims == 4 && r > 0 && m->rank % r == 0);
    if (m->rank > 0 && fits)
        return FANIN_OK;
    char full[640];
    error_place place = {
        .phase = "plan",
        .key = peft_full_key(f->publication, rows->name, full),
        .remedy = "publish global shapes: lora_A is [r, in], lora_B is [out, r]"};
    return error_set(
        f->error, FANIN_ERR_MISMATCH, &place,
        "lora_A has %llu rows, lora_B has %llu columns; both should be the rank",
        (unsigned long long)m->rank, (unsigned long long)r);
}

static void note_malformed(peft_modules *out, const peft_tensor *t)
{
    if (t->name.part == PEFT_MALFORMED && !out->malformed)
        out->malformed = t;
}

/* All tensors of the module that *at belongs to are neighbours: their names share all up to
   ".lora_". Advances *at behind them. */
static fanin_status read_layer(const finder *f, uint32_t *at, peft_modules *out,
                               peft_module *m)
{
    const peft_tensor *first = &f->names->tensors[*at];
    layer l = {0};
    for (; *at < f->names->count; ++*at) {
        const peft_tensor *t = &f->names->tensors[*at];
        if (t->name.module == 0) { /* sorted in between, no part of a layer */
            note_malformed(out, t);
            continue;
        }
        if (!same_module(&first->name, &t->name) || t->name.part == PEFT_SAVED_MODULE)
            break;
        add_part(&l, t);
    }
    read_path(m, &first->name);
    m->magnitude = l.magnitude != NULL;
    m->bias = l.bias != NULL;
    return prove_pair(f, &l, first, m);
}

static fanin_status find_all(const finder *f, peft_modules *out)
{
    for (uint32_t i = 0; i < f->names->count;) {
        const peft_tensor *t = &f->names->tensors[i];
        if (t->name.part == PEFT_OTHER || t->name.part == PEFT_MALFORMED) {
            note_malformed(out, t);
            i++;
        } else if (t->name.part == PEFT_SAVED_MODULE) {
            if (out->n_saved == 0 ||
                !same_module(&out->saved[out->n_saved - 1]->name, &t->name))
                out->saved[out->n_saved++] = t;
            i++;
        } else {
            peft_module *m = &out->items[out->count];
            fanin_status status = read_layer(f, &i, out, m);
            if (status)
                return status;
            out->count++;
            out->n_fused += m->fused;
        }
    }
    return FANIN_OK;
}

fanin_status peft_modules_find(const peft_names *names, const key_table *keys,
                               const char *publication, peft_modules *out,
                               fanin_error *error)
{
    finder f = {
        .names = names, .keys = keys, .publication = publication, .error = error};
    size_t layers = 0, saved = 0;
    for (uint32_t i = 0; i < names->count; i++) {
        const peft_name *name = &names->tensors[i].name;
        bool is_saved = name->part == PEFT_SAVED_MODULE;
        saved += is_saved;
        layers += name->module > 0 && !is_saved &&
                  (i == 0 || !same_module(name, &names->tensors[i - 1].name));
    }
    *out = (peft_modules){0};
    out->items = calloc(layers + 1, sizeof(out->items[0]));
    out->saved = calloc(saved + 1, sizeof(out->saved[0]));
    if (!out->items || !out->saved)
        return error_set_memory(error);
    return find_all(&f, out);
}

void peft_modules_free(peft_modules *modules)
{
    free(modules->items);
    free(modules->saved);
    *modules = (peft_modules){0};
}

static int compare_wrappers(const void *a, const void *b)
{
    const peft_module *x = *(peft_module *const *)a, *y = *(peft_module *const *)b;
    uint32_t common = x->size < y->size ? x->size : y->size;
    int order = memcmp(x->path, y->path, common);
    if (order == 0 && x->size != y->size)
        order = x->size < y->size ? -1 : 1;
    if (order == 0 && x->depth != y->depth)
        order = x->depth < y->depth ? -1 : 1;
    return order;
}

peft_module **peft_modules_fused(peft_modules *modules)
{
    peft_module **fused = calloc(modules->n_fused + 1, sizeof(fused[0]));
    if (!fused)
        return NULL;
    size_t count = 0;
    for (uint32_t i = 0; i < modules->count; i++) {
        if (modules->items[i].fused)
            fused[count++] = &modules->items[i];
    }
    qsort(fused, count, sizeof(fused[0]), compare_wrappers);
    return fused;
}

size_t peft_wrappers(peft_module *const *group, size_t left)
{
    size_t count = 0;
    while (count < left && group[count]->size == group[0]->size &&
           memcmp(group[count]->path, group[0]->path, group[0]->size) == 0) {
        if (count == PEFT_WRAPPERS_MAX || group[count]->depth != count)
            return 0;
        count++;
    }
    return count;
}

const char *peft_parameter_of(const char *target, const peft_module *module)
{
    const char *dot = strrchr(target, '.');
    if (!dot)
        return target;
    return peft_ends_with(module->path, module->size, target, (size_t)(dot - target))
               ? dot + 1
               : NULL;
}
