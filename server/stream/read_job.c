/* SPDX-License-Identifier: Apache-2.0 */
#include "stream/read_job.h"

#include "array.h"
#include "convert.h"
#include "publish/patches.h"
#include <stdlib.h>
#include <string.h>

/* One entry as a range, the catalog's boxes being numbered from @p first on; NULL or why it is
   refused. */
static const char *range_of(const shard_catalog *catalog, uint64_t first,
                            const read_entry *e, job_range *out)
{
    uint64_t box = e->box - first;
    if (e->box < first || box >= catalog->n_boxes)
        return first > 0 ? "a read of a patch names other boxes as well"
                         : "the read names a box that this rank does not have";
    uint64_t start = catalog->boxes[box].start;
    out->box = box;
    if (e->count > 0) {
        if (e->count > catalog->n_boxes - box)
            return "the read names a box that this rank does not have";
        out->at = start;
        out->length = catalog->boxes[box + e->count].start - start;
        return NULL;
    }
    uint64_t bytes = shard_catalog_box_bytes(catalog, box);
    if (e->length == 0)
        return "an entry of the read is empty";
    if (e->offset > bytes || e->length > bytes - e->offset)
        return "the read reaches beyond a box";
    out->at = start + e->offset;
    out->length = e->length;
    return NULL;
}

/* Serves from the patch that box @p box belongs to, if it is none of the table's; *first: the
   number of its first box. */
static fanin_status choose_patch(fanin_server *s, job *j, uint64_t box, uint64_t *first,
                                 const char **why)
{
    shard_catalog *table = j->catalog;
    uint64_t k = (box - table->n_boxes) / PATCH_BOXES;
    *first = 0;
    j->is_patch = table->plan && box >= table->n_boxes && k < PATCHES_MOST;
    if (!j->is_patch)
        return FANIN_OK;
    pthread_mutex_lock(&s->lock);
    shard_catalog *patch = patches_find(j->of, j->epoch, k);
    j->is_patch = patch || j->of->had_deltas;
    if (patch) {
        j->catalog = shard_catalog_retain(patch);
        j->first_region = 0;
        *first = table->n_boxes + k * PATCH_BOXES;
        catalog_discard(s, table);
    }
    pthread_mutex_unlock(&s->lock);
    *why = "this rank does not keep the patch any more";
    return patch || !j->is_patch ? FANIN_OK : FANIN_ERR_STALE;
}

fanin_status job_set_ranges(fanin_server *s, job *j, const msg_read *m, uint64_t most,
                            const char **why)
{
    uint64_t first;
    fanin_status status = choose_patch(s, j, m->entries[0].box, &first, why);
    if (status != FANIN_OK)
        return status;
    if (!array_reserve(&j->ranges, &j->capacity, m->n_entries, sizeof *j->ranges)) {
        *why = "the server is out of memory";
        return FANIN_ERR_MEMORY;
    }
    uint64_t sum = 0;
    for (uint32_t i = 0; i < m->n_entries; i++) {
        *why = range_of(j->catalog, first, &m->entries[i], &j->ranges[i]);
        if (*why)
            return FANIN_ERR_ARGUMENT;
        /* Also keeps the sum from overflowing. */
        if (j->ranges[i].length > most - sum) {
            *why = "the read asks for more than is answered at once";
            return FANIN_ERR_ARGUMENT;
        }
        j->ranges[i].whole = j->ranges[i].length;
        sum += j->ranges[i].length;
    }
    if (sum != m->bytes || sum == 0) {
        *why = "the read's entries do not sum up to its bytes";
        return FANIN_ERR_ARGUMENT;
    }
    j->n_ranges = m->n_entries;
    j->current = 0;
    j->left = sum;
    j->is_void = j->is_staged = j->header_due = false;
    return FANIN_OK;
}

size_t job_memory(const job *j)
{
    return j->capacity * sizeof *j->ranges;
}

void job_end(fanin_server *s, job *j)
{
    catalog_retire(s, j->catalog);
    j->catalog = NULL;
    j->of = NULL;
    j->left = j->ungathered = 0;
    j->is_staged = j->header_due = false;
}

void job_free(fanin_server *s, job *j)
{
    job_end(s, j);
    free(j->ranges);
    memset(j, 0, sizeof *j);
}

/* ---------------------------------------------------------------- gather */

bool gather_add(gather *g, const void *data, size_t size)
{
    if (size > g->most - g->bytes)
        size = g->most - g->bytes;
    if (size == 0)
        return g->bytes < g->most;
    struct iovec *last = g->n > 0 ? &g->iov[g->n - 1] : NULL;
    if (last && (const char *)last->iov_base + last->iov_len == data) {
        last->iov_len += size;
    } else {
        if (g->n == IOVEC_MOST)
            return false;
        g->iov[g->n].iov_base = (void *)(uintptr_t)data;
        g->iov[g->n].iov_len = size;
        g->n++;
    }
    g->bytes += size;
    return g->bytes < g->most;
}

/* Copies the runs that were put off, one behind the other. */
static bool gather_runs(gather *g)
{
    size_t wanted = g->run_bytes;
    if (wanted == 0)
        return g->bytes < g->most && !g->failed;
    size_t got = guarded_read(&g->bounce, g->bounced, g->runs, g->n_runs);
    const uint8_t *to = g->bounce.data + g->bounced;
    g->n_runs = 0;
    g->run_bytes = 0;
    g->failed = got < wanted;
    g->bounced += got;
    return gather_add(g, to, got) && !g->failed;
}

