/* SPDX-License-Identifier: Apache-2.0 */
#include "pull/patches.h"

#include <stdlib.h>

void pull_writes(pull *p)
{
    if (!p->writes)
        delta_base_enter(p->destination->base);
    p->writes = true;
    p->drops = delta_base_drop(p->destination->base);
}

void pull_base_leave(pull *p)
{
    if (p->writes)
        delta_base_leave(p->destination->base);
    p->writes = false;
}

const digest *pull_base_name(const pull *p)
{
    const digest none = {0};
    digest *name = &p->cache->base;
    if (digest_equal(name, &none))
        *name = base_name(p->publication, p->cache->whole.plan.plan);
    return name;
}

/* NULL: nobody asks, no memory, or a rank did not say which copy its lease is of. */
static base_step *what_is_held(const pull *p)
{
    return pull_wants_patches(p)
               ? base_step_of(p->client, pull_base_name(p), &p->cache->whole.plan,
                              p->announced, p->leases)
               : NULL;
}

void pull_base_keep(pull *p)
{
    base_step *now = what_is_held(p);
    if (now)
        delta_base_set(p->destination->base, now, p->drops);
}

void pull_base_tell(pull *p)
{
    uint64_t seed = p->destination->seed;
    /* What was converted is nothing that patches fit. */
    base_step *now = p->identity.dtype == 0 ? what_is_held(p) : NULL;
    if (now)
        p->identity.base = base_json(now, seed ? seed : p->client->plan_seed);
    free(now);
}
