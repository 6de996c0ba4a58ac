/* SPDX-License-Identifier: Apache-2.0 */
#include "pull/patches.h"

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

void pull_base_keep(pull *p)
{
    base_step *now = NULL;
    if (pull_wants_patches(p))
        now = base_step_of(p->client, p->publication, &p->cache->whole.plan,
                           p->announced, p->leases);
    if (now)
        delta_base_set(p->destination->base, now, p->drops);
}
