/* SPDX-License-Identifier: Apache-2.0 */
#include "safetensors.h"
#include "dtype.h"
#include "error_set.h"

#include <errno.h>
#include <fcntl.h>
#include <jansson.h>
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
    json_t *root; /* owns all strings */
    fanin_safetensors_entry *entries;
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
 * the tree is no larger than the header of a file with that many bytes can need.
 */
static const char *scan_header(const char *text, size_t size)
{
    if (size < 2 || text[0] != '{')
        return "the header does not begin with a brace";
    uint64_t braces = 0, brackets = 0, commas = 0;
    bool quoted = false;
    for (size_t i = 0; i < size; i++) {
        char c = text[i];
        if (quoted) {
            if (c == '\\')
                i++;
            else if (c == '"')
                quoted = false;
            continue;
        }
        switch (c) {
        case '"':
            quoted = true;
            break;
        case '{':
            braces++;
            break;
        case '[':
            brackets++;
            break;
        case ',':
            commas++;
            break;
        case '-':
            return "the header holds a negative number";
        default:
            break;
        }
    }
    uint64_t most = size / ENTRY_MIN + 1;
    if (most > TENSORS_MAX)
        most = TENSORS_MAX;
    /* The root and the metadata are objects too; each pair of the latter has a comma. */
    if (braces > most + 2 || brackets > 2 * most)
        return "the header holds more than tensors";
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

/* @p data: where tensors' bytes begin; @p end: the file's size. */
static const char *read_entry(const char *name, const json_t *value, uint64_t data,
                              uint64_t end, fanin_safetensors_entry *out)
{
    if (!json_is_object(value) || json_object_size(value) != 3)
        return "an entry is not made of dtype, shape and data_offsets";
    const char *dtype = json_string_value(json_object_get(value, "dtype"));
    *out = (fanin_safetensors_entry){.struct_size = sizeof(*out), .name = name};
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
    file->pairs = calloc(json_object_size(object) + 1, sizeof(file->pairs[0]));
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
    qsort(file->pairs, file->n_pairs, sizeof(file->pairs[0]), compare_pairs);
    return FANIN_OK;
}

static fanin_status read_entries(fanin_safetensors *file, uint64_t data, uint64_t end,
                                 fanin_error *error)
{
    size_t room = json_object_size(file->root) + 1;
    file->entries = calloc(room, sizeof(file->entries[0]));
    file->by_name = calloc(room, sizeof(file->by_name[0]));
    if (!file->entries || !file->by_name)
        return error_set_memory(error);
    const char *name;
    json_t *value;
    json_object_foreach(file->root, name, value)
    {
        if (strcmp(name, "__metadata__") == 0) {
            fanin_status status = read_metadata(file, value, error);
            if (status)
                return status;
            continue;
        }
        const char *why =
            read_entry(name, value, data, end, &file->entries[file->count]);
        if (why)
            return invalid(error, name, why);
        file->count++;
    }
    return FANIN_OK;
}

/* Without holes and overlaps, from the first byte after the header to the last. */
static fanin_status check_tiling(fanin_safetensors *file, uint64_t data, uint64_t end,
                                 fanin_error *error)
{
    if (file->count > 0)
        qsort(file->entries, file->count, sizeof(file->entries[0]), compare_offsets);
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
    for (size_t i = 0; i < file->count; i++)
        file->by_name[i] = (uint32_t)i;
    if (file->count > 0)
        qsort_r(file->by_name, file->count, sizeof(file->by_name[0]), compare_names,
                file);
    return FANIN_OK;
}

fanin_status safetensors_parse(const char *text, size_t size, uint64_t file_size,
                               fanin_safetensors **out, fanin_error *error)
{
    if (size > SAFETENSORS_HEADER_MAX || file_size < SAFETENSORS_LENGTH ||
        size > file_size - SAFETENSORS_LENGTH)
        return invalid(error, NULL, "the header is longer than the file or 100 MB");
    const char *why = scan_header(text, size);
    if (why)
        return invalid(error, NULL, why);
    fanin_safetensors *file = calloc(1, sizeof(*file));
    if (!file)
        return error_set_memory(error);
    file->fd = -1;

    json_error_t detail;
    file->root = json_loadb(text, size, JSON_REJECT_DUPLICATES, &detail);
    fanin_status status;
    if (!file->root && json_error_code(&detail) == json_error_out_of_memory) {
        status = error_set_memory(error);
    } else if (!json_is_object(file->root)) {
        char sentence[200];
        snprintf(sentence, sizeof(sentence),
                 "its header is no JSON object: %.120s at byte %d", detail.text,
                 detail.position);
        status = invalid(error, NULL, sentence);
    } else {
        status = read_entries(file, SAFETENSORS_LENGTH + size, file_size, error);
        if (!status)
            status = check_tiling(file, SAFETENSORS_LENGTH + size, file_size, error);
    }
    if (status) {
        fanin_safetensors_close(&file);
        return status;
    }
    *out = file;
    return FANIN_OK;
}

/* False: fewer bytes than asked for, errno 0 at the end of the file. */
static bool read_whole(int fd, void *to, size_t size, off_t offset)
{
    for (size_t done = 0; done < size;) {
        ssize_t n = pread(fd, (char *)to + done, size - done, offset + (off_t)done);
        if (n < 0 && errno == EINTR)
            continue;
        if (n <= 0) {
            errno = n == 0 ? 0 : errno;
            return false;
        }
        done += (size_t)n;
    }
    return true;
}

static fanin_status read_failed(fanin_error *error, const char *path)
{
    if (errno == 0)
        return invalid(error, NULL, "the file ends inside its header");
    return error_set_errno(error, FANIN_ERR_IO, errno, NULL, "cannot read '%s'", path);
}

static fanin_status parse_file(int fd, const char *path, fanin_safetensors **out,
                               fanin_error *error)
{
    struct stat info;
    uint8_t length[SAFETENSORS_LENGTH];
    if (fstat(fd, &info) != 0)
        return read_failed(error, path);
    if (!S_ISREG(info.st_mode))
        return error_set(error, FANIN_ERR_IO, NULL, "'%s' is no regular file", path);
    if (!read_whole(fd, length, sizeof(length), 0))
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
        read_whole(fd, text, size, SAFETENSORS_LENGTH)
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
    fanin_status status = parse_file(fd, path, &file, error);
    if (status || !file) {
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
    json_decref(f->root);
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
    size_t size = entry->struct_size;
    if (size > sizeof(*entry))
        size = sizeof(*entry);
    if (size > sizeof(entry->struct_size))
        memcpy((char *)entry + sizeof(entry->struct_size),
               (const char *)&file->entries[index] + sizeof(entry->struct_size),
               size - sizeof(entry->struct_size));
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
