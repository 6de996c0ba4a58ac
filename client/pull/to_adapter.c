/* SPDX-License-Identifier: Apache-2.0 */
/* Pulling into an adapter directory. */
#include "device/devices.h"
#include "error_set.h"
#include "net/client_state.h"
#include "pull/pull.h"
#include <stdatomic.h>
#include <string.h>

typedef struct adapter_destination {
    adapter *adapter;
    destination *destination;
    bool prepared;
    digest prepared_for;
    const char *publication;
    uint64_t file_size, max_bytes;
    memory_range range;
} adapter_destination;

static digest layout(void *cookie)
{
    (void)cookie;
    return (digest){{0}}; /* the file's layout follows from key table and dtype */
}

static fanin_status prepare(void *cookie, const key_table *keys,
                            const plan_target **targets, size_t *n_targets,
                            const uint64_t **to_of_key, fanin_error *error)
{
    adapter_destination *a = cookie;
    fanin_status status = adapter_prepare(a->adapter, keys, a->publication, to_of_key,
                                          &a->file_size, error);
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
    a->range = (memory_range){*base_out, a->file_size, -1};
    a->destination->pinned = status == FANIN_OK && adapter_is_pinned(a->adapter);
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

static bool is_cancelled(void *cookie)
{
    return atomic_load(&((fanin_client *)cookie)->cancelled);
}

fanin_status fanin_client_pull_adapter(fanin_client *client,
                                       const fanin_pull_options *options,
                                       const char *directory, fanin_result **result_out,
                                       fanin_error *error)
{
    fanin_pull_options checked;
    fanin_status status = pull_check(client, options, &checked, error);
    if (status != FANIN_OK)
        return status;
    if (!directory || !directory[0])
        return error_set(error, FANIN_ERR_ARGUMENT, NULL, "no directory was given");
    adapter_destination a = {.publication = checked.publication,
                             .max_bytes = checked.max_bytes};
    deadline at = deadline_in_ms(checked.timeout_ms);
    status = adapter_open(directory, at, is_cancelled, client, &client->log, &a.adapter,
                          error);
    if (status == FANIN_ERR_CANCELLED)
        atomic_store(&client->cancelled, false);
    if (status != FANIN_OK)
        return status;
    destination d = {.cookie = &a,
                     .plan_slot = 1,
                     .layout = layout,
                     .prepare = prepare,
                     .agreed = agreed,
                     .need = need,
                     .landed = landed,
                     .restart = restart,
                     .publish = publish,
                     .ranges = ranges,
                     .dtype = checked.dtype};
    a.destination = &d;
    adapter_convert(a.adapter, checked.dtype);
    if (checked.trust_config)
        adapter_trust_config(a.adapter);
    adapter_offer_spare(a.adapter, &client->spare);
    uint64_t left_ms = deadline_left_ns(at) / 1000000;
    checked.timeout_ms = left_ms > 0 ? (uint32_t)left_ms : 1;
    status = pull_run(client, &checked, &d, result_out, error);
    if (status == FANIN_OK && checked.spare_file)
        adapter_make_spare(a.adapter, &client->spare,
                           client->devices->map ? client->devices->g : NULL);
    if (!d.leak)
        adapter_close(&a.adapter);
    return status;
}
