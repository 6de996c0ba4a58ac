/* SPDX-License-Identifier: Apache-2.0 */
#include "fetch/tensor_directory.h"
#include "fetch/failure.h"
#include "fetch/output.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

enum { PATH_SIZE = 4096 };

json_t *tensor_directory_json(const char *directory, const char *name,
                              fanin_error *error)
{
    char path[PATH_SIZE];
    json_error_t why;
    int reason;
    snprintf(path, sizeof path, "%s/%s", directory, name);
    json_t *root = json_file_read(path, JSON_FILE_ANY, &why, &reason);
    if (root == NULL)
        failure_set(error,
                    reason == ENOENT ? FANIN_ERR_NOT_FOUND
                    : reason > 0     ? FANIN_ERR_IO
                                     : FANIN_ERR_MISMATCH,
                    "give a directory that 'nixl-fetch pull' made", "%s: %s", path,
                    why.text);
    return root;
}

static fanin_status tensors_refuse(fanin_error *error, const char *directory,
                                   const char *name, const char *problem)
{
    return failure_set(error, FANIN_ERR_MISMATCH,
                       "give the directory of a whole model or adapter", "%s/%s: %s",
                       directory, name, problem);
}

/* Its number; SIZE_MAX after an error. */
static size_t tensors_add_file(tensor_directory *d, const char *directory,
                               const char *name, fanin_error *error)
{
    char path[PATH_SIZE];
    for (size_t i = 0; i < d->n_files; i++)
        if (strcmp(d->names[i], name) == 0)
            return i;
    snprintf(path, sizeof path, "%s/%s", directory, name);
    d->names = output_require(realloc(d->names, (d->n_files + 1) * sizeof d->names[0]));
    d->files = output_require(realloc(d->files, (d->n_files + 1) * sizeof d->files[0]));
    if (fanin_safetensors_open(path, &d->files[d->n_files], error) != FANIN_OK)
        return SIZE_MAX;
    d->names[d->n_files] = output_require(strdup(name));
    return d->n_files++;
}

static void add_tensor(tensor_directory *d, size_t file, size_t index)
{
    tensor_place *place = &d->tensors[d->count++];
    *place =
        (tensor_place){.file = file, .entry = {.struct_size = sizeof place->entry}};
    (void)fanin_safetensors_get(d->files[file], index, &place->entry);
}

/* All tensors of the one file. */
static fanin_status tensors_open_one(tensor_directory *d, const char *directory,
                                     const char *name, fanin_error *error)
{
    if (tensors_add_file(d, directory, name, error) == SIZE_MAX)
        return error->status;
    size_t count = fanin_safetensors_count(d->files[0]);
    d->tensors = output_require(calloc(count + 1, sizeof d->tensors[0]));
    for (size_t i = 0; i < count; i++)
        add_tensor(d, 0, i);
    return FANIN_OK;
}

/* A tensor that the index names. */
static fanin_status add_named(tensor_directory *d, const char *directory,
                              const char *name, const json_t *value, fanin_error *error)
{
    const char *file_name = json_string_value(value);
    char text[FANIN_MAX_NAME + 128];
    if (file_name == NULL || strchr(file_name, '/') != NULL || file_name[0] == '.')
        return tensors_refuse(error, directory, TENSORS_INDEX,
                              "weight_map has what is no name of a file");
    size_t file = tensors_add_file(d, directory, file_name, error);
    if (file == SIZE_MAX) { /* the directory is there, but not whole */
        error->status =
            error->status == FANIN_ERR_NOT_FOUND ? FANIN_ERR_MISMATCH : error->status;
        return error->status;
    }
    int64_t index = fanin_safetensors_find(d->files[file], name);
    if (index < 0) {
        snprintf(text, sizeof text, "has no tensor '%.512s', as the index says", name);
        return tensors_refuse(error, directory, file_name, text);
    }
    add_tensor(d, file, (size_t)index);
    return FANIN_OK;
}

static fanin_status open_index(tensor_directory *d, const char *directory,
                               fanin_error *error)
{
    const char *name;
    json_t *value;
    fanin_status status = FANIN_OK;
    json_t *root = tensor_directory_json(directory, TENSORS_INDEX, error);
    if (root == NULL)
        return error->status;
    json_t *map = json_object_get(root, "weight_map");
    d->tensors =
        output_require(calloc(json_object_size(map) + 1, sizeof d->tensors[0]));
    if (!json_is_object(map))
        status =
            tensors_refuse(error, directory, TENSORS_INDEX, "it has no weight_map");
    json_object_foreach(map, name, value)
    {
        if (status == FANIN_OK)
            status = add_named(d, directory, name, value, error);
    }
    json_decref(root);
    return status;
}

