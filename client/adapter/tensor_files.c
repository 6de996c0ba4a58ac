/* SPDX-License-Identifier: Apache-2.0 */
#include "dtype.h"
#include "adapter/tensor_files.h"

#include "error_set.h"
#include "text.h"
#include <ctype.h>
#include <inttypes.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* --------------------------------------------------------------- one file */

#define ALIGNMENT 8
#define N_DTYPES (DTYPE_LAST + 1)

/* Counts while at is NULL, writes otherwise: the same code finds the size and fills. */
typedef struct sink {
    uint8_t *at;
    uint64_t size;
} sink;

static void put_json_text(sink *s, const void *data, size_t size)
{
    if (s->at)
        memcpy(s->at + s->size, data, size);
    s->size += size;
}

#define PUT_LITERAL(s, text) put_json_text(s, text, sizeof(text) - 1)

static void put_decimal(sink *s, uint64_t value)
{
    char digits[20];
    size_t at = sizeof digits;
    do {
        digits[--at] = (char)('0' + value % 10);
        value /= 10;
    } while (value > 0);
    put_json_text(s, digits + at, sizeof digits - at);
}

/* A JSON string as serde_json writes it: two-character escapes where JSON has them, \u00xx
   in lower case for the other control characters, everything else as it is. */
static void put_string(sink *s, const char *text)
{
    static const char short_escapes[32] = {
        ['\b'] = 'b', ['\t'] = 't', ['\n'] = 'n', ['\f'] = 'f', ['\r'] = 'r'};
    static const char digits[] = "0123456789abcdef";

    PUT_LITERAL(s, "\"");
    for (const char *run = text;;) {
        const char *at = run;
        while ((unsigned char)*at >= 0x20 && *at != '"' && *at != '\\')
            at++;
        put_json_text(s, run, (size_t)(at - run));
        unsigned char c = (unsigned char)*at;
        if (c == '\0')
            break;
        char escape[6] = {'\\', (char)c, '0', '0'};
        size_t size = 2;
        if (c < 0x20 && short_escapes[c]) {
            escape[1] = short_escapes[c];
        } else if (c < 0x20) {
            escape[1] = 'u';
            escape[4] = digits[c >> 4];
            escape[5] = digits[c & 15];
            size = 6;
        }
        put_json_text(s, escape, size);
        run = at + 1;
    }
    PUT_LITERAL(s, "\"");
}

/* @p plain: the name's bytes if none of them needs an escape, else 0. */
static void put_item(sink *s, const safetensors_item *item, uint32_t plain,
                     uint64_t begin)
{
    const char *dtype = fanin_dtype_name(item->dtype);
    PUT_LITERAL(s, ",");
    if (plain > 0) {
        PUT_LITERAL(s, "\"");
        put_json_text(s, item->name, plain);
        PUT_LITERAL(s, "\"");
    } else {
        put_string(s, item->name);
    }
    PUT_LITERAL(s, ":{\"dtype\":\"");
    put_json_text(s, dtype, strlen(dtype));
    PUT_LITERAL(s, "\",\"shape\":[");
    for (uint32_t d = 0; d < item->n_dims; d++) {
        if (d > 0)
            PUT_LITERAL(s, ",");
        put_decimal(s, item->shape[d]);
    }
    PUT_LITERAL(s, "],\"data_offsets\":[");
    put_decimal(s, begin);
    PUT_LITERAL(s, ",");
    put_decimal(s, begin + item->bytes);
    PUT_LITERAL(s, "]}");
}

/* Indexes in the file's order: a stable counting sort by descending dtype. */
static uint32_t *file_order(const safetensors_item *items, size_t count)
{
    uint32_t *order = malloc((count ? count : 1) * sizeof order[0]);
    if (!order)
        return NULL;
    size_t first[N_DTYPES + 1] = {0};
    for (size_t i = 0; i < count; i++)
        first[N_DTYPES - items[i].dtype]++;
    size_t sum = 0;
    for (int d = 0; d <= N_DTYPES; d++) {
        size_t here = first[d];
        first[d] = sum;
        sum += here;
    }
    for (size_t i = 0; i < count; i++)
        order[first[N_DTYPES - items[i].dtype]++] = (uint32_t)i;
    return order;
}

/* Offsets are written from the data's start. Returns the size without padding. */
static uint64_t put_header(uint8_t *at, const safetensors_item *items,
                           const uint32_t *order, const uint32_t *plain, size_t count,
                           uint64_t *offsets_out, uint64_t *data_out)
{
    sink s = {.at = at};
    uint64_t begin = 0;
    PUT_LITERAL(&s, "{\"__metadata__\":{\"format\":\"pt\"}");
    for (size_t i = 0; i < count; i++) {
        const safetensors_item *item = &items[order[i]];
        put_item(&s, item, plain[order[i]], begin);
        offsets_out[order[i]] = begin;
        begin += item->bytes;
    }
    PUT_LITERAL(&s, "}");
    *data_out = begin;
    return s.size;
}

/* The bytes of a name that is ASCII without anything to escape; 0: it is not, or empty. */
static uint32_t plain_size(const char *name)
{
    const char *at = name;
    while (*at >= 0x20 && *at < 0x7f && *at != '"' && *at != '\\')
        at++;
    return *at == '\0' ? (uint32_t)(at - name) : 0;
}

