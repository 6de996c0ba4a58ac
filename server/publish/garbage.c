/* SPDX-License-Identifier: Apache-2.0 */
#include "publish/garbage.h"
#include "core/wake.h"
#include "shards/registration.h"

/* Lock held. */
static void add(fanin_server *s, shard_catalog *catalog)
{
    catalog->next_garbage = s->garbage;
    s->garbage = catalog;
    wake_up(s->wake);
}

void catalog_discard(fanin_server *s, shard_catalog *catalog)
{
    if (catalog && shard_catalog_drop(catalog))
        add(s, catalog);
}

void catalog_retire(fanin_server *s, shard_catalog *catalog)
{
    if (!catalog || !shard_catalog_drop(catalog))
        return;
    pthread_mutex_lock(&s->lock);
    add(s, catalog);
    pthread_mutex_unlock(&s->lock);
}

void garbage_collect(fanin_server *s)
{
    bool arenas = false;
    pthread_mutex_lock(&s->collecting);
    pthread_mutex_lock(&s->lock);
    shard_catalog *garbage = s->garbage;
    s->garbage = NULL;
    pthread_mutex_unlock(&s->lock);
    while (garbage) {
        shard_catalog *next = garbage->next_garbage;
        arenas = arenas || garbage->plan;
        shard_catalog_free(garbage);
        garbage = next;
    }
    pthread_mutex_unlock(&s->collecting);
    /* Arenas that go may be mapped by others, as the trainer's memory may. */
    if (arenas)
        mappers_tell(&s->registrar, s->name, "freed");
}
