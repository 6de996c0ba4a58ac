/* SPDX-License-Identifier: Apache-2.0 */
/* Whether a delta can be read instead of the whole. */
#include "delta/delta_internal.h"

#include "device/devices.h"
#include "error_set.h"
#include "net/client_rules.h"
#include <stdlib.h>
#include <string.h>

const char delta_too_large[] =
    "the patches have more than half of the bytes of the whole";

static bool is_needed(const path_plan *plan, size_t source)
{
    return plan->plan->ranks[source].n_pieces > 0;
}

/* NULL: they tell of patches, if only of none, and have one path, over data connections, which is
   *reader. */
static const char *find_reader(const delta_scene *s, const path_reader **reader)
{
    for (size_t i = 0; i < s->plan->n_sources; i++) {
        const path_reader *path = path_taken(s->publication, s->plan->peer_of[i])->path;
        if (!is_needed(s->plan, i))
            continue;
        if (!path->is_linked || (*reader && *reader != path))
            return "a rank is read by a path that reads no patches";
        if (s->announced[s->plan->peer_of[i]].patches.generation == 0)
            return "a rank keeps no patches";
        *reader = path;
    }
    return NULL;
}

/* How many of the rank's patches lead there from @p generation; -1: none do. */
static int chain_from(const patch_offers *offers, uint64_t generation)
{
    if (offers->generation == generation)
        return 0;
    for (uint32_t i = 0; i < offers->count; i++) {
        if (offers->patches[i].from == generation)
            return (int)i + 1;
    }
    /* Without the rule: whatever there is. */
    return CLIENT_RULE(CLIENT_RULE_BASE) || offers->count == 0 ? -1 : 1;
}

static const char another_plan[] =
    "the destination holds what another plan has brought";

/* NULL: the source has a chain from what the base holds of it. */
static const char *find_chain(const delta_scene *s, const base_rank *held,
                              size_t source, delta_source *out)
{
    size_t peer = s->plan->peer_of[source];
    const announcement *a = &s->announced[peer];
    const msg_hello_ok *rank = &s->client->peers[peer].control->peer;
    int chain = chain_from(&a->patches, held->generation);
    if (held->generation == 0) /* a replica of it was read */
        return another_plan;
    if (CLIENT_RULE(CLIENT_RULE_BASE)) {
        if (memcmp(held->incarnation, rank->incarnation, sizeof held->incarnation) != 0)
            return "a rank was started again";
        if (held->version != a->version)
            return "the tables of a rank have changed";
    }
    if (chain < 0)
        return "a rank has no patches from the step that the destination holds";
    out->offers = &a->patches;
    out->chain = (uint32_t)chain;
    out->segments = a->patches.directory_bytes / 4;
    return NULL;
}

static const char *find_chains(delta *d, const delta_scene *s, const base_step *base)
{
    const digest none = {0};
    const char *because = base->n == s->plan->n_sources ? NULL : another_plan;
    for (size_t i = 0; i < s->plan->n_sources && !because; i++) {
        if (is_needed(s->plan, i))
            because = find_chain(s, &base->ranks[i], i, &d->sources[i]);
    }
    if (because ||
        (digest_equal(&base->of, &s->name) && !digest_equal(&s->name, &none)))
        return because;
    return another_plan;
}

fanin_status delta_blame(const delta *d, size_t source, fanin_error *error,
                         const char *lie)
{
    const connection *c = d->client->peers[d->whole->peer_of[source]].control;
    error_place place = connection_place(c, "read");
    place.remedy = "use the same fanin release on both ends, or pull without deltas";
    return error_set(error, FANIN_ERR_PROTOCOL, &place,
                     "rank %u at %s tells of a patch %s", c->peer.rank, c->text, lie);
}

/* The directories, each behind the one before. */
static fanin_status plan_directories(delta *d, const char **because, fanin_error *error)
{
    for (size_t i = 0; i < d->whole->n_sources; i++) {
        const delta_source *s = &d->sources[i];
        uint64_t length = s->chain > 0 ? s->offers->directory_bytes : 0;
        if (length > d->most) {
            *because = delta_too_large;
            return FANIN_OK;
        }
        if (s->chain > 0 &&
            (length == 0 || length % 4 != 0 || s->offers->first_box > LIMIT_BOXES ||
             s->offers->first_box + PATCH_BOXES * s->chain > LIMIT_BOXES))
            return delta_blame(d, i, error, "whose boxes or sizes cannot be");
        for (uint32_t k = 0; k < s->chain; k++) {
            fanin_status status = delta_read_range(
                d, i, s->offers->first_box + PATCH_BOXES * k, 0, length, error);
            if (status != FANIN_OK)
                return status;
        }
    }
    return delta_end_plan(d, because, error);
}

/* NULL: those of the destination's devices can apply patches. */
static const char *find_devices(delta *d)
{
    for (size_t i = 0; i < d->n_ranges; i++)
        device_set_add(&d->devices, d->ranges[i].device);
    if (d->devices.n > 0 && !devices_memory(d->client))
        return "there is no memory to apply patches on a device";
    for (size_t i = 0; i < d->devices.n; i++) {
        if (gpu_prepare(d->client->devices->g, d->devices.device[i], GPU_PATCH_APPLY,
                        NULL) != FANIN_OK)
            return "a device of the destination cannot apply patches";
    }
    return NULL;
}

static fanin_status look_for_patches(delta *d, const delta_scene *s,
                                     const base_step *base, const char **because,
                                     fanin_error *error)
{
    d->sources = calloc(s->plan->n_sources + 1, sizeof *d->sources);
    if (!d->sources)
        return error_set_memory(error);
    *because = find_chains(d, s, base);
    if (!*because)
        *because = find_devices(d);
    return *because ? FANIN_OK : plan_directories(d, because, error);
}

fanin_status delta_choose(const delta_scene *s, const base_step *base, delta **out,
                          const char **because, fanin_error *error)
{
    const path_reader *reader = NULL;
    *out = NULL;
    *because = find_reader(s, &reader);
    if (!*because && !base)
        *because = "it is not known which step the destination holds";
    if (*because)
        return FANIN_OK;
    delta *d = calloc(1, sizeof *d);
    if (!d)
        return error_set_memory(error);
    *d = (delta){.client = s->client,
                 .whole = s->plan,
                 .ranges = s->ranges,
                 .n_ranges = s->n_ranges,
                 .base_step = base->step,
                 .most = s->plan->plan->bytes / 2,
                 .reader = reader};
    fanin_status status = look_for_patches(d, s, base, because, error);
    if (status == FANIN_OK && !*because)
        *out = d;
    else
        delta_free(&d);
    return status;
}
