/* SPDX-License-Identifier: Apache-2.0 */
#include "adapter/tensor_files.h"
#include "adapter/file_pages.h"
#include "dtype.h"
#include "error_set.h"
#include "versioned.h"

#include <errno.h>
#include <fcntl.h>
#include <jansson.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define TENSORS_MAX ((uint64_t)1 << 20)
#define METADATA_MAX 65536 /* pairs */
/* The shortest entry: "":{"dtype":"U8","shape":[],"data_offsets":[0,0]}, and the most
   commas that one has: between dimensions, offsets, fields and entries. */
#define ENTRY_MIN 48
#define ENTRY_COMMAS (FANIN_MAX_DIMS - 1 + 1 + 2 + 1)

struct fanin_safetensors {
    int fd;
    json_t *metadata;                 /* owns the strings of pairs */
    fanin_safetensors_entry *entries; /* own their names */
    uint32_t *by_name;
    size_t count;
    fanin_pair *pairs;
    size_t n_pairs;
};

static fanin_status invalid(fanin_error *error, const char *name, const char *why)
{
    error_place place = {.key = name,
                         .remedy = "write the file anew with the safetensors package"};
    return error_set(error, FANIN_ERR_MISMATCH, &place,
                     "not a valid safetensors file: %s", why);
}

/*
 * The JSON library builds a tree before anybody can look at it. This pass makes sure that
 * no tree is larger than the header of a file with that many bytes can need, and that the
 * header has no more than @p members_out members that are objects.
 */
static const char *scan_header(const char *text, size_t size, size_t *members_out)
{
    if (size < 2 || text[0] != '{')
        return "the header does not begin with a brace";
    /* The library skips some of them, and does not count those. */
    if (memchr(text, '\0', size))
        return "the header holds a NUL byte";
    uint64_t counts[UCHAR_MAX + 1] = {0}; /* of bytes outside of strings */
    bool quoted = false;
    for (size_t i = 0; i < size; i++) {
        unsigned char c = (unsigned char)text[i];
        if (c == '"')
            quoted = !quoted;
        else if (!quoted)
            counts[c]++;
        else if (c == '\\')
            i++;
    }
    if (counts['-'] > 0)
        return "the header holds a negative number";
    uint64_t braces = counts['{'], brackets = counts['['], commas = counts[','];
    uint64_t most = size / ENTRY_MIN + 1;
    if (most > TENSORS_MAX)
        most = TENSORS_MAX;
    /* The root and the metadata are objects too; each pair of the latter has a comma. */
    if (braces > most + 2 || brackets > 2 * most)
        return "the header holds more than tensors";
    *members_out = (size_t)(braces - 1);
    return commas > most * ENTRY_COMMAS + METADATA_MAX
               ? "the header holds too many commas"
               : NULL;
}

static const char *read_sizes(const json_t *list, uint32_t max, uint64_t *out,
                              uint32_t *count_out)
{
    if (!json_is_array(list))
        return "a field of an entry is missing or no array";
    size_t count = json_array_size(list);
    if (count > max)
        return "a tensor has too many dimensions";
    for (size_t i = 0; i < count; i++) {
        const json_t *number = json_array_get(list, i);
        if (!json_is_integer(number) || json_integer_value(number) < 0)
            return "a dimension or an offset is no integer";
        out[i] = (uint64_t)json_integer_value(number);
    }
    *count_out = (uint32_t)count;
    return NULL;
}

/* @p data: where tensors' bytes begin; @p end: the file's size. The name is left out. */
static const char *read_header_entry(const json_t *value, uint64_t data, uint64_t end,
                                     fanin_safetensors_entry *out)
{
    if (!json_is_object(value) || json_object_size(value) != 3)
        return "an entry is not made of dtype, shape and data_offsets";
    const char *dtype = json_string_value(json_object_get(value, "dtype"));
    *out = (fanin_safetensors_entry){.struct_size = sizeof *out};
    out->dtype = dtype ? fanin_dtype_from_name(dtype) : 0;
    if (out->dtype == 0)
        return "an entry's dtype is missing or unknown";

    uint64_t offsets[2];
    uint32_t two = 0;
    const char *why = read_sizes(json_object_get(value, "shape"), FANIN_MAX_DIMS,
                                 out->shape, &out->n_dims);
    if (!why)
        why = read_sizes(json_object_get(value, "data_offsets"), 2, offsets, &two);
    if (why)
        return why;
    if (two != 2 || offsets[0] > offsets[1] || offsets[1] > end - data)
        return "a tensor's offsets lie outside of the file";
    if (!dtype_bytes(out->dtype, out->n_dims, out->shape, &out->bytes) ||
        out->bytes != offsets[1] - offsets[0])
        return "a tensor's offsets contradict its dtype and shape";
    out->offset = data + offsets[0];
    return NULL;
}

