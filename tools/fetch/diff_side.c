/* SPDX-License-Identifier: Apache-2.0 */
#include "fetch/diff_side.h"
#include "fetch/check.h"
#include "fetch/failure.h"
#include "fetch/memory_left.h"
#include "fetch/output.h"
#include "fetch/progress.h"

#include <errno.h>
#include <fnmatch.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

static bool diff_side_holds(const char *directory, const char *name)
{
    char path[4096];
    int length = snprintf(path, sizeof path, "%s/%s", directory, name);
    return length < (int)sizeof path && access(path, F_OK) == 0;
}

static bool holds_model(const char *directory)
{
    return diff_side_holds(directory, TENSORS_OF_MODEL) ||
           diff_side_holds(directory, TENSORS_INDEX);
}

bool diff_side_is_directory(const char *path)
{
    struct stat st;
    return stat(path, &st) == 0 && S_ISDIR(st.st_mode) &&
           (holds_model(path) || diff_side_holds(path, TENSORS_OF_ADAPTER) ||
            !diff_side_holds(path, "nixl_info.json"));
}

static bool diff_side_is_wanted(const diff_request *request, const char *name)
{
    return request->pattern == NULL || fnmatch(request->pattern, name, 0) == 0;
}

/* The next place of the list, with a name of its own. */
static whole_tensor *diff_side_add(diff_side *side, const char *name)
{
    side->tensors =
        output_room(side->tensors, side->count, &side->capacity, sizeof(whole_tensor));
    whole_tensor *t = &side->tensors[side->count++];
    *t = (whole_tensor){.name = output_require(strdup(name)), .descriptor = -1};
    return t;
}

fanin_status diff_side_open(diff_side *side, const char *path,
                            const diff_request *request, fanin_error *error)
{
    fanin_status status =
        tensor_directory_open(path, holds_model(path), &side->files, error);
    if (status == FANIN_ERR_NOT_FOUND) {
        return failure_set(error, status,
                           "give the directory of an adapter or a model, or a TARGET",
                           "%s holds neither " TENSORS_OF_ADAPTER
                           " nor " TENSORS_OF_MODEL " nor nixl_info.json",
                           path);
    }
    if (status != FANIN_OK) {
        fanin_error cause = *error; /* which of both it is */
        return failure_set(error, status, cause.remedy, "%s: %s", path, cause.message);
    }
    for (size_t i = 0; i < side->files.count; i++) {
        const tensor_place *place = &side->files.tensors[i];
        const fanin_safetensors_entry *e = &place->entry;
        if (diff_side_is_wanted(request, e->name)) {
            whole_tensor *t = diff_side_add(side, e->name);
            t->dtype = e->dtype;
            t->n_dims = e->n_dims;
            memcpy(t->shape, e->shape, sizeof t->shape);
            t->descriptor =
                fanin_safetensors_descriptor(side->files.files[place->file]);
            t->bytes = e->bytes;
            t->offset = e->offset;
            side->bytes += e->bytes;
        }
    }
    return status;
}

/* ------------------------------------------------------------------ what is pulled */

typedef struct taking {
    diff_side *side;
    const diff_request *request;
    bool model;
} taking;

/* The name that a file has for a tensor of the ranks. */
static const char *file_name(const char *name, bool model,
                             char room[FANIN_MAX_NAME + 64])
{
    return !model && fanin_adapter_name(name, room, FANIN_MAX_NAME + 64) ? room : name;
}

static bool diff_side_on_entry(void *cookie, const fanin_entry *e)
{
    const taking *taking = cookie;
    char room[FANIN_MAX_NAME + 64];
    if (diff_side_is_wanted(taking->request, file_name(e->name, taking->model, room))) {
        whole_tensor *t = diff_side_add(taking->side, e->name);
        t->dtype = e->dtype;
        t->n_dims = e->n_dims;
        memcpy(t->shape, e->shape, sizeof t->shape);
        t->bytes = e->bytes;
        t->offset = taking->side->bytes;
        taking->side->bytes += e->bytes;
    }
    return true;
}

