/* SPDX-License-Identifier: Apache-2.0 */
#include "stream/kept_digests.h"

#include <stdlib.h>
#include <string.h>

#define PLACES ((size_t)1 << 16) /**< 3 MiB: pieces of 4 MiB of 256 GiB */
#define PROBES 8                 /**< places of one range */

typedef struct kept_key {
    uint64_t epoch, at, length, convert;
} kept_key;

typedef struct kept_digest {
    kept_key of; /**< its epoch 0: free */
    digest digest;
} kept_digest;

struct kept_digests {
    pthread_mutex_t lock;
    kept_digest *places; /**< NULL: none is kept yet */
    size_t memory;       /**< counted */
};

kept_digests *kept_digests_create(void)
{
    kept_digests *k = calloc(1, sizeof *k);
    if (k)
        pthread_mutex_init(&k->lock, NULL);
    return k;
}

void kept_digests_free(kept_digests *k)
{
    if (!k)
        return;
    pthread_mutex_destroy(&k->lock);
    free(k->places);
    free(k);
}

/* Of a range as it was asked for, however much of it was read since. */
static kept_key key_of(const job *j, uint32_t i, uint32_t convert)
{
    const job_range *r = &j->ranges[i];
    return (kept_key){j->epoch, r->at - (r->whole - r->length), r->whole, convert};
}

/* Its place, or else the one of the oldest epoch among those that it may have. */
static kept_digest *place_of(const kept_digests *k, const kept_key *key)
{
    uint64_t hash = checksum_of(key, sizeof *key);
    kept_digest *oldest = &k->places[hash % PLACES];
    for (size_t i = 0; i < PROBES; i++) {
        kept_digest *d = &k->places[(hash + i) % PLACES];
        if (memcmp(&d->of, key, sizeof *key) == 0)
            return d;
        if (d->of.epoch < oldest->of.epoch)
            oldest = d;
    }
    return oldest;
}

bool kept_digests_find(kept_digests *k, const job *j, uint32_t convert, digest *out)
{
    pthread_mutex_lock(&k->lock);
    bool all = k->places;
    for (uint32_t i = 0; all && i < j->n_ranges; i++) {
        kept_key key = key_of(j, i, convert);
        const kept_digest *d = place_of(k, &key);
        all = memcmp(&d->of, &key, sizeof key) == 0;
        out[i] = d->digest;
    }
    pthread_mutex_unlock(&k->lock);
    return all;
}

/* Without memory for it digests are made anew, as often as they are asked for. */
static bool has_places(fanin_server *s, kept_digests *k)
{
    if (k->places)
        return true;
    if (memory_account(s, NULL, &k->memory, PLACES * sizeof *k->places))
        k->places = calloc(PLACES, sizeof *k->places);
    if (!k->places)
        memory_account(s, NULL, &k->memory, 0);
    return k->places;
}

void kept_digests_add(fanin_server *s, kept_digests *k, const job *j, uint32_t convert,
                      const digest *digests)
{
    pthread_mutex_lock(&k->lock);
    for (uint32_t i = 0; i < j->n_ranges && has_places(s, k); i++) {
        kept_key key = key_of(j, i, convert);
        *place_of(k, &key) = (kept_digest){key, digests[i]};
    }
    pthread_mutex_unlock(&k->lock);
}
