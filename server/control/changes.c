/* SPDX-License-Identifier: Apache-2.0 */
#include "control/changes.h"

#include <string.h>

void view_take(const publication *p, publication_view *out)
{
    memset(out, 0, sizeof *out);
    if (!p)
        return;
    memcpy(out->name, p->name, sizeof out->name);
    out->is_away = p->present && publication_is_away(p);
    out->is_stable = p->present && p->state == STATE_STABLE;
    out->step = p->step;
    out->stable_ns = publication_stable_ns(p);
    out->changes = p->changes;
    memcpy(out->reason, p->reason, sizeof out->reason);
    memcpy(out->history, p->history, sizeof out->history);
    if (!p->catalog)
        return;
    out->catalog_version = p->catalog->version;
    memcpy(out->key_digest, p->catalog->key_digest.bytes, sizeof out->key_digest);
}

bool changes_take(fanin_server *s, changes *out)
{
    bool more = false;
    out->n = 0;
    pthread_mutex_lock(&s->lock);
    s->is_woken = false;
    for (size_t i = 0; i < s->n_publications && !more; i++) {
        publication *p = s->publications[i];
        if (p->told == p->changes)
            continue;
        more = out->n == CHANGES_MOST;
        if (more)
            break;
        view_take(p, &out->views[out->n++]);
        p->told = p->changes;
    }
    pthread_mutex_unlock(&s->lock);
    return more;
}

const publication_view *changes_find(const changes *c, const char *name)
{
    for (unsigned i = 0; i < c->n; i++)
        if (strcmp(c->views[i].name, name) == 0)
            return &c->views[i];
    return NULL;
}
