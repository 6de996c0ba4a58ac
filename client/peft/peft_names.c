/* SPDX-License-Identifier: Apache-2.0 */
#include "peft/peft_config.h"

#include "error_set.h"
#include "peft/peft_maker.h"
#include <ctype.h>
#include <fanin/client.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define TEXT(literal) literal, sizeof(literal) - 1

static bool is_text(const char *component, size_t size, const char *text,
                    size_t text_size)
{
    return size == text_size && memcmp(component, text, size) == 0;
}

/* Components that PyTorch's wrappers add to a parameter's name and that no file has. */
static bool is_wrapper(const char *component, size_t size)
{
    if (component[0] != '_')
        return false;
    return is_text(component, size, TEXT("_fsdp_wrapped_module")) ||
           is_text(component, size, TEXT("_orig_mod")) ||
           is_text(component, size, TEXT("_checkpoint_wrapped_module"));
}

/* A name while it is taken apart; offsets count from text. */
typedef struct scan {
    char *text;
    size_t size;
    const struct marker *marker; /* the last one, NULL: none */
    size_t marker_start, marker_end;
} scan;

/* A component after which PEFT puts the adapter's name. */
typedef struct marker {
    const char *text;
    size_t size;
    peft_part part;
    /* brings the name into the form that files have. @p tail is what follows the marker's dot,
       NULL if nothing does */
    peft_part (*fix)(scan *s, const char *tail);
} marker;

/* Removes the bytes [from, to) of the name. */
static void cut_name(scan *s, size_t from, size_t to)
{
    memmove(s->text + from, s->text + to, s->size - to + 1);
    s->size -= to - from;
}

/* lora_A.<adapter>.weight and lora_A.weight, of lora_B the same with "bias". */
static peft_part fix_layer(scan *s, const char *tail)
{
    if (!tail)
        return PEFT_MALFORMED;
    const char *dot = strchr(tail, '.');
    const char *leaf = dot ? dot + 1 : tail;
    peft_part part = PEFT_MALFORMED;
    if (strcmp(leaf, "weight") == 0)
        part = s->marker->part;
    else if (strcmp(leaf, "bias") == 0 && s->marker->part == PEFT_LORA_B)
        part = PEFT_LORA_B_BIAS;
    if (part != PEFT_MALFORMED && dot)
        cut_name(s, (size_t)(tail - s->text), (size_t)(leaf - s->text));
    return part;
}

/* lora_embedding_A.<adapter>, lora_diag.<adapter>, lora_magnitude_vector.<adapter>[.weight]: the
   file has the bare component. */
static peft_part fix_bare(scan *s, const char *tail)
{
    const char *dot = tail ? strchr(tail, '.') : NULL;
    if (dot && (s->marker->part != PEFT_MAGNITUDE || strcmp(dot, ".weight") != 0))
        return PEFT_MALFORMED;
    cut_name(s, s->marker_end, s->size);
    return s->marker->part;
}

static peft_part fix_tokens(scan *s, const char *tail)
{
    (void)fix_bare(s, tail);
    return PEFT_OTHER;
}

/* <module>.modules_to_save.<adapter>.<parameter> */
static peft_part fix_saved(scan *s, const char *tail)
{
    const char *dot = tail ? strchr(tail, '.') : NULL;
    if (!dot)
        return PEFT_OTHER;
    cut_name(s, s->marker_start, (size_t)(dot + 1 - s->text));
    return PEFT_SAVED_MODULE;
}

static const marker *marker_of(const char *component, size_t size)
{
    static const marker markers[] = {
        {TEXT("lora_A"), PEFT_LORA_A, fix_layer},
        {TEXT("lora_B"), PEFT_LORA_B, fix_layer},
        {TEXT("lora_embedding_A"), PEFT_EMBEDDING_A, fix_bare},
        {TEXT("lora_embedding_B"), PEFT_EMBEDDING_B, fix_bare},
        {TEXT("lora_magnitude_vector"), PEFT_MAGNITUDE, fix_bare},
        {TEXT("lora_diag"), PEFT_DIAGONAL, fix_bare},
        {TEXT("trainable_tokens_delta"), PEFT_OTHER, fix_tokens},
        {TEXT("modules_to_save"), PEFT_SAVED_MODULE, fix_saved},
    };
    for (size_t i = 0; i < sizeof markers / sizeof markers[0]; i++) {
        if (is_text(component, size, markers[i].text, markers[i].size))
            return &markers[i];
    }
    return NULL;
}