static fanin_status diff_side_make_room(diff_side *side, const diff_request *request,
                                        fanin_error *error)
{
    uint64_t most = request->max_bytes > 0 ? request->max_bytes
                                           : memory_left_find("/proc", "/sys").bytes;
    if (side->bytes > most) {
        return failure_set(
            error, FANIN_ERR_LIMIT,
            request->max_bytes > 0
                ? "raise --max-bytes, or use --pattern"
                : "use --pattern, or pull into a directory and give that",
            "%s are %s of tensors, more than %s", side->publication,
            output_bytes(side->bytes).s, output_bytes(most).s);
    }
    side->memory = whole_tensors_memory(side->bytes, &side->mapped, error);
    return side->memory != NULL ? FANIN_OK : error->status;
}

static void diff_side_on_progress(void *cookie, const fanin_pull_progress *p)
{
    progress_update(cookie, p->bytes_done, p->bytes_total, p->slowest);
}

static fanin_status pull(diff_side *side, session *s, const diff_request *request,
                         fanin_error *error)
{
    progress bar;
    fanin_pull_options options;
    fanin_result *result = NULL;
    fanin_result_info info = {.struct_size = sizeof info};
    fanin_pull_options_init(&options, sizeof options);
    options.publication = s->publication;
    options.rule = request->rule;
    options.step = request->step;
    options.timeout_ms = session_left_ms(s);
    options.rank_progress = diff_side_on_progress;
    options.progress_cookie = &bar;
    progress_start(&bar, s->publication, request->quiet, request->no_color);
    waiting *waiting = request->quiet ? NULL : waiting_start(s, options.step);
    fanin_status status = whole_tensors_pull(s->client, &options, side->tensors,
                                             side->count, side->memory, &result, error);
    waiting_end(&waiting);
    progress_end(&bar);
    fanin_result_get(result, &info);
    side->step = info.step;
    fanin_result_free(&result);
    return status;
}

static int diff_side_by_name(const void *a, const void *b)
{
    const whole_tensor *x = a, *y = b;
    return strcmp(x->name, y->name);
}

/* As files have the names. */
static void rename_all(diff_side *side, bool model)
{
    char room[FANIN_MAX_NAME + 64];
    for (size_t i = 0; i < side->count; i++) {
        char *name =
            output_require(strdup(file_name(side->tensors[i].name, model, room)));
        free(side->tensors[i].name);
        side->tensors[i].name = name;
    }
    if (side->count > 0) {
        qsort(side->tensors, side->count, sizeof side->tensors[0], diff_side_by_name);
    }
}

fanin_status diff_side_pull(diff_side *side, session *s, const diff_request *request,
                            fanin_error *error)
{
    bool model = options_is_model(s->publication);
    taking taking = {.side = side, .request = request, .model = model};
    snprintf(side->publication, sizeof side->publication, "%s", s->publication);
    fanin_status status =
        fanin_client_catalog(s->client, s->publication, NULL, session_left_ms(s),
                             diff_side_on_entry, &taking, error);
    if (status == FANIN_OK && side->count == 0) {
        return FANIN_OK; /* nothing is like the pattern: the caller says so */
    }
    status = status != FANIN_OK ? status : diff_side_make_room(side, request, error);
    status = status != FANIN_OK ? status : pull(side, s, request, error);
    if (status == FANIN_OK) {
        rename_all(side, model);
    }
    return status;
}

/* -------------------------------------------------------------------------- bytes */

const uint8_t *diff_side_bytes(const diff_side *side, const whole_tensor *t,
                               uint64_t at, size_t size, uint8_t *room,
                               fanin_error *error)
{
    if (side->memory != NULL) {
        return side->memory + t->offset + at;
    }
    errno = 0;
    if (!check_read(t->descriptor, t->offset + at, room, size)) {
        failure_set(error, FANIN_ERR_IO, "check the disk",
                    "%s: the file of %s cannot be read: %s", side->what, t->name,
                    errno != 0 ? strerror(errno) : "it became shorter");
        return NULL;
    }
    return room;
}

void diff_side_close(diff_side *side)
{
    if (side->memory != NULL) {
        munmap(side->memory, side->mapped);
    }
    whole_tensors_free(side->tensors, side->count);
    tensor_directory_close(&side->files);
    *side = (diff_side){.what = NULL};
}
