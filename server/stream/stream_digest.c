/* SPDX-License-Identifier: Apache-2.0 */
#include "stream/stream_digest.h"
#include "array.h"
#include "convert.h"

#include <stdlib.h>
#include <string.h>

static bool holds_floats(const job *j)
{
    for (uint32_t i = 0; i < j->n_ranges; i++) {
        const job_range *r = &j->ranges[i];
        if (r->length % 4 != 0 || (r->at - j->catalog->boxes[r->box].start) % 4 != 0)
            return false;
    }
    return true;
}

static bool has_digest_room(digester *d, uint32_t n)
{
    if (!d->sum && !(d->sum = box_digest_create()))
        return false;
    return array_reserve(&d->digests, &d->capacity, n, sizeof *d->digests);
}

const char *digester_start(digester *d, const job *j, uint64_t request, uint32_t dtype,
                           fanin_status *code_out)
{
    int convert =
        dtype == 0 ? CONVERT_NONE : convert_between(FANIN_DTYPE_F32, (int32_t)dtype);
    *code_out = FANIN_ERR_ARGUMENT;
    if (convert < 0)
        return "F32 tensors are not converted to that dtype";
    if (convert != CONVERT_NONE && !holds_floats(j))
        return "a range to be converted holds parts of elements";
    *code_out = FANIN_ERR_MEMORY;
    if (!has_digest_room(d, j->n_ranges))
        return "the server is out of memory";
    d->on = true;
    d->request = request;
    d->convert = (uint32_t)convert;
    d->range = 0;
    d->left = j->ranges[0].whole;
    (void)box_digest_take(d->sum); /* of a job that was given up */
    return NULL;
}

void digester_add(digester *d, const job *j, const uint8_t *data, size_t size)
{
    while (size > 0 && d->range < j->n_ranges) {
        size_t step = size < d->left ? size : (size_t)d->left;
        box_digest_add(d->sum, data, step, d->convert);
        data += step;
        size -= step;
        d->left -= step;
        if (d->left > 0)
            continue;
        d->digests[d->range++] = box_digest_take(d->sum);
        d->left = d->range < j->n_ranges ? j->ranges[d->range].whole : 0;
    }
}

void digester_add_pieces(digester *d, const job *j, const digest_list *made)
{
    for (uint64_t at = 0; at < made->n_pieces;) {
        uint64_t length = convert_bytes(d->convert, d->left);
        box_digest_add_pieces(d->sum, made->digests + at, length);
        d->digests[d->range++] = box_digest_take(d->sum);
        d->left = d->range < j->n_ranges ? j->ranges[d->range].whole : 0;
        at += box_digest_pieces(length);
    }
}

size_t digester_memory(const digester *d)
{
    return d->capacity * sizeof *d->digests + (d->sum ? 8192 : 0);
}

void digester_free(digester *d)
{
    box_digest_free(d->sum);
    free(d->digests);
    memset(d, 0, sizeof *d);
}

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