static scan copy_components(const char *name, char *to)
{
    scan s = {.text = to};
    bool first = true;
    /* What DistributedDataParallel puts around the whole. */
    if (strncmp(name, "module." PEFT_PREFIX, sizeof("module." PEFT_PREFIX) - 1) == 0)
        name += sizeof("module.") - 1;
    for (const char *at = name;;) {
        const char *dot = strchrnul(at, '.');
        size_t size = (size_t)(dot - at);
        if (!is_wrapper(at, size)) {
            if (!first)
                to[s.size++] = '.';
            first = false;
            const marker *found = marker_of(at, size);
            if (found) {
                s.marker = found;
                s.marker_start = s.size;
                s.marker_end = s.size + size;
            }
            memcpy(to + s.size, at, size);
            s.size += size;
        }
        if (!*dot)
            break;
        at = dot + 1;
    }
    to[s.size] = '\0';
    return s;
}

static peft_part fix_tail(scan *s)
{
    const char *tail =
        s->text[s->marker_end] == '.' ? s->text + s->marker_end + 1 : NULL;
    return s->marker ? s->marker->fix(s, tail) : PEFT_OTHER;
}

peft_name peft_name_on_disk(const char *name, char buffer[PEFT_NAME_SIZE])
{
    scan s = copy_components(name, buffer + PEFT_PREFIX_SIZE);
    peft_part part = fix_tail(&s);
    size_t module = part == PEFT_OTHER || part == PEFT_MALFORMED ? 0 : s.marker_start;

    if (strncmp(s.text, PEFT_PREFIX, PEFT_PREFIX_SIZE) != 0) {
        memcpy(buffer, PEFT_PREFIX, PEFT_PREFIX_SIZE);
        s.text = buffer;
        s.size += PEFT_PREFIX_SIZE;
        if (module > 0)
            module += PEFT_PREFIX_SIZE;
    }
    if (module > PEFT_PREFIX_SIZE) {
        module--; /* the dot before the marker */
    } else if (part != PEFT_OTHER) {
        /* A layer needs a module that it belongs to. */
        part = part == PEFT_SAVED_MODULE ? PEFT_OTHER : PEFT_MALFORMED;
        module = 0;
    }
    return (peft_name){.text = s.text,
                       .size = (uint32_t)s.size,
                       .module = (uint32_t)module,
                       .part = part};
}

bool fanin_adapter_name(const char *name, char *out, size_t capacity)
{
    char buffer[PEFT_NAME_SIZE];
    if (name == NULL || out == NULL || strlen(name) > FANIN_MAX_NAME)
        return false;
    peft_name on_disk = peft_name_on_disk(name, buffer);
    if (on_disk.size >= capacity)
        return false;
    memcpy(out, on_disk.text, on_disk.size);
    out[on_disk.size] = '\0';
    return true;
}

static int compare_tensors(const void *a, const void *b)
{
    return strcmp(((const peft_tensor *)a)->name.text,
                  ((const peft_tensor *)b)->name.text);
}

const char *peft_full_key(const char *publication, const char *name, char out[640])
{
    snprintf(out, 640, "%s:%s", publication, name);
    return out;
}

/* Sorts unless the key table's order survived, and looks for one name twice. */
static fanin_status sort_tensor_names(peft_names *names, const key_table *keys,
                                      const char *publication, fanin_error *error)
{
    bool sorted = true;
    for (uint32_t i = 1; i < names->count && sorted; i++)
        sorted = compare_tensors(&names->tensors[i - 1], &names->tensors[i]) < 0;
    if (sorted)
        return FANIN_OK;
    qsort(names->tensors, names->count, sizeof names->tensors[0], compare_tensors);
    for (uint32_t i = 1; i < names->count; i++) {
        const peft_tensor *a = &names->tensors[i - 1], *b = &names->tensors[i];
        if (compare_tensors(a, b) < 0)
            continue;
        char key[640];
        error_place place = {
            .phase = "plan",
            .key = peft_full_key(publication, keys->entries[a->key].name, key),
            .remedy = "publish one adapter in one run, each tensor under one name"};
        return error_set(
            error, FANIN_ERR_MISMATCH, &place,
            "'%.150s' and '%.150s' both become '%.150s' in an adapter file",
            keys->entries[a->key].name, keys->entries[b->key].name, a->name.text);
    }
    return FANIN_OK;
}

