/* SPDX-License-Identifier: Apache-2.0 */
#include "adapter/adapter.h"

#include "adapter/adapter_internal.h"
#include "array.h"
#include "convert.h"
#include "error_set.h"
#include <errno.h>
#include <fcntl.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* ------------------------------------------------- config.json of a model */

static const char *find_pair(const key_table *keys)
{
    for (uint32_t i = 0; i < keys->n_pairs; i++) {
        if (strcmp(keys->pairs[i].key, MODEL_CONFIG_PAIR) == 0)
            return keys->pairs[i].value;
    }
    return NULL;
}

/* What makes a reader that trusts the directory run the code of somebody else. */
static bool names_code(const char *field)
{
    return strcmp(field, "auto_map") == 0 || strcmp(field, "custom_pipelines") == 0;
}

/* Depth is bounded by the parser's. */
static void remove_code(json_t *value, buffer *dropped)
{
    const char *field;
    json_t *member;
    void *next;
    for (size_t i = 0; i < json_array_size(value); i++)
        remove_code(json_array_get(value, i), dropped);
    json_object_foreach_safe(value, next, field, member)
    {
        if (!names_code(field)) {
            remove_code(member, dropped);
            continue;
        }
        if (dropped->size > 0)
            buffer_append(dropped, ", ", 2);
        buffer_append(dropped, field, strlen(field));
        json_object_del(value, field);
    }
}

/* The text again, if nothing was dropped, else what is left. */
static fanin_status write_config_text(const char *text, const json_t *root,
                                      buffer *dropped, peft_config *out,
                                      fanin_error *error)
{
    if (dropped->size > 0) {
        buffer_append(dropped, "", 1);
        out->text = json_dumps(root, JSON_INDENT(2) | JSON_ENSURE_ASCII);
        out->dropped = dropped->failed ? NULL : strdup((const char *)dropped->data);
    } else {
        out->text = strdup(text);
    }
    if (dropped->failed || !out->text || (dropped->size > 0 && !out->dropped)) {
        peft_config_free(out);
        return error_set_memory(error);
    }
    out->size = strlen(out->text);
    return FANIN_OK;
}

fanin_status model_config_make(const key_table *keys, bool trusted, peft_config *out,
                               fanin_error *error)
{
    const char *text = find_pair(keys);
    error_place place = {.phase = "plan",
                         .remedy = "let the trainer publish the model's config.json "
                                   "under '" MODEL_CONFIG_PAIR "', or nothing"};
    *out = (peft_config){.text = NULL};
    if (!text)
        return FANIN_OK;
    json_error_t why;
    json_t *root = json_loads(text, JSON_REJECT_DUPLICATES, &why);
    buffer dropped = {.data = NULL};
    fanin_status status;
    if (!json_is_object(root)) {
        status = error_set(error, FANIN_ERR_MISMATCH, &place,
                           "the model's configuration in the metadata is no JSON "
                           "object: %.100s",
                           root ? "it is something else" : why.text);
    } else {
        if (!trusted)
            remove_code(root, &dropped);
        status = write_config_text(text, root, &dropped, out, error);
    }
    buffer_free(&dropped);
    json_decref(root);
    return status;
}

/* -------------------------------------------------- layouts that are kept */

static void clear_layout(adapter_layout *l)
{
    tensor_files_free(&l->files);
    peft_config_free(&l->config);
    l->there = false;
}

bool adapter_layout_fits(const adapter_layout *l, const adapter_layout_key *key,
                         const char *publication)
{
    return l && l->there && digest_equal(&l->key.keys, &key->keys) &&
           l->key.dtype == key->dtype && l->key.trust_config == key->trust_config &&
           strcmp(l->publication, publication) == 0;
}

void adapter_layout_free(adapter_layout **l)
{
    if (!*l)
        return;
    clear_layout(*l);
    free(*l);
    *l = NULL;
}

/* --------------------------------------------------------------- adapters */