static int compare_offsets(const void *a, const void *b)
{
    const fanin_safetensors_entry *x = a, *y = b;
    if (x->offset != y->offset)
        return x->offset < y->offset ? -1 : 1;
    /* Empty tensors come before the one that begins where they lie. */
    if (x->bytes != y->bytes)
        return x->bytes < y->bytes ? -1 : 1;
    return strcmp(x->name, y->name);
}

static int compare_names(const void *a, const void *b, void *file)
{
    const fanin_safetensors_entry *entries = ((fanin_safetensors *)file)->entries;
    return strcmp(entries[*(const uint32_t *)a].name,
                  entries[*(const uint32_t *)b].name);
}

static int compare_pairs(const void *a, const void *b)
{
    return strcmp(((const fanin_pair *)a)->key, ((const fanin_pair *)b)->key);
}

static fanin_status read_metadata(fanin_safetensors *file, json_t *object,
                                  fanin_error *error)
{
    if (!json_is_object(object))
        return invalid(error, NULL, "__metadata__ is no object");
    if (file->metadata)
        return invalid(error, NULL, "__metadata__ is there twice");
    file->metadata = json_incref(object);
    file->pairs = calloc(json_object_size(object) + 1, sizeof file->pairs[0]);
    if (!file->pairs)
        return error_set_memory(error);
    const char *key;
    json_t *value;
    json_object_foreach(object, key, value)
    {
        if (!json_is_string(value))
            return invalid(error, key,
                           "__metadata__ holds something other than strings");
        file->pairs[file->n_pairs++] =
            (fanin_pair){.key = key, .value = json_string_value(value)};
    }
    qsort(file->pairs, file->n_pairs, sizeof file->pairs[0], compare_pairs);
    return FANIN_OK;
}

/* The header's text and how far it was read. */
typedef struct header_text {
    const char *text;
    size_t size, at;
} header_text;

static bool is_blank(char c)
{
    return c == ' ' || c == '\t' || c == '\n' || c == '\r';
}

/* What follows next but for whitespace; '\0': the end, or a byte that is no JSON anyway. */
static char next_byte(header_text *h)
{
    while (h->at < h->size && is_blank(h->text[h->at]))
        h->at++;
    return h->at < h->size ? h->text[h->at] : '\0';
}

static fanin_status no_json(fanin_error *error, const char *why, size_t at)
{
    char sentence[200];
    snprintf(sentence, sizeof sentence,
             "its header is no JSON object: %.120s at byte %zu", why, at);
    return invalid(error, NULL, sentence);
}

/* The next value, whatever its type; @p value_out is to be released. */
static fanin_status read_json_value(header_text *h, json_t **value_out,
                                    fanin_error *error)
{
    json_error_t detail;
    *value_out = json_loadb(
        h->text + h->at, h->size - h->at,
        JSON_DECODE_ANY | JSON_DISABLE_EOF_CHECK | JSON_REJECT_DUPLICATES, &detail);
    if (!*value_out && json_error_code(&detail) == json_error_out_of_memory)
        return error_set_memory(error);
    size_t place = h->at + (size_t)detail.position;
    if (!*value_out)
        return no_json(error, detail.text, place);
    h->at = place; /* of the first byte after the value */
    return FANIN_OK;
}