fanin_status peft_names_make(const key_table *keys, const char *publication,
                             peft_names *out, fanin_error *error)
{
    size_t room = 1;
    uint32_t count = keys->count;
    for (uint32_t i = 0; i < count; i++)
        room += strlen(keys->entries[i].name) + sizeof PEFT_PREFIX;
    *out = (peft_names){.count = count};
    out->storage = malloc(room);
    out->tensors = calloc(count ? count : 1, sizeof out->tensors[0]);
    if (!out->storage || !out->tensors)
        return error_set_memory(error);

    char *to = out->storage, buffer[PEFT_NAME_SIZE];
    for (uint32_t i = 0; i < count; i++) {
        const char *name = keys->entries[i].name;
        if (strlen(name) > FANIN_MAX_NAME)
            return error_set(error, FANIN_ERR_MISMATCH, NULL,
                             "the key table holds a name of more than %d bytes",
                             FANIN_MAX_NAME);
        peft_name on_disk = peft_name_on_disk(name, buffer);
        memcpy(to, on_disk.text, on_disk.size + 1);
        on_disk.text = to;
        to += on_disk.size + 1;
        out->tensors[i] = (peft_tensor){.name = on_disk, .key = i};
    }
    return count > 1 ? sort_tensor_names(out, keys, publication, error) : FANIN_OK;
}

void peft_names_free(peft_names *names)
{
    free(names->tensors);
    free(names->storage);
    *names = (peft_names){0};
}

/* ---------------------------------------------------------------- modules */

#define BASE_LAYER ".base_layer"
#define OUT_PROJ BASE_LAYER ".out_proj"

static fanin_status refuse_module(const peft_maker *m, uint32_t key,
                                  const char *message)
{
    return peft_refuse(m, key,
                       "publish every tensor of the adapter, whole, under PEFT's names",
                       "%s", message);
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
    m->path = name->text + PEFT_PREFIX_SIZE;
    m->size = name->module - (uint32_t)PEFT_PREFIX_SIZE;
    /* PEFT gives a MultiheadAttention's out_proj its layer along with the module's own. */
    size_t tail = sizeof OUT_PROJ - 1;
    if (m->size > tail && memcmp(m->path + m->size - tail, OUT_PROJ, tail) == 0)
        m->size -= (uint32_t)tail;
    tail = sizeof BASE_LAYER - 1;
    while (m->size > tail && memcmp(m->path + m->size - tail, BASE_LAYER, tail) == 0) {
        m->size -= (uint32_t)tail;
        m->depth++;
    }
    m->fused = m->depth > 0 || peft_ends_with(m->path, m->size, "experts", 7);
}

static bool same_module(const peft_name *a, const peft_name *b)
{
    return a->module == b->module && memcmp(a->text, b->text, a->module) == 0;
}

/* Proves that the matrices of one layer, whose tensors are given by part, fit each other. */
static fanin_status prove_pair(const peft_maker *m, const peft_tensor *const *parts,
                               const peft_tensor *any, peft_module *out)
{
    bool plain = parts[PEFT_LORA_A] != NULL;
    const peft_tensor *a = parts[plain ? PEFT_LORA_A : PEFT_EMBEDDING_A];
    const peft_tensor *b = parts[plain ? PEFT_LORA_B : PEFT_EMBEDDING_B];
    if (!a)
        return refuse_module(m, any->key,
                             parts[PEFT_LORA_B] || b
                                 ? "lora_B is published without its lora_A"
                                 : "a part of a LoRA layer is published without its "
                                   "lora_A and lora_B");
    if (!b)
        return refuse_module(m, a->key, "lora_A is published without its lora_B");
    if (plain && (parts[PEFT_EMBEDDING_A] || parts[PEFT_EMBEDDING_B]))
        return refuse_module(m, a->key,
                             "one module has both lora_A and lora_embedding_A");

    const key_entry *rows = &m->keys->entries[a->key],
                    *columns = &m->keys->entries[b->key];
    out->key = a->key;
    out->embedding = !plain;
    if (rows->n_dims < 2 || columns->n_dims < 2)
        return refuse_module(m, rows->n_dims < 2 ? a->key : b->key,
                             "a LoRA matrix has fewer than two dimensions");
    out->rank = rows->shape[0];
    out->in = rows->shape[1];
    out->out = columns->shape[0];
    uint64_t r = columns->shape[1];
    /* A convolution has its rank divided among its groups, BD-LoRA among its blocks. */
    bool divided = columns->n_dims > 2 || peft_field(m, "use_bdlora");
    bool fits = r == out->rank || (divided && r > 0 && out->rank % r == 0);
    if (out->rank > 0 && fits)
        return FANIN_OK;
    return peft_refuse(m, a->key,
                       "publish global shapes: lora_A is [r, in], lora_B is [out, r]",
                       "lora_A has %" PRIu64 " rows, lora_B has %" PRIu64
                       " columns; both should be the rank",
                       out->rank, r);
}

static void note_malformed(peft_modules *out, const peft_tensor *t)
{
    if (t->name.part == PEFT_MALFORMED && !out->malformed)
        out->malformed = t;
}

/* All tensors of the module that *at belongs to are neighbours: their names share all up to
   ".lora_". Advances *at behind them. */
