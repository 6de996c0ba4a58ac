/* SPDX-License-Identifier: Apache-2.0 */
#include "peft/peft_names.h"
#include "error_set.h"

#include <fanin/client.h>
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
static void cut(scan *s, size_t from, size_t to)
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
        cut(s, (size_t)(tail - s->text), (size_t)(leaf - s->text));
    return part;
}

/* lora_embedding_A.<adapter>, lora_diag.<adapter>, lora_magnitude_vector.<adapter>[.weight]: the
   file has the bare component. */
static peft_part fix_bare(scan *s, const char *tail)
{
    const char *dot = tail ? strchr(tail, '.') : NULL;
    if (dot && (s->marker->part != PEFT_MAGNITUDE || strcmp(dot, ".weight") != 0))
        return PEFT_MALFORMED;
    cut(s, s->marker_end, s->size);
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
    cut(s, s->marker_start, (size_t)(dot + 1 - s->text));
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
static fanin_status sort_names(peft_names *names, const key_table *keys,
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
        if (strlen(name) > FANIN_MAX_NAME) {
            return error_set(error, FANIN_ERR_MISMATCH, NULL,
                             "the key table holds a name of more than %d bytes",
                             FANIN_MAX_NAME);
        }
        peft_name on_disk = peft_name_on_disk(name, buffer);
        memcpy(to, on_disk.text, on_disk.size + 1);
        on_disk.text = to;
        to += on_disk.size + 1;
        out->tensors[i] = (peft_tensor){.name = on_disk, .key = i};
    }
    return count > 1 ? sort_names(out, keys, publication, error) : FANIN_OK;
}

void peft_names_free(peft_names *names)
{
    free(names->tensors);
    free(names->storage);
    *names = (peft_names){0};
}
