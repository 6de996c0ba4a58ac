/* SPDX-License-Identifier: Apache-2.0 */
#include "publish/garbage.h"
#include "core/wake.h"
#include "shards/registration.h"
#include "thread.h"

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

static void *collect_all(void *server)
{
    fanin_server *s = server;
    bool more = true;
    while (more) {
        garbage_collect(s);
        pthread_mutex_lock(&s->lock);
        more = s->collects = s->garbage;
        pthread_mutex_unlock(&s->lock);
    }
    return NULL;
}

void garbage_leave(fanin_server *s)
{
    pthread_mutex_lock(&s->lock);
    bool begins = s->garbage && !s->collects;
    s->collects = s->collects || begins;
    pthread_mutex_unlock(&s->lock);
    if (!begins)
        return;
    garbage_join(s);
    s->has_collector =
        thread_start(&s->collector, "fanin-free", collect_all, s, NULL) == FANIN_OK;
    if (!s->has_collector)
        collect_all(s);
}

void garbage_join(fanin_server *s)
{
    if (s->has_collector)
        pthread_join(s->collector, NULL);
    s->has_collector = false;
}