/* A member whose name is known. */
static fanin_status read_member(fanin_safetensors *file, size_t room, header_text *h,
                                const char *name, uint64_t end, fanin_error *error)
{
    json_t *value;
    fanin_status status = read_json_value(h, &value, error);
    if (status != FANIN_OK)
        return status;
    if (strcmp(name, "__metadata__") == 0) {
        status = read_metadata(file, value, error);
        json_decref(value);
        return status;
    }
    fanin_safetensors_entry entry;
    const char *why =
        read_header_entry(value, SAFETENSORS_LENGTH + h->size, end, &entry);
    json_decref(value);
    if (!why && file->count == room)
        why = "the header holds more than tensors"; /* the scan has counted them */
    if (why)
        return invalid(error, name, why);
    if (!(entry.name = strdup(name)))
        return error_set_memory(error);
    file->entries[file->count++] = entry;
    return FANIN_OK;
}

/*
 * Member by member, because a tree of all of them would take ten times the memory of what is
 * kept. @p room: no more members than that are objects; @p end: the file's size.
 */
static fanin_status read_members(fanin_safetensors *file, size_t room, header_text *h,
                                 uint64_t end, fanin_error *error)
{
    file->entries = calloc(room + 1, sizeof file->entries[0]);
    file->by_name = calloc(room + 1, sizeof file->by_name[0]);
    if (!file->entries || !file->by_name)
        return error_set_memory(error);
    h->at = 1; /* the scan has seen the brace */
    bool more = next_byte(h) != '}';
    while (more) {
        if (next_byte(h) != '"')
            return no_json(error, "a name is expected", h->at);
        json_t *name;
        fanin_status status = read_json_value(h, &name, error);
        if (status != FANIN_OK)
            return status;
        if (next_byte(h) == ':') {
            h->at++;
            status = read_member(file, room, h, json_string_value(name), end, error);
        } else {
            status = no_json(error, "':' is expected", h->at);
        }
        json_decref(name);
        if (status != FANIN_OK)
            return status;
        more = next_byte(h) == ',';
        if (more)
            h->at++;
    }
    if (next_byte(h) != '}')
        return no_json(error, "',' or '}' is expected", h->at);
    h->at++;
    (void)next_byte(h);
    return h->at < h->size ? no_json(error, "something follows it", h->at) : FANIN_OK;
}

static fanin_status sort_entries(fanin_safetensors *file, fanin_error *error)
{
    for (size_t i = 0; i < file->count; i++)
        file->by_name[i] = (uint32_t)i;
    qsort_r(file->by_name, file->count, sizeof file->by_name[0], compare_names, file);
    for (size_t i = 1; i < file->count; i++) {
        const char *name = file->entries[file->by_name[i]].name;
        if (strcmp(name, file->entries[file->by_name[i - 1]].name) == 0)
            return invalid(error, name, "two tensors have the same name");
    }
    return FANIN_OK;
}

/* Without holes and overlaps, from the first byte after the header to the last. */
static fanin_status check_tiling(const fanin_safetensors *file, uint64_t data,
                                 uint64_t end, fanin_error *error)
{
    uint64_t at = data;
    for (size_t i = 0; i < file->count; i++) {
        const fanin_safetensors_entry *entry = &file->entries[i];
        if (entry->offset != at)
            return invalid(error, entry->name,
                           entry->offset > at ? "there is a hole before a tensor"
                                              : "two tensors overlap");
        at += entry->bytes;
    }
    if (at != end)
        return invalid(error, NULL, "bytes follow the last tensor");
    return FANIN_OK;
}

fanin_status safetensors_parse(const char *text, size_t size, uint64_t file_size,
                               fanin_safetensors **out, fanin_error *error)
{
    if (size > SAFETENSORS_HEADER_MAX || file_size < SAFETENSORS_LENGTH ||
        size > file_size - SAFETENSORS_LENGTH)
        return invalid(error, NULL, "the header is longer than the file or 100 MB");
    size_t room = 0;
    const char *why = scan_header(text, size, &room);
    if (why)
        return invalid(error, NULL, why);
    fanin_safetensors *file = calloc(1, sizeof *file);
    if (!file)
        return error_set_memory(error);
    file->fd = -1;

    header_text header = {.text = text, .size = size};
    fanin_status status = read_members(file, room, &header, file_size, error);
    if (status == FANIN_OK)
        qsort(file->entries, file->count, sizeof file->entries[0], compare_offsets);
    if (status == FANIN_OK)
        status = sort_entries(file, error);
    if (status == FANIN_OK)
        status = check_tiling(file, SAFETENSORS_LENGTH + size, file_size, error);
    if (status != FANIN_OK) {
        fanin_safetensors_close(&file);
        return status;
    }
    *out = file;
    return FANIN_OK;
}

