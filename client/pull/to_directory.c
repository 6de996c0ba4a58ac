/* SPDX-License-Identifier: Apache-2.0 */
/* Pulling into a directory, an adapter's or a model's. */
#include "adapter/tensor_files.h"
#include "device/devices.h"
#include "error_set.h"
#include "net/client_state.h"
#include "pull/pull.h"
#include <stdatomic.h>
#include <string.h>

typedef struct adapter_destination {
    adapter *adapter;
    destination for_pull;
    uint64_t seed; /* of the plan that the older directory was pulled by; 0: none */
    delta_base *base;
    const char *baseless;
    bool prepared;
    digest prepared_for;
    const char *publication;
    uint64_t span, max_bytes;
    uint64_t file_bytes; /* of a model's files; 0: an adapter's one file */
    memory_range range;
} adapter_destination;

/* The rest follows from key table and dtype. */
static digest layout(void *cookie)
{
    const adapter_destination *a = cookie;
    const uint64_t from[] = {a->file_bytes, a->seed};
    return a->file_bytes ? digest_of(from, sizeof from) : (digest){{0}};
}

static fanin_status prepare(void *cookie, const key_table *keys,
                            const plan_target **targets, size_t *n_targets,
                            const uint64_t **to_of_key, fanin_error *error)
{
    adapter_destination *a = cookie;
    fanin_status status =
        adapter_prepare(a->adapter, keys, a->publication, to_of_key, &a->span, error);
    if (status == FANIN_OK)
        status = adapter_check_size(a->adapter, a->max_bytes, error);
    *targets = NULL;
    *n_targets = 0;
    a->prepared = status == FANIN_OK;
    a->prepared_for = keys->id;
    return status;
}

static fanin_status agreed(void *cookie, const key_table *keys,
                           const adapter_identity *identity, uint8_t **base_out,
                           bool *skip_out, fanin_error *error)
{
    adapter_destination *a = cookie;
    fanin_status status = FANIN_OK;
    if (!a->prepared || !digest_equal(&a->prepared_for, &keys->id)) {
        const plan_target *targets;
        const uint64_t *to_of_key;
        size_t n;
        status = prepare(a, keys, &targets, &n, &to_of_key, error);
    }
    if (status == FANIN_OK)
        status = adapter_reusable(a->adapter, identity, skip_out, error);
    if (status != FANIN_OK || *skip_out)
        return status;
    status = adapter_map(a->adapter, base_out, error);
    a->range = (memory_range){*base_out, a->span, -1};
    a->for_pull.pinned = status == FANIN_OK && adapter_is_pinned(a->adapter);
    return status;
}

static fanin_status need(void *cookie, uint64_t to, uint64_t length, fanin_error *error)
{
    return adapter_need(((adapter_destination *)cookie)->adapter, to, length, error);
}

static void landed(void *cookie, uint64_t to, uint64_t length)
{
    adapter_landed(((adapter_destination *)cookie)->adapter, to, length);
}

static void digested(void *cookie, uint64_t to, const digest *known)
{
    adapter_digested(((adapter_destination *)cookie)->adapter, to, known);
}

static void restart(void *cookie)
{
    adapter_restart(((adapter_destination *)cookie)->adapter);
}

static fanin_status publish(void *cookie, const adapter_identity *identity,
                            fanin_error *error)
{
    return adapter_publish(((adapter_destination *)cookie)->adapter, identity, error);
}

static fanin_status ranges(void *cookie, const memory_range **out, size_t *n,
                           fanin_error *error)
{
    (void)error;
    adapter_destination *a = cookie;
    *out = &a->range;
    *n = 1;
    return FANIN_OK;
}

static fanin_status recall_older(void *cookie, const char **because, fanin_error *error)
{
    return adapter_recall(((adapter_destination *)cookie)->adapter, because, error);
}

static void patched(void *cookie)
{
    adapter_recalled(((adapter_destination *)cookie)->adapter);
}

static bool is_cancelled(void *cookie)
{
    return atomic_load(&((fanin_client *)cookie)->cancelled);
}

/* What is known of a kind of publication is known before anything is made. */
static fanin_status check_kind(const char *publication, const char *wrong,
                               const char *other, fanin_error *error)
{
    error_place place = {.key = publication, .remedy = other};
    if (strncmp(publication, wrong, strlen(wrong)) != 0)
        return FANIN_OK;
    return error_set(error, FANIN_ERR_ARGUMENT, &place,
                     "'%s' is not what this kind of directory is made of", publication);
}

/* Options, and the place that is locked; terms->at is the pull's deadline. */
static fanin_status open_place(fanin_client *client, const fanin_pull_options *options,
                               adapter_terms *terms, fanin_pull_options *checked,
                               adapter **out, fanin_error *error)
{
    bool model = terms->is_model;
    fanin_status status = pull_check(client, options, checked, error);
    if (status == FANIN_OK)
        status =
            check_kind(checked->publication, model ? "lora:" : "full:",
                       model ? "an adapter is pulled by fanin_client_pull_adapter()"
                             : "a model is pulled by fanin_client_pull_model()",
                       error);
    if (status != FANIN_OK)
        return status;
    if (!terms->directory || !terms->directory[0])
        return error_set(error, FANIN_ERR_ARGUMENT, NULL, "no directory was given");
    terms->at = deadline_in_ms(checked->timeout_ms);
    terms->dtype = checked->dtype;
    terms->trust_config = checked->trust_config;
    terms->max_file_bytes = checked->max_file_bytes;
    return adapter_open(terms, out, error);
}

