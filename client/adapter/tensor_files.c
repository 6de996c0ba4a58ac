/* SPDX-License-Identifier: Apache-2.0 */
#include "adapter/tensor_files.h"

#include "error_set.h"
#include <ctype.h>
#include <inttypes.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ------------------------------------------------------------------- files */

/* Keys order[0 .. count), ascending by their names in the file, become file number @p at. */
static fanin_status lay_out(const key_table *keys, const char *const *names,
                            const uint32_t *order, size_t count, tensor_files *out,
                            size_t at, fanin_error *error)
{
    size_t room = count ? count : 1;
    safetensors_item *items = calloc(room, sizeof items[0]);
    uint64_t *offsets = calloc(room, sizeof offsets[0]);
    fanin_status status = items && offsets ? FANIN_OK : error_set_memory(error);
    for (size_t i = 0; i < count && status == FANIN_OK; i++) {
        const key_entry *key = &keys->entries[order[i]];
        items[i] = (safetensors_item){.name = names ? names[order[i]] : key->name,
                                      .dtype = key->dtype,
                                      .n_dims = key->n_dims,
                                      .shape = key->shape,
                                      .bytes = key->bytes};
    }
    tensor_file *file = &out->files[at];
    if (status == FANIN_OK)
        status = safetensors_lay_out(items, count, offsets, &file->layout, error);
    for (size_t i = 0; i < count && status == FANIN_OK; i++)
        out->to_of_key[order[i]] = file->at + offsets[i];
    free(items);
    free(offsets);
    return status;
}

static fanin_status make_room(const key_table *keys, size_t count, tensor_files *out,
                              fanin_error *error)
{
    *out = (tensor_files){.count = count};
    out->files = calloc(count, sizeof out->files[0]);
    out->to_of_key = calloc(keys->count ? keys->count : 1, sizeof out->to_of_key[0]);
    return out->files && out->to_of_key ? FANIN_OK : error_set_memory(error);
}

static void add_up(tensor_files *out, size_t at)
{
    uint64_t size = out->files[at].layout.file_size;
    out->bytes += size;
    out->largest = size > out->largest ? size : out->largest;
    out->span = out->files[at].at + size;
}

fanin_status tensor_files_one(const key_table *keys, const char *name,
                              const char *const *names, const uint32_t *order,
                              tensor_files *out, fanin_error *error)
{
    fanin_status status = make_room(keys, 1, out, error);
    if (status == FANIN_OK) {
        snprintf(out->files[0].name, sizeof out->files[0].name, "%s", name);
        status = lay_out(keys, names, order, keys->count, out, 0, error);
    }
    if (status == FANIN_OK)
        add_up(out, 0);
    else
        tensor_files_free(out);
    return status;
}

void tensor_files_free(tensor_files *files)
{
    for (size_t i = 0; files->files && i < files->count; i++)
        free(files->files[i].layout.header);
    free(files->files);
    free(files->to_of_key);
    free(files->index);
    *files = (tensor_files){.files = NULL};
}

size_t tensor_files_at(const tensor_files *files, uint64_t offset)
{
    size_t low = 0, high = files->count;
    while (high - low > 1) {
        size_t middle = low + (high - low) / 2;
        if (files->files[middle].at <= offset)
            low = middle;
        else
            high = middle;
    }
    return low;
}

/* ------------------------------------------------------------------- cutting */

/* Numbers in names by their value: layer 2 before layer 10. What is equal then, by its bytes. */
static int compare_natural(const char *a, const char *b)
{
    const char *x = a, *y = b;
    while (*x && *y) {
        if (!isdigit((unsigned char)*x) || !isdigit((unsigned char)*y)) {
            if (*x != *y)
                return (unsigned char)*x < (unsigned char)*y ? -1 : 1;
            x++;
            y++;
            continue;
        }
        x += strspn(x, "0");
        y += strspn(y, "0");
        size_t m = strspn(x, "0123456789"), n = strspn(y, "0123456789");
        int order = m != n ? (m < n ? -1 : 1) : strncmp(x, y, m);
        if (order != 0)
            return order;
        x += m;
        y += n;
    }
    if (*x || *y)
        return *x ? 1 : -1;
    return strcmp(a, b);
}

static int compare_keys(const void *a, const void *b, void *cookie)
{
    const key_table *keys = cookie;
    return compare_natural(keys->entries[*(const uint32_t *)a].name,
                           keys->entries[*(const uint32_t *)b].name);
}

/* Which key goes into which file. */
typedef struct cut {
    uint32_t *order;   /* keys by number of their file, then by name */
    uint32_t *file_of; /* by key */
    size_t *first;     /* by file, count + 1 of them: places in order */
    size_t count;      /* files */
} cut;

static void cut_free(cut *c)
{
    free(c->order);
    free(c->file_of);
    free(c->first);
}