static fanin_status read_failed(fanin_error *error, const char *path)
{
    if (errno == 0)
        return invalid(error, NULL, "the file ends inside its header");
    return error_set_errno(error, FANIN_ERR_IO, errno, NULL, "cannot read '%s'", path);
}

static fanin_status parse_safetensors(int fd, const char *path, fanin_safetensors **out,
                                      fanin_error *error)
{
    struct stat info;
    uint8_t length[SAFETENSORS_LENGTH];
    if (fstat(fd, &info) != 0)
        return read_failed(error, path);
    if (!S_ISREG(info.st_mode))
        return error_set(error, FANIN_ERR_IO, NULL, "'%s' is no regular file", path);
    if (!file_read(fd, length, sizeof length, 0))
        return read_failed(error, path);
    uint64_t size = 0;
    for (int i = SAFETENSORS_LENGTH - 1; i >= 0; i--)
        size = size << 8 | length[i];
    if (size > SAFETENSORS_HEADER_MAX ||
        size > (uint64_t)info.st_size - SAFETENSORS_LENGTH)
        return invalid(error, NULL, "the header is longer than the file or 100 MB");
    char *text = malloc(size + 1);
    if (!text)
        return error_set_memory(error);
    fanin_status status =
        file_read(fd, text, size, SAFETENSORS_LENGTH)
            ? safetensors_parse(text, size, (uint64_t)info.st_size, out, error)
            : read_failed(error, path);
    free(text);
    return status;
}

fanin_status fanin_safetensors_open(const char *path, fanin_safetensors **out,
                                    fanin_error *error)
{
    if (!path || !out)
        return error_set(error, FANIN_ERR_ARGUMENT, NULL, "path or result is NULL");
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NOCTTY | O_NONBLOCK);
    if (fd < 0)
        return error_set_errno(error,
                               errno == ENOENT ? FANIN_ERR_NOT_FOUND : FANIN_ERR_IO,
                               errno, NULL, "cannot open '%s'", path);
    fanin_safetensors *file = NULL;
    fanin_status status = parse_safetensors(fd, path, &file, error);
    if (status != FANIN_OK || !file) {
        close(fd);
        return status;
    }
    file->fd = fd;
    *out = file;
    return FANIN_OK;
}

void fanin_safetensors_close(fanin_safetensors **file)
{
    if (!file || !*file)
        return;
    fanin_safetensors *f = *file;
    *file = NULL;
    if (f->fd >= 0)
        close(f->fd);
    json_decref(f->metadata);
    for (size_t i = 0; i < f->count; i++)
        free((char *)f->entries[i].name);
    free(f->entries);
    free(f->by_name);
    free(f->pairs);
    free(f);
}

size_t fanin_safetensors_count(const fanin_safetensors *file)
{
    return file->count;
}

bool fanin_safetensors_get(const fanin_safetensors *file, size_t index,
                           fanin_safetensors_entry *entry)
{
    if (index >= file->count)
        return false;
    versioned_write(entry, &file->entries[index], sizeof *entry);
    return true;
}

int64_t fanin_safetensors_find(const fanin_safetensors *file, const char *name)
{
    size_t low = 0, high = file->count;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        int order = strcmp(name, file->entries[file->by_name[middle]].name);
        if (order == 0)
            return file->by_name[middle];
        if (order < 0)
            high = middle;
        else
            low = middle + 1;
    }
    return -1;
}

size_t fanin_safetensors_metadata(const fanin_safetensors *file,
                                  const fanin_pair **pairs_out)
{
    *pairs_out = file->pairs;
    return file->n_pairs;
}

int fanin_safetensors_descriptor(const fanin_safetensors *file)
{
    return file->fd;
}