static int tensors_by_name(const void *a, const void *b)
{
    const tensor_place *x = a;
    const tensor_place *y = b;
    return strcmp(x->entry.name, y->entry.name);
}

static void sort(tensor_directory *d)
{
    if (d->count > 0)
        qsort(d->tensors, d->count, sizeof d->tensors[0], tensors_by_name);
}

/* Engines take every tensor of a file, whatever the index names. */
static fanin_status check_file(const tensor_directory *d, const char *directory,
                               size_t file, fanin_error *error)
{
    char text[FANIN_MAX_NAME + 128];
    size_t count = fanin_safetensors_count(d->files[file]);
    for (size_t i = 0; i < count; i++) {
        fanin_safetensors_entry e = {.struct_size = sizeof e};
        (void)fanin_safetensors_get(d->files[file], i, &e);
        const tensor_place *place = tensor_directory_find(d, e.name);
        if (place == NULL || place->file != file) {
            snprintf(text, sizeof text,
                     "has a tensor '%.512s', which the index %s%.64s", e.name,
                     place == NULL ? "does not name" : "says is in ",
                     place == NULL ? "" : d->names[place->file]);
            return tensors_refuse(error, directory, d->names[file], text);
        }
    }
    return FANIN_OK;
}

static bool tensors_is_beside(const char *name)
{
    static const char ending[] = ".safetensors";
    size_t length = strlen(name), least = sizeof ending - 1;
    return strcmp(name, TENSORS_INDEX) == 0 ||
           (strcmp(name, TENSORS_OF_MODEL) != 0 && length > least &&
            strcmp(name + length - least, ending) == 0);
}

/* Beside the one file engines also load others, or an index's files in its stead. */
static fanin_status check_alone(const char *directory, fanin_error *error)
{
    fanin_status status = FANIN_OK;
    DIR *stream = opendir(directory);
    for (const struct dirent *e;
         status == FANIN_OK && stream != NULL && (e = readdir(stream)) != NULL;) {
        if (tensors_is_beside(e->d_name))
            status = tensors_refuse(error, directory, e->d_name,
                                    "lies beside " TENSORS_OF_MODEL
                                    ": engines may load either, or both");
    }
    if (stream != NULL)
        closedir(stream);
    return status;
}

/* A model's: in one file, else in those that an index names. */
static fanin_status tensors_open_model(tensor_directory *d, const char *directory,
                                       fanin_error *error)
{
    fanin_status status = tensors_open_one(d, directory, TENSORS_OF_MODEL, error);
    if (status != FANIN_ERR_NOT_FOUND)
        return status == FANIN_OK ? check_alone(directory, error) : status;
    status = open_index(d, directory, error);
    sort(d);
    for (size_t i = 0; status == FANIN_OK && i < d->n_files; i++)
        status = check_file(d, directory, i, error);
    return status;
}

fanin_status tensor_directory_open(const char *directory, bool model,
                                   tensor_directory *out, fanin_error *error)
{
    *out = (tensor_directory){.names = NULL};
    fanin_status status =
        model ? tensors_open_model(out, directory, error)
              : tensors_open_one(out, directory, TENSORS_OF_ADAPTER, error);
    if (status != FANIN_OK)
        tensor_directory_close(out);
    sort(out);
    return status;
}

void tensor_directory_close(tensor_directory *d)
{
    for (size_t i = 0; i < d->n_files; i++) {
        fanin_safetensors_close(&d->files[i]);
        free(d->names[i]);
    }
    free(d->files);
    free(d->names);
    free(d->tensors);
    *d = (tensor_directory){.names = NULL};
}

const tensor_place *tensor_directory_find(const tensor_directory *d, const char *name)
{
    const tensor_place key = {.entry.name = name};
    return d->count > 0 ? bsearch(&key, d->tensors, d->count, sizeof d->tensors[0],
                                  tensors_by_name)
                        : NULL;
}

void whole_tensor_describe(const whole_tensor *t, uint8_t *memory, fanin_box *box,
                           fanin_tensor *out)
{
    *box = (fanin_box){.address = memory};
    memcpy(box->extent, t->shape, sizeof t->shape);
    *out = (fanin_tensor){.struct_size = sizeof *out,
                          .name = t->name,
                          .dtype = t->dtype,
                          .n_dims = t->n_dims,
                          .boxes = box,
                          .n_boxes = t->bytes > 0,
                          .memory = {FANIN_MEMORY_HOST, -1}};
    memcpy(out->shape, t->shape, sizeof t->shape);
}