/* Puts a run off until some can be copied together; one that follows the last in memory extends it.
   */
static bool gather_copy(gather *g, const uint8_t *data, size_t size)
{
    size_t room = g->most - g->bytes - g->run_bytes;
    size = size < room ? size : room;
    struct iovec *last = g->n_runs > 0 ? &g->runs[g->n_runs - 1] : NULL;
    if (last && (const uint8_t *)last->iov_base + last->iov_len == data)
        last->iov_len += size;
    else
        g->runs[g->n_runs++] = (struct iovec){(void *)(uintptr_t)data, size};
    g->run_bytes += size;
    return g->n_runs < GUARDED_RUNS && size < room ? true : gather_runs(g);
}

stretch stretch_of(const job *j, const source_box *b, uint64_t offset, uint64_t room)
{
    if (b->view == VIEW_PACKED)
        return (stretch){.at = (int64_t)offset, .size = room, .runs = 1};
    const strided *view = &j->catalog->views[b->view];
    uint64_t run = view->run, index = offset / run, skip = offset % run;
    uint64_t in_row = view->n_dims > 0 ? view->extent[view->n_dims - 1] : 1;
    stretch s = {.size = smaller(run - skip, room),
                 .runs = 1,
                 .step = view->n_dims > 0 ? view->from[view->n_dims - 1] : 0};
    strided_run(view, index, &s.at, NULL);
    s.at += (int64_t)skip;
    if (s.size == run)
        s.runs = smaller(in_row - index % in_row, room / run);
    return s;
}

static bool gather_piece(void *cookie, const job *j, const source_box *b,
                         uint64_t offset, uint64_t length)
{
    gather *g = cookie;
    const uint8_t *first = shard_catalog_box_first(j->catalog, b, j->first_region);
    bool is_copied = g->copies || (b->view != VIEW_PACKED &&
                                   j->catalog->views[b->view].run < GATHER_RUN);
    if (!is_copied && !gather_runs(g))
        return false;
    while (length > 0) {
        stretch s = stretch_of(j, b, offset, length);
        for (uint64_t i = 0; i < s.runs; i++, s.at += s.step)
            if (!(is_copied ? gather_copy(g, first + s.at, (size_t)s.size)
                            : gather_add(g, first + s.at, (size_t)s.size)))
                return false;
        offset += s.size * s.runs;
        length -= s.size * s.runs;
    }
    return true;
}

void job_gather(const job *j, gather *g)
{
    job_each(j, gather_piece, g);
    (void)gather_runs(g);
}

void job_gather_zeros(const job *j, gather *g)
{
    static const uint8_t zeros[65536];
    for (uint64_t left = j->left; left > 0;) {
        size_t size = left < sizeof zeros ? (size_t)left : sizeof zeros;
        if (!gather_add(g, zeros, size))
            return;
        left -= size;
    }
}

void job_skip(job *j, uint64_t bytes)
{
    while (bytes > 0) {
        job_range *r = &j->ranges[j->current];
        uint64_t step = bytes < r->length ? bytes : r->length;
        r->at += step;
        r->length -= step;
        bytes -= step;
        if (r->length == 0)
            j->current++;
    }
    if (j->current == j->n_ranges)
        return;
    job_range *r = &j->ranges[j->current];
    while (r->at >= j->catalog->boxes[r->box + 1].start)
        r->box++;
}

void job_rewind(job *j, uint64_t bytes)
{
    if (bytes > 0 && j->current == j->n_ranges)
        j->current--;
    while (bytes > 0) {
        job_range *r = &j->ranges[j->current];
        uint64_t gone = r->whole - r->length, step = bytes < gone ? bytes : gone;
        r->at -= step;
        r->length += step;
        bytes -= step;
        while (r->at < j->catalog->boxes[r->box].start)
            r->box--;
        if (bytes > 0)
            j->current--;
    }
}

void job_advance(job *j, uint64_t bytes)
{
    j->left -= bytes;
    if (j->left > 0 && !j->is_void && !j->is_staged)
        job_skip(j, bytes);
}

void gather_sum(const gather *g, size_t skip, uint64_t bytes, checksum *sum)
{
    for (int i = 0; i < g->n && bytes > 0; i++) {
        size_t size = g->iov[i].iov_len;
        size_t from = skip < size ? skip : size;
        size_t more = bytes < size - from ? (size_t)bytes : size - from;
        checksum_add(sum, (const char *)g->iov[i].iov_base + from, more);
        skip -= from;
        bytes -= more;
    }
}

static bool is_host(void *cookie, const job *j, const source_box *b, uint64_t offset,
                    uint64_t length)
{
    bool *found = cookie;
    (void)offset, (void)length;
    *found = shard_catalog_box_device(j->catalog, b, j->first_region) >= 0;
    return !*found;
}

bool job_needs_stage(const job *j)
{
    bool found = false;
    if (j->catalog->has_device)
        job_each(j, is_host, &found);
    return found;
}

/* --------------------------------------------------------------- brackets */

bool bracket_enter(fanin_server *s, publication *of, uint64_t epoch)
{
    pthread_mutex_lock(&s->lock);
    bool stands = publication_read_enter(s, of, epoch);
    s->stats.pulls_stale += !stands;
    pthread_mutex_unlock(&s->lock);
    return stands;
}

/* ----------------------------------------------------------------------- digests */

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