static fanin_status read_layer(peft_maker *m, uint32_t *at, peft_module *out)
{
    const peft_tensor *first = &m->names->tensors[*at];
    const peft_tensor *parts[PEFT_MALFORMED + 1] = {NULL};
    for (; *at < m->names->count; ++*at) {
        const peft_tensor *t = &m->names->tensors[*at];
        if (t->name.module == 0) { /* sorted in between, no part of a layer */
            note_malformed(&m->modules, t);
            continue;
        }
        if (!same_module(&first->name, &t->name) || t->name.part == PEFT_SAVED_MODULE)
            break;
        parts[t->name.part] = t;
    }
    read_path(out, &first->name);
    out->magnitude = parts[PEFT_MAGNITUDE] != NULL;
    out->bias = parts[PEFT_LORA_B_BIAS] != NULL;
    out->diagonal = parts[PEFT_DIAGONAL] != NULL;
    return prove_pair(m, parts, first, out);
}

static fanin_status find_all(peft_maker *m)
{
    peft_modules *out = &m->modules;
    for (uint32_t i = 0; i < m->names->count;) {
        const peft_tensor *t = &m->names->tensors[i];
        if (t->name.part == PEFT_OTHER || t->name.part == PEFT_MALFORMED) {
            note_malformed(out, t);
            i++;
        } else if (t->name.part == PEFT_SAVED_MODULE) {
            if (out->n_saved == 0 ||
                !same_module(&out->saved[out->n_saved - 1]->name, &t->name))
                out->saved[out->n_saved++] = t;
            i++;
        } else {
            peft_module *module = &out->items[out->count];
            fanin_status status = read_layer(m, &i, module);
            if (status != FANIN_OK)
                return status;
            out->count++;
            out->n_fused += module->fused;
        }
    }
    return FANIN_OK;
}

fanin_status peft_modules_find(peft_maker *m)
{
    size_t layers = 0, saved = 0;
    for (uint32_t i = 0; i < m->names->count; i++) {
        const peft_name *name = &m->names->tensors[i].name;
        bool is_saved = name->part == PEFT_SAVED_MODULE;
        saved += is_saved;
        layers += name->module > 0 && !is_saved &&
                  (i == 0 || !same_module(name, &m->names->tensors[i - 1].name));
    }
    m->modules = (peft_modules){.items = calloc(layers + 1, sizeof(peft_module)),
                                .saved = calloc(saved + 1, sizeof(peft_tensor *))};
    if (!m->modules.items || !m->modules.saved)
        return error_set_memory(m->error);
    return find_all(m);
}

void peft_modules_free(peft_modules *modules)
{
    free(modules->items);
    free(modules->saved);
    *modules = (peft_modules){0};
}

int peft_compare(const char *a, size_t a_size, const char *b, size_t b_size)
{
    int order = memcmp(a, b, a_size < b_size ? a_size : b_size);
    return order != 0 ? order : (a_size > b_size) - (a_size < b_size);
}

static int compare_wrappers(const void *a, const void *b)
{
    const peft_module *x = *(peft_module *const *)a, *y = *(peft_module *const *)b;
    int order = peft_compare(x->path, x->size, y->path, y->size);
    return order != 0 ? order : (x->depth > y->depth) - (x->depth < y->depth);
}

/* How many layers from @p group on wrap parameters of one module; 0: more than
   PEFT_WRAPPERS_MAX, or a wrapper between them is missing. */
static size_t count_wrappers(peft_module *const *group, size_t left)
{
    size_t count = 0;
    while (count < left && peft_compare(group[count]->path, group[count]->size,
                                        group[0]->path, group[0]->size) == 0) {
        if (count == PEFT_WRAPPERS_MAX || group[count]->depth != count)
            return 0;
        count++;
    }
    return count;
}

fanin_status peft_each_group(peft_maker *m, peft_group_fn fn, void *cookie)
{
    size_t count = 0, n;
    peft_module **fused = calloc(m->modules.n_fused + 1, sizeof *fused);
    if (!fused)
        return error_set_memory(m->error);
    for (uint32_t i = 0; i < m->modules.count; i++)
        if (m->modules.items[i].fused)
            fused[count++] = &m->modules.items[i];
    qsort(fused, count, sizeof *fused, compare_wrappers);
    fanin_status status = FANIN_OK;
    for (size_t i = 0; i < count && status == FANIN_OK; i += n) {
        n = count_wrappers(fused + i, count - i);
        status = n > 0
                     ? fn(m, fused + i, n, cookie)
                     : peft_refuse(m, fused[i]->key,
                                   "publish the adapters of all wrapped parameters of "
                                   "the module",
                                   "the wrapped parameters of %.*s are not complete",
                                   (int)fused[i]->size, fused[i]->path);
    }
    free(fused);
    return status;
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