fanin_status whole_tensors_pull(fanin_client *client, const fanin_pull_options *options,
                                const whole_tensor *list, size_t count, uint8_t *memory,
                                fanin_result **result_out, fanin_error *error)
{
    fanin_tensor *tensors = output_require(calloc(count + 1, sizeof tensors[0]));
    fanin_box *boxes = output_require(calloc(count + 1, sizeof boxes[0]));
    for (size_t i = 0; i < count; i++) {
        whole_tensor_describe(&list[i], memory, &boxes[i], &tensors[i]);
        memory += list[i].bytes;
    }
    fanin_status status =
        fanin_client_pull(client, options, tensors, count, result_out, error);
    free(tensors);
    free(boxes);
    return status;
}

whole_tensor *whole_tensors_add(whole_tensors *w, const char *name, fanin_dtype dtype,
                                uint32_t n_dims, const uint64_t *shape, uint64_t bytes)
{
    w->list = output_room(w->list, w->count, &w->capacity, sizeof w->list[0]);
    whole_tensor *t = &w->list[w->count++];
    *t = (whole_tensor){.name = output_require(strdup(name)),
                        .dtype = dtype,
                        .n_dims = n_dims,
                        .descriptor = -1,
                        .bytes = bytes,
                        .offset = w->bytes};
    memcpy(t->shape, shape, sizeof t->shape);
    w->bytes += bytes;
    return t;
}

void whole_tensors_free(whole_tensors *w)
{
    for (size_t i = 0; i < w->count; i++)
        free(w->list[i].name);
    free(w->list);
    *w = (whole_tensors){.list = NULL};
}

uint8_t *whole_tensors_memory(uint64_t bytes, size_t *mapped_out, fanin_error *error)
{
    *mapped_out = bytes > 0 ? (size_t)bytes : 1;
    uint8_t *memory = mmap(NULL, *mapped_out, PROT_READ | PROT_WRITE,
                           MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) {
        failure_set(error, FANIN_ERR_MEMORY, "free memory",
                    "no memory for %s of tensors", output_bytes(bytes).s);
        return NULL;
    }
    return memory;
}

/* --------------------------------------------------------------------- files */

static bool whole_file_write_all(int file, const char *bytes, size_t size)
{
    while (size > 0) {
        ssize_t n = write(file, bytes, size);
        if (n <= 0 && errno != EINTR)
            return false;
        bytes += n > 0 ? n : 0;
        size -= n > 0 ? (size_t)n : 0;
    }
    return fsync(file) == 0;
}

/* The file hidden gets the name path, if nothing has it. 0 or errno: EEXIST; hidden may be there
   still. */
static int give_name(const char *hidden, const char *path)
{
    bool named = renameat2(AT_FDCWD, hidden, AT_FDCWD, path, RENAME_NOREPLACE) == 0;
    /* Some file systems know but the other way, NFS among them. */
    named = named || ((errno == EINVAL || errno == ENOSYS) && link(hidden, path) == 0);
    return named ? 0 : errno;
}

/* 0, or an errno. @p hidden is a template of mkostemp(), whose files are the owner's alone. */
static int whole_file_make(const char *path, char *hidden, const void *bytes,
                           size_t size)
{
    int file = mkostemp(hidden, O_CLOEXEC);
    if (file < 0)
        return errno;
    errno = 0;
    bool good = whole_file_write_all(file, bytes, size);
    int reason = good ? 0 : errno != 0 ? errno : ENOSPC;
    close(file);
    if (good)
        reason = give_name(hidden, path);
    unlink(hidden);
    return reason;
}

fanin_status whole_file_write(const char *path, const void *bytes, size_t size,
                              fanin_error *error)
{
    char hidden[PATH_MAX];
    sigset_t all, before;
    const char *slash = strrchr(path, '/');
    int folder = slash != NULL ? (int)(slash - path) + 1 : 0;
    int length =
        snprintf(hidden, sizeof hidden, "%.*s.nixl-fetch-XXXXXX", folder, path);
    int reason = length < 0 || length >= (int)sizeof hidden ? ENAMETOOLONG : 0;
    sigfillset(&all);
    sigprocmask(SIG_BLOCK, &all, &before); /* nothing stays half made */
    reason = reason != 0 ? reason : whole_file_make(path, hidden, bytes, size);
    sigprocmask(SIG_SETMASK, &before, NULL);
    return reason == 0
               ? FANIN_OK
               : failure_set(error, reason == EEXIST ? FANIN_ERR_EXISTS : FANIN_ERR_IO,
                             reason == EEXIST ? "remove it, or give another name"
                                              : "give a file in a directory that can "
                                                "be written",
                             "%s: %s", path, strerror(reason));
}