/* Into a place that is locked; a->adapter is closed. */
static fanin_status pull_into(fanin_client *client, fanin_pull_options *options,
                              deadline at, adapter_destination *a,
                              fanin_result **result_out, fanin_error *error)
{
    a->for_pull = (destination){.cookie = a,
                                .directory = true,
                                .layout = layout,
                                .prepare = prepare,
                                .agreed = agreed,
                                .need = need,
                                .landed = landed,
                                .digested = a->file_bytes ? NULL : digested,
                                .restart = restart,
                                .publish = publish,
                                .ranges = ranges,
                                .dtype = options->dtype,
                                .base = a->base,
                                .recall = recall_older,
                                .patched = patched,
                                .baseless = a->baseless,
                                .seed = a->seed};
    a->publication = options->publication;
    a->max_bytes = options->max_bytes;
    uint64_t left_ms = deadline_left_ns(at) / 1000000;
    options->timeout_ms = left_ms > 0 ? (uint32_t)left_ms : 1;
    fanin_status status = pull_run(client, options, &a->for_pull, result_out, error);
    if (status == FANIN_OK && options->spare_file)
        adapter_make_spare(a->adapter, &client->spare,
                           client->devices->map ? client->devices->g : NULL);
    if (!a->for_pull.leak)
        adapter_close(&a->adapter);
    return status;
}

/* What patches may be applied to, as fanin.json says. NULL: *because. */
static base_step *find_base(const json_t *root, const fanin_pull_options *options,
                            uint64_t *seed, const char **because)
{
    const char *publication = json_string_value(json_object_get(root, "publication"));
    const json_t *step = json_object_get(root, "step");
    base_step *found = NULL;
    *because = NULL;
    if (strcmp(publication, options->publication) != 0)
        *because = "the older directory is of another publication";
    else if (json_object_get(root, "dtype"))
        *because = "the older directory was converted to another dtype";
    else
        found = base_of_json(json_object_get(root, "delta_base"),
                             (uint64_t)json_integer_value(step), seed);
    if (!found && !*because)
        *because = "the older directory does not say which copies it is of";
    return found;
}

/* What comes of it has to have the ranks' digests. */
static fanin_status begin_with_older(adapter_destination *a,
                                     fanin_pull_options *options, fanin_error *error)
{
    json_t *root = NULL;
    base_step *step = NULL;
    options->deltas = options->verify = true;
    a->base = delta_base_create();
    if (!a->base)
        return error_set_memory(error);
    adapter_begin_with(a->adapter, options->delta_from, &root, &a->baseless);
    if (root)
        step = find_base(root, options, &a->seed, &a->baseless);
    if (step)
        delta_base_set(a->base, step, 0);
    json_decref(root);
    return FANIN_OK;
}

/* @p model: the kind of directory. */
static fanin_status open_and_pull(fanin_client *client,
                                  const fanin_pull_options *options, bool model,
                                  const char *directory, fanin_result **result_out,
                                  fanin_error *error)
{
    fanin_pull_options checked;
    adapter_destination a = {.adapter = NULL};
    adapter_terms terms = {.directory = directory,
                           .cancelled = is_cancelled,
                           .cookie = client,
                           .log = client->log,
                           .is_model = model,
                           .layout = model ? NULL : &client->layout,
                           .contents = &client->contents,
                           .spare = model ? NULL : &client->spare};
    fanin_status status =
        open_place(client, options, &terms, &checked, &a.adapter, error);
    if (status != FANIN_OK)
        return status;
    if (model) {
        checked.spare_file = false;
        a.file_bytes =
            checked.max_file_bytes ? checked.max_file_bytes : MODEL_FILE_BYTES;
        if (checked.delta_from)
            status = begin_with_older(&a, &checked, error);
    }
    if (status == FANIN_OK)
        status = pull_into(client, &checked, terms.at, &a, result_out, error);
    else
        adapter_close(&a.adapter);
    delta_base_release(a.base);
    return status;
}

static fanin_status pull_directory(fanin_client *client,
                                   const fanin_pull_options *options, bool model,
                                   const char *directory, fanin_result **result_out,
                                   fanin_error *error)
{
    fanin_status status =
        open_and_pull(client, options, model, directory, result_out, error);
    /* What is done to the directory looks at the word only, which is of this call. */
    if (status == FANIN_ERR_CANCELLED)
        atomic_store(&client->cancelled, false);
    return status;
}

fanin_status fanin_client_pull_adapter(fanin_client *client,
                                       const fanin_pull_options *options,
                                       const char *directory, fanin_result **result_out,
                                       fanin_error *error)
{
    return pull_directory(client, options, false, directory, result_out, error);
}

fanin_status fanin_client_pull_model(fanin_client *client,
                                     const fanin_pull_options *options,
                                     const char *directory, fanin_result **result_out,
                                     fanin_error *error)
{
    return pull_directory(client, options, true, directory, result_out, error);
}