/* Splits "parent/name///" and opens the parent. */
static fanin_status find_place(const char *directory, adapter_place *out,
                               fanin_error *error)
{
    error_place where = {.phase = "write",
                         .remedy = "give the path of the directory that shall appear"};
    size_t size = directory ? strlen(directory) : 0;
    while (size > 1 && directory[size - 1] == '/')
        size--;
    const char *slash = size > 0 ? memrchr(directory, '/', size) : NULL;
    const char *name = slash ? slash + 1 : directory;
    size_t name_size = size > 0 ? (size_t)(directory + size - name) : 0;
    if (name_size == 0 || (name_size == 1 && name[0] == '.') ||
        (name_size == 2 && memcmp(name, "..", 2) == 0))
        return error_set(error, FANIN_ERR_ARGUMENT, &where,
                         "'%.300s' does not name a directory that could be made",
                         directory ? directory : "");
    if (name_size > ADAPTER_NAME_MAX)
        return error_set(error, FANIN_ERR_ARGUMENT, &where,
                         "the name of directory '%.100s...' is longer than %d bytes",
                         directory, ADAPTER_NAME_MAX);
    memcpy(out->name, name, name_size);
    out->name[name_size] = '\0';
    out->directory = strndup(directory, size);
    size_t parent_size = !slash               ? 0
                         : slash == directory ? 1
                                              : (size_t)(slash - directory);
    char *parent = parent_size > 0 ? strndup(directory, parent_size) : strdup(".");
    if (!out->directory || !parent) {
        free(parent);
        return error_set_memory(error);
    }
    out->parent = open(parent, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    int reason = errno;
    free(parent);
    if (out->parent >= 0)
        return FANIN_OK;
    return adapter_io_error(out, reason, "cannot open the parent directory of", NULL,
                            reason == ENOENT ? "make the parent directory first" : NULL,
                            error);
}

fanin_status adapter_open(const adapter_terms *terms, adapter **out, fanin_error *error)
{
    adapter *a = calloc(1, sizeof *a);
    if (!a)
        return error_set_memory(error);
    a->place.parent = a->lock = a->directory = a->old = a->replaced = -1;
    a->terms = *terms;
    if (terms->layout && !*terms->layout)
        *terms->layout = calloc(1, sizeof **terms->layout);
    if (terms->contents && !*terms->contents)
        *terms->contents = calloc(1, sizeof **terms->contents);
    a->kept = terms->layout ? *terms->layout : NULL;
    fanin_status status = find_place(terms->directory, &a->place, error);
    if (status == FANIN_OK)
        status = adapter_check_parent(&a->place, error);
    if (status == FANIN_OK)
        status = adapter_take_lock(a, &a->lock, error);
    if (status != FANIN_OK) {
        adapter_close(&a);
        return status;
    }
    adapter_remove_leftovers(a);
    *out = a;
    return FANIN_OK;
}

const char *adapter_kind(const adapter *a)
{
    return a->terms.is_model ? "model" : "adapter";
}

size_t adapter_texts(const adapter *a, adapter_text out[ADAPTER_TEXTS])
{
    size_t n = 0;
    if (a->config.text)
        out[n++] =
            (adapter_text){a->terms.is_model ? MODEL_CONFIG_FILE : ADAPTER_CONFIG_FILE,
                           a->config.text, a->config.size};
    if (a->files.index)
        out[n++] =
            (adapter_text){MODEL_INDEX_FILE, a->files.index, a->files.index_size};
    return n;
}

static void forget_layout(adapter *a)
{
    tensor_files_free(&a->files);
    peft_config_free(&a->config);
    a->publication = NULL;
    a->headed = false;
}

/* For the client's next adapter, in place of what was there. */
static void keep_layout(adapter *a)
{
    adapter_layout *l = a->kept;
    if (!l || !a->publication)
        return;
    clear_layout(l);
    *l = (adapter_layout){
        .there = true, .key = a->key, .files = a->files, .config = a->config};
    snprintf(l->publication, sizeof l->publication, "%s", a->publication);
    a->files = (tensor_files){.files = NULL};
    a->config = (peft_config){.text = NULL};
}

static void take_layout(adapter *a)
{
    a->files = a->kept->files;
    a->config = a->kept->config;
    *a->kept = (adapter_layout){.there = false};
}

/* The tensors as they are written; entries are the caller's to free. */
static bool convert_keys(const key_table *keys, fanin_dtype dtype, key_table *out)
{
    *out = *keys;
    out->entries = malloc(((size_t)keys->count + 1) * sizeof *out->entries);
    if (!out->entries)
        return false;
    for (uint32_t i = 0; i < keys->count; i++) {
        key_entry *e = &out->entries[i];
        *e = keys->entries[i];
        int conversion = dtype != 0 ? convert_between(e->dtype, dtype) : -1;
        if (e->dtype != FANIN_DTYPE_F32 || e->keep || conversion <= CONVERT_NONE)
            continue;
        e->dtype = dtype;
        e->bytes = convert_bytes((uint32_t)conversion, e->bytes);
    }
    return true;
}

static bool is_wait_over(void *cookie)
{
    return adapter_may_go_on(cookie, "", NULL) != FANIN_OK;
}

static fanin_status make_adapter_config(adapter *a, const key_table *keys,
                                        const peft_names *names,
                                        const char *publication, fanin_error *error)
{
    work_stop stop = {.fn = is_wait_over, .cookie = a};
    fanin_status status = peft_config_make(
        keys, names, publication, a->terms.trust_config, &stop, &a->config, error);
    fanin_status over = FANIN_OK;
    if (stop.stopped)
        over = adapter_may_go_on(a, "making the configuration of", error);
    return over != FANIN_OK ? over : status;
}

/* @p keys as they are written. */
static fanin_status lay_out_adapter(const key_table *keys, const peft_names *names,
                                    tensor_files *out, fanin_error *error)
{
    size_t room = names->count ? names->count : 1;
    const char **texts = calloc(room, sizeof texts[0]);
    uint32_t *order = calloc(room, sizeof order[0]);
    fanin_status status = texts && order ? FANIN_OK : error_set_memory(error);
    for (uint32_t i = 0; i < names->count && status == FANIN_OK; i++) {
        order[i] = names->tensors[i].key;
        texts[order[i]] = names->tensors[i].name.text;
    }
    if (status == FANIN_OK)
        status = tensor_files_one(keys, ADAPTER_FILE, texts, order, out, error);
    free(texts);
    free(order);
    return status;
}

/* @p written: @p keys as they are written. */
static fanin_status prepare_adapter(adapter *a, const key_table *keys,
                                    const key_table *written, const char *publication,
                                    fanin_error *error)
{
    peft_names names = {0};
    fanin_status status = peft_names_make(keys, publication, &names, error);
    if (status == FANIN_OK)
        status = make_adapter_config(a, keys, &names, publication, error);
    if (status == FANIN_OK)
        status = lay_out_adapter(written, &names, &a->files, error);
    peft_names_free(&names);
    return status;
}

static fanin_status prepare_model(adapter *a, const key_table *written,
                                  fanin_error *error)
{
    fanin_status status =
        model_config_make(written, a->terms.trust_config, &a->config, error);
    return status != FANIN_OK ? status
                              : tensor_files_of_model(written, a->terms.max_file_bytes,
                                                      (uint64_t)sysconf(_SC_PAGESIZE),
                                                      &a->files, error);
}

fanin_status adapter_prepare(adapter *a, const key_table *keys, const char *publication,
                             const uint64_t **to_of_key_out, uint64_t *span_out,
                             fanin_error *error)
{
    key_table written = {.entries = NULL};
    forget_layout(a);
    a->key = (adapter_layout_key){keys->id, a->terms.dtype, a->terms.trust_config};
    fanin_status status = FANIN_OK;
    if (adapter_layout_fits(a->kept, &a->key, publication))
        take_layout(a);
    else if (!convert_keys(keys, a->terms.dtype, &written))
        status = error_set_memory(error);
    else if (a->terms.is_model)
        status = prepare_model(a, &written, error);
    else
        status = prepare_adapter(a, keys, &written, publication, error);
    free(written.entries);
    if (status != FANIN_OK) {
        forget_layout(a);
        return status;
    }
    a->publication = publication;
    *to_of_key_out = a->files.to_of_key;
    *span_out = a->files.span;
    return FANIN_OK;
}

void adapter_close(adapter **a)
{
    if (!a || !*a)
        return;
    adapter *d = *a;
    *a = NULL;
    adapter_discard(d);
    keep_layout(d);
    forget_layout(d);
    if (d->lock >= 0)
        adapter_unlock(&d->place, d->lock);
    if (d->old >= 0)
        close(d->old);
    if (d->replaced >= 0)
        close(d->replaced);
    if (d->place.parent >= 0)
        close(d->place.parent);
    free(d->place.directory);
    free(d);
}