/* One after the other, in the order of c->order; larger ones alone, between the others. */
static void number_files(const key_table *keys, uint64_t most, cut *c)
{
    size_t open = SIZE_MAX; /* the file that smaller ones go into */
    uint64_t filled = 0;
    for (uint32_t i = 0; i < keys->count; i++) {
        uint64_t bytes = keys->entries[c->order[i]].bytes;
        if (bytes > most) {
            c->file_of[c->order[i]] = (uint32_t)c->count++;
            continue;
        }
        if (open == SIZE_MAX || filled + bytes > most) {
            open = c->count++;
            filled = 0;
        }
        c->file_of[c->order[i]] = (uint32_t)open;
        filled += bytes;
    }
    c->count = c->count ? c->count : 1; /* of nothing: an empty one */
}

/* Keys ascend by name: so they do in each file. */
static void sort_by_file(const key_table *keys, cut *c)
{
    for (uint32_t i = 0; i < keys->count; i++)
        c->first[c->file_of[i] + 1]++;
    for (size_t i = 0; i < c->count; i++)
        c->first[i + 1] += c->first[i];
    for (uint32_t i = 0; i < keys->count; i++)
        c->order[c->first[c->file_of[i]]++] = i;
    memmove(c->first + 1, c->first, c->count * sizeof c->first[0]);
    c->first[0] = 0;
}

static fanin_status cut_keys(const key_table *keys, uint64_t most, cut *c,
                             fanin_error *error)
{
    size_t room = (size_t)keys->count + 1;
    *c = (cut){.order = calloc(room, sizeof c->order[0]),
               .file_of = calloc(room, sizeof c->file_of[0])};
    if (!c->order || !c->file_of)
        return error_set_memory(error);
    for (uint32_t i = 0; i < keys->count; i++)
        c->order[i] = i;
    qsort_r(c->order, keys->count, sizeof c->order[0], compare_keys,
            (void *)(uintptr_t)keys);
    number_files(keys, most, c);
    error_place place = {.phase = "plan", .remedy = "let a file have more bytes"};
    if (c->count > MODEL_MAX_FILES)
        return error_set(error, FANIN_ERR_LIMIT, &place,
                         "files of %" PRIu64 " bytes would be %zu, at most %d are made",
                         most, c->count, MODEL_MAX_FILES);
    c->first = calloc(c->count + 2, sizeof c->first[0]);
    if (!c->first)
        return error_set_memory(error);
    sort_by_file(keys, c);
    return FANIN_OK;
}

/* -------------------------------------------------------------------- a model */

static fanin_status write_index(const key_table *keys, const cut *c, tensor_files *out,
                                fanin_error *error)
{
    json_t *map = json_object(), *root = NULL;
    bool good = map != NULL;
    uint64_t total = 0;
    for (uint32_t i = 0; i < keys->count && good; i++) {
        const char *file = out->files[c->file_of[i]].name;
        good = json_object_set_new(map, keys->entries[i].name, json_string(file)) == 0;
        total += keys->entries[i].bytes;
    }
    if (good)
        root = json_pack("{s:{s:I}, s:O}", "metadata", "total_size", (json_int_t)total,
                         "weight_map", map);
    char *text =
        root ? json_dumps(root, JSON_INDENT(2) | JSON_SORT_KEYS | JSON_ENSURE_ASCII)
             : NULL;
    json_decref(root);
    json_decref(map);
    size_t size = text ? strlen(text) : 0;
    char *with_end = text ? realloc(text, size + 2) : NULL;
    if (!with_end) {
        free(text);
        return error_set_memory(error);
    }
    memcpy(with_end + size, "\n", 2);
    out->index = with_end;
    out->index_size = size + 1;
    return FANIN_OK;
}

static fanin_status make_files(const key_table *keys, const cut *c, uint64_t page,
                               tensor_files *out, fanin_error *error)
{
    fanin_status status = make_room(keys, c->count, out, error);
    for (size_t i = 0; i < c->count && status == FANIN_OK; i++) {
        tensor_file *file = &out->files[i];
        file->at = (out->span + page - 1) / page * page;
        if (c->count == 1)
            snprintf(file->name, sizeof file->name, "%s", MODEL_FILE);
        else
            snprintf(file->name, sizeof file->name, "model-%05zu-of-%05zu.safetensors",
                     i + 1, c->count);
        status = lay_out(keys, NULL, c->order + c->first[i],
                         c->first[i + 1] - c->first[i], out, i, error);
        if (status == FANIN_OK)
            add_up(out, i);
    }
    if (status == FANIN_OK && c->count > 1)
        status = write_index(keys, c, out, error);
    return status;
}

fanin_status tensor_files_of_model(const key_table *keys, uint64_t most, uint64_t page,
                                   tensor_files *out, fanin_error *error)
{
    cut c;
    *out = (tensor_files){.files = NULL};
    fanin_status status = cut_keys(keys, most ? most : MODEL_FILE_BYTES, &c, error);
    if (status == FANIN_OK)
        status = make_files(keys, &c, page, out, error);
    cut_free(&c);
    if (status != FANIN_OK)
        tensor_files_free(out);
    return status;
}

bool tensor_files_is_model(const char *name)
{
    unsigned number, count;
    int end = 0;
    if (strcmp(name, MODEL_FILE) == 0)
        return true;
    return strlen(name) < TENSOR_FILE_NAME &&
           sscanf(name, "model-%5u-of-%5u.safetensors%n", &number, &count, &end) == 2 &&
           end > 0 && name[end] == '\0' && number >= 1 && number <= count;
}