static fanin_status check_items(const safetensors_item *items, size_t count,
                                uint32_t *plain_out, fanin_error *error)
{
    uint64_t sum = 0;
    for (size_t i = 0; i < count; i++) {
        const char *name = items[i].name;
        error_place place = {.phase = "plan", .key = name};
        plain_out[i] = plain_size(name);
        if (strcmp(name, "__metadata__") == 0)
            return error_set(error, FANIN_ERR_MISMATCH, &place,
                             "a safetensors file cannot hold a tensor of this name");
        if (plain_out[i] == 0 && !utf8_valid(name, strlen(name)))
            return error_set(error, FANIN_ERR_MISMATCH, &place,
                             "the tensor's name is not UTF-8");
        if (!fanin_dtype_name(items[i].dtype))
            return error_set(error, FANIN_ERR_MISMATCH, &place, "dtype %d is unknown",
                             (int)items[i].dtype);
        if (__builtin_add_overflow(sum, items[i].bytes, &sum) || sum > INT64_MAX / 2)
            return error_set(error, FANIN_ERR_MISMATCH, &place,
                             "the tensors together are larger than any file");
    }
    return FANIN_OK;
}

/* Items that were checked, in the file's order. */
static fanin_status lay_out_in_order(const safetensors_item *items,
                                     const uint32_t *order, const uint32_t *plain,
                                     size_t count, uint64_t *offsets_out,
                                     safetensors_layout *out, fanin_error *error)
{
    uint64_t data,
        text = put_header(NULL, items, order, plain, count, offsets_out, &data);
    uint64_t padded = (text + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    if (padded > SAFETENSORS_HEADER_MAX)
        return error_set(error, FANIN_ERR_MISMATCH, NULL,
                         "the safetensors header of %zu tensors would take %" PRIu64
                         " bytes; the format allows %" PRIu64,
                         count, padded, (uint64_t)SAFETENSORS_HEADER_MAX);
    uint8_t *header = malloc(SAFETENSORS_LENGTH + padded);
    if (!header)
        return error_set_memory(error);
    for (int i = 0; i < SAFETENSORS_LENGTH; i++)
        header[i] = (uint8_t)(padded >> (8 * i));
    put_header(header + SAFETENSORS_LENGTH, items, order, plain, count, offsets_out,
               &data);
    memset(header + SAFETENSORS_LENGTH + text, ' ', padded - text);
    for (size_t i = 0; i < count; i++)
        offsets_out[i] += SAFETENSORS_LENGTH + padded;
    *out = (safetensors_layout){.header = header,
                                .header_size = SAFETENSORS_LENGTH + padded,
                                .file_size = SAFETENSORS_LENGTH + padded + data};
    return FANIN_OK;
}

fanin_status safetensors_lay_out(const safetensors_item *items, size_t count,
                                 uint64_t *offsets_out, safetensors_layout *out,
                                 fanin_error *error)
{
    uint32_t *plain = calloc(count + 1, sizeof plain[0]), *order = NULL;
    if (!plain)
        return error_set_memory(error);
    fanin_status status = check_items(items, count, plain, error);
    if (status == FANIN_OK && !(order = file_order(items, count)))
        status = error_set_memory(error);
    if (status == FANIN_OK)
        status = lay_out_in_order(items, order, plain, count, offsets_out, out, error);
    free(order);
    free(plain);
    return status;
}

/* ------------------------------------------------------------------- files */

/* Keys order[0 .. count), ascending by their names in the file, become file number @p at. */
static fanin_status lay_out_files(const key_table *keys, const char *const *names,
                                  const uint32_t *order, size_t count,
                                  tensor_files *out, size_t at, fanin_error *error)
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

static fanin_status make_room_for_files(const key_table *keys, size_t count,
                                        tensor_files *out, fanin_error *error)
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
    fanin_status status = make_room_for_files(keys, 1, out, error);
    if (status == FANIN_OK) {
        snprintf(out->files[0].name, sizeof out->files[0].name, "%s", name);
        status = lay_out_files(keys, names, order, keys->count, out, 0, error);
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

static int compare_model_keys(const void *a, const void *b, void *cookie)
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
    qsort_r(c->order, keys->count, sizeof c->order[0], compare_model_keys,
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

static fanin_status cut_into_files(const key_table *keys, const cut *c, uint64_t page,
                                   tensor_files *out, fanin_error *error)
{
    fanin_status status = make_room_for_files(keys, c->count, out, error);
    for (size_t i = 0; i < c->count && status == FANIN_OK; i++) {
        tensor_file *file = &out->files[i];
        file->at = (out->span + page - 1) / page * page;
        if (c->count == 1)
            snprintf(file->name, sizeof file->name, "%s", MODEL_FILE);
        else
            snprintf(file->name, sizeof file->name, "model-%05zu-of-%05zu.safetensors",
                     i + 1, c->count);
        status = lay_out_files(keys, NULL, c->order + c->first[i],
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
        status = cut_into_files(keys, &c, page, out, error);
    free(c.order);
    free(c.file_of);
    free(c.first);
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
