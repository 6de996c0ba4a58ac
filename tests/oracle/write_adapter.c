/* SPDX-License-Identifier: Apache-2.0 */
/*
 * write_adapter DESCRIPTION DATA DIRECTORY: writes an adapter directory as a pull does.
 * DESCRIPTION is JSON: {"publication", "step", "metadata": {...}, "tensors": [{"name",
 * "dtype", "shape"}, ...]}; DATA holds the tensors' bytes in that order. They land in pieces of
 * odd sizes, in a shuffled order. Prints nothing; a failure as "STATUS: message".
 */
#include "adapter/adapter.h"
#include "dtype.h"

#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct source {
    key_entry key;
    uint64_t offset; /* in DATA */
} source;

typedef struct job {
    json_t *description;
    source *sources;
    size_t count;
    uint8_t *data;
    key_table *keys;
} job;

static void die(const char *what)
{
    fprintf(stderr, "write_adapter: %s\n", what);
    exit(2);
}

static int compare_sources(const void *a, const void *b)
{
    return strcmp(((const source *)a)->key.name, ((const source *)b)->key.name);
}

static void read_tensor(const json_t *tensor, uint64_t *offset, source *out)
{
    const json_t *shape = json_object_get(tensor, "shape");
    key_entry *key = &out->key;
    key->name = json_string_value(json_object_get(tensor, "name"));
    key->dtype =
        fanin_dtype_from_name(json_string_value(json_object_get(tensor, "dtype")));
    key->n_dims = (uint32_t)json_array_size(shape);
    if (!key->name || key->n_dims > FANIN_MAX_DIMS)
        die("a tensor has no name or too many dimensions");
    for (uint32_t d = 0; d < key->n_dims; d++)
        key->shape[d] = (uint64_t)json_integer_value(json_array_get(shape, d));
    if (!dtype_bytes(key->dtype, key->n_dims, key->shape, &key->bytes))
        die("a tensor's dtype and shape do not fit");
    out->offset = *offset;
    *offset += key->bytes;
}

static void read_data(job *j, const char *path, uint64_t size)
{
    FILE *file = fopen(path, "rbe");
    j->data = malloc(size + 1);
    if (!file || !j->data || fread(j->data, 1, size + 1, file) != size)
        die("the data file is missing or of another size");
    fclose(file);
}

static int compare_pairs(const void *a, const void *b)
{
    return strcmp(((const fanin_pair *)a)->key, ((const fanin_pair *)b)->key);
}

/* Through the canonical encoding, as a catalog comes. */
static void make_table(job *j)
{
    json_t *metadata = json_object_get(j->description, "metadata"), *value;
    fanin_pair *pairs = calloc(json_object_size(metadata) + 1, sizeof pairs[0]);
    key_entry *entries = calloc(j->count + 1, sizeof entries[0]);
    if (!pairs || !entries)
        die("out of memory");
    uint32_t n_pairs = 0;
    const char *key;
    json_object_foreach(metadata, key, value) pairs[n_pairs++] =
        (fanin_pair){key, json_string_value(value)};
    qsort(pairs, n_pairs, sizeof pairs[0], compare_pairs);
    for (size_t i = 0; i < j->count; i++)
        entries[i] = j->sources[i].key;
    buffer blob = {0};
    fanin_error error = FANIN_ERROR_INIT;
    key_table_encode(&blob, entries, (uint32_t)j->count, pairs, n_pairs);
    if (blob.failed || key_table_decode(blob.data, blob.size, NULL, &j->keys, &error))
        die(error.message);
    buffer_free(&blob);
    free(pairs);
    free(entries);
}

static void read_job(job *j, const char *description, const char *data)
{
    j->description = json_load_file(description, JSON_REJECT_DUPLICATES, NULL);
    const json_t *tensors = json_object_get(j->description, "tensors");
    if (!json_is_array(tensors))
        die("the description is not readable");
    j->count = json_array_size(tensors);
    j->sources = calloc(j->count + 1, sizeof j->sources[0]);
    if (!j->sources)
        die("out of memory");
    uint64_t size = 0;
    for (size_t i = 0; i < j->count; i++)
        read_tensor(json_array_get(tensors, i), &size, &j->sources[i]);
    read_data(j, data, size);
    qsort(j->sources, j->count, sizeof j->sources[0], compare_sources);
    make_table(j);
}

/* Every stride-th tensor from each start on, so that neighbours land at different times. */
static void land(const job *j, adapter *a, uint8_t *base, const uint64_t *to)
{
    const size_t stride = 7;
    for (size_t first = 0; first < stride; first++) {
        for (size_t i = first; i < j->count; i += stride) {
            const source *s = &j->sources[i];
            uint64_t length;
            for (uint64_t at = 0; at < s->key.bytes; at += length) {
                uint64_t left = s->key.bytes - at;
                length = left < 1021 ? left : 1021;
                memcpy(base + to[i] + at, j->data + s->offset + at, length);
                adapter_landed(a, to[i] + at, length);
            }
        }
    }
}

static fanin_status write_it(const job *j, const char *directory, fanin_error *error)
{
    const char *publication =
        json_string_value(json_object_get(j->description, "publication"));
    adapter_identity identity = {
        .world_id = {0xfa, 0x1},
        .publication = publication,
        .step = (uint64_t)json_integer_value(json_object_get(j->description, "step")),
        .key_table = j->keys->id};
    adapter *a = NULL;
    const uint64_t *to;
    uint64_t size;
    uint8_t *base;
    fanin_status status = adapter_open(
        &(adapter_terms){.directory = directory, .at = deadline_in_ms(60000)}, &a,
        error);
    if (!status)
        status = adapter_prepare(a, j->keys, publication, &to, &size, error);
    if (!status)
        status = adapter_map(a, &base, error);
    if (!status) {
        land(j, a, base, to);
        status = adapter_publish(a, &identity, error);
    }
    adapter_close(&a);
    return status;
}

int main(int argc, char **argv)
{
    if (argc != 4)
        die("usage: write_adapter DESCRIPTION DATA DIRECTORY");
    job j = {0};
    fanin_error error = FANIN_ERROR_INIT;
    read_job(&j, argv[1], argv[2]);
    fanin_status status = write_it(&j, argv[3], &error);
    if (status)
        fprintf(stderr, "%s: %s\n", fanin_status_name(status), error.message);
    key_table_free(&j.keys);
    json_decref(j.description);
    free(j.sources);
    free(j.data);
    return status ? 1 : 0;
}
