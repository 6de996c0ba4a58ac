/* SPDX-License-Identifier: Apache-2.0 */
#include "shards/registration.h"
#include "error_set.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static bool has_session(const registrar *r, const void *session)
{
    for (const mapper *m = r->mappers; m; m = m->next)
        if (m->session == session)
            return true;
    return false;
}

static void mapper_free(mapper *m)
{
    region_set_release(&m->mapped);
    free(m);
}

/* Takes out the records of a session: those of one publication and those of which nothing is
   left; NULL: all. */
static void take_out(registrar *r, const void *session, const char *publication)
{
    for (mapper **link = &r->mappers; *link;) {
        mapper *m = *link;
        bool out = m->session == session &&
                   (!publication || strcmp(m->publication, publication) == 0 ||
                    (m->lost == 0 && region_set_is_gone(&m->mapped)));
        if (!out) {
            link = &m->next;
            continue;
        }
        *link = m->next;
        mapper_free(m);
    }
}

fanin_status mapper_note(registrar *r, const key_reader *who, const region_set *set,
                         fanin_error *error)
{
    uint32_t count = 0;
    for (uint32_t i = 0; i < set->count; i++)
        count += set->regions[i]->has_key;
    mapper *m = calloc(1, sizeof *m);
    region **regions = calloc((size_t)count + 1, sizeof(region *));
    if (!m || !regions) {
        free(m);
        free(regions);
        return error_set_memory(error);
    }
    m->session = who->session;
    snprintf(m->peer, sizeof m->peer, "%s", who->peer);
    snprintf(m->publication, sizeof m->publication, "%s", who->publication);
    m->mapped.regions = regions;
    for (uint32_t i = 0; i < set->count; i++) {
        if (!set->regions[i]->has_key)
            continue;
        set->regions[i]->users++;
        regions[m->mapped.count++] = set->regions[i];
    }
    bool known = has_session(r, who->session);
    take_out(r, who->session, who->publication);
    if (count == 0) {
        mapper_free(m);
        m = NULL;
    } else {
        m->next = r->mappers;
        r->mappers = m;
    }
    bool knows = m || has_session(r, who->session);
    if (knows && !known)
        atomic_fetch_add(&r->n_mappers, 1);
    else if (known && !knows)
        atomic_fetch_sub(&r->n_mappers, 1);
    return FANIN_OK;
}

void mappers_lose(registrar *r, const region *one)
{
    for (mapper *m = one->has_key ? r->mappers : NULL; m; m = m->next)
        for (uint32_t i = 0; i < m->mapped.count; i++)
            if (m->mapped.regions[i] == one)
                m->lost += one->in.length;
}

void mappers_lose_all(registrar *r)
{
    pthread_mutex_lock(&r->lock);
    for (mapper *m = r->mappers; m; m = m->next)
        for (uint32_t i = 0; i < m->mapped.count; i++)
            if (!m->mapped.regions[i]->gone)
                m->lost += m->mapped.regions[i]->in.length;
    pthread_mutex_unlock(&r->lock);
}

void mappers_drop(registrar *r, const void *session)
{
    pthread_mutex_lock(&r->lock);
    if (has_session(r, session)) {
        take_out(r, session, NULL);
        atomic_fetch_sub(&r->n_mappers, 1);
    }
    pthread_mutex_unlock(&r->lock);
}

/* One session's loss; false: there is none any more. */
static bool next_loss(registrar *r, char *peer, size_t size, uint64_t *bytes)
{
    mapper *first = NULL;
    *bytes = 0;
    pthread_mutex_lock(&r->lock);
    for (mapper *m = r->mappers; m; m = m->next) {
        if (m->lost == 0 || (first && m->session != first->session))
            continue;
        first = first ? first : m;
        *bytes += m->lost;
        m->lost = 0;
    }
    if (first)
        snprintf(peer, size, "%s", first->peer);
    pthread_mutex_unlock(&r->lock);
    return first != NULL;
}

void mappers_tell(registrar *r, const logger *log, const char *publication,
                  const char *what)
{
    char peer[64];
    uint64_t bytes;
    while (next_loss(r, peer, sizeof peer, &bytes))
        log_write(
            log, FANIN_LOG_WARNING, "still-mapped",
            "%s: %s may still map %llu bytes of CUDA memory that are %s; it closes the "
            "mapping at its next pull, or when it ends: free the memory after that",
            publication, peer, (unsigned long long)bytes, what);
}
