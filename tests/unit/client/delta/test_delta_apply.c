/* SPDX-License-Identifier: Apache-2.0 */
/* Patches of random copies, read by the plan that is made for them and applied to random
   destinations, against what a pull of the whole would have landed there. */
#include "delta/delta.h"
#include "plan_world.h"
#include "stream/stream_link.h"
#include "testing.h"

#define ROUNDS 2000
#define CHAIN_MOST 4
#define FIRST_BOX 1000

/* One rank's copies, oldest first, and the patches between them, newest first. */
typedef struct history {
    uint64_t size;
    uint8_t *copies[CHAIN_MOST + 1];
    buffer directories[CHAIN_MOST], changes[CHAIN_MOST];
    patch_offers offers;
} history;

typedef struct scene {
    world w;
    landing l;
    path_plan whole;
    uint32_t chain;
    history ranks[WORLD_RANKS];
    delta *d;
} scene;

/* -------------------------------------------------------------------- copies */

static uint16_t word_of(const uint8_t *copy, uint64_t size, uint64_t at)
{
    uint16_t high = at + 1 < size ? copy[at + 1] : 0;
    return (uint16_t)(copy[at] | high << 8);
}

static void add_u16(buffer *b, uint64_t value)
{
    uint8_t bytes[2] = {(uint8_t)value, (uint8_t)(value >> 8)};
    buffer_append(b, bytes, sizeof bytes);
}

/* As PROTOCOL.md has it, word by word. */
static void make_patch(const uint8_t *was, const uint8_t *is, uint64_t size,
                       buffer *directory, buffer *changes)
{
    for (uint64_t start = 0; start < size; start += PATCH_SEGMENT) {
        buffer places = {0}, words = {0};
        uint32_t count = 0;
        for (uint64_t at = start; at < size && at < start + PATCH_SEGMENT; at += 2) {
            if (word_of(was, size, at) == word_of(is, size, at))
                continue;
            add_u16(&places, (at - start) / 2);
            add_u16(&words, word_of(is, size, at));
            count++;
        }
        add_u16(directory, count & 0xffff);
        add_u16(directory, count >> 16);
        buffer_append(changes, places.data, places.size);
        buffer_append(changes, words.data, words.size);
        buffer_free(&places);
        buffer_free(&words);
    }
}

/* Some bytes of boxes are others. */
static void change(world *w, const world_rank *r, uint8_t *copy)
{
    uint64_t n = world_random(w, 3) ? world_random(w, 1 + r->used[0] / 8) : 0;
    for (uint64_t i = 0; i < n; i++) {
        const box_record *box = &r->records[world_random(w, r->n_records)];
        uint64_t bytes = 0;
        assert_true(dtype_bytes(w->entries[box->key].dtype, box->block.n_dims,
                                box->block.extent, &bytes));
        copy[box->place.offset + world_random(w, bytes)] = (uint8_t)world_random(w, 0);
    }
}

static void make_history(scene *s, uint32_t rank)
{
    history *h = &s->ranks[rank];
    const world_rank *r = &s->w.ranks[rank];
    h->size = r->used[0];
    h->offers = (patch_offers){.generation = 100 + s->chain,
                               .directory_bytes = patch_directory_bytes(h->size),
                               .first_box = FIRST_BOX,
                               .count = s->chain};
    for (uint32_t i = 0; i <= s->chain; i++) {
        h->copies[i] = malloc(h->size + 1);
        memcpy(h->copies[i], i ? h->copies[i - 1] : r->memory[0], h->size);
        if (i > 0)
            change(&s->w, r, h->copies[i]);
    }
    for (uint32_t k = 0; k < s->chain; k++) {
        uint32_t newer = s->chain - k;
        make_patch(h->copies[newer - 1], h->copies[newer], h->size, &h->directories[k],
                   &h->changes[k]);
        h->offers.patches[k].from = 100 + newer - 1;
        h->offers.patches[k].bytes = h->changes[k].size;
    }
}

/* -------------------------------------------------------------------- worlds */

static void hold_all(world *w)
{
    for (uint32_t key = 0; key < w->n_keys; key++) {
        const key_entry *e = &w->entries[key];
        uint32_t dim = (uint32_t)world_random(w, e->n_dims);
        for (uint32_t rank = 0; rank < w->n_ranks; rank++) {
            block b = block_chunk(e->n_dims, e->shape, dim, w->n_ranks, rank);
            if (!block_is_empty(&b))
                world_hold(w, rank, key, &b, 0, world_random(w, 4), LAYOUT_PACKED);
        }
    }
}

/* Any part of the tensor, also columns of it. */
static block any_part(world *w, const key_entry *e)
{
    block b = {.n_dims = e->n_dims};
    for (uint32_t i = 0; i < e->n_dims; i++) {
        b.offset[i] = world_random(w, 2) ? 0 : world_random(w, e->shape[i]);
        b.extent[i] = e->shape[i] - b.offset[i];
        if (world_random(w, 2))
            b.extent[i] = 1 + world_random(w, b.extent[i]);
    }
    return b;
}

static void scene_make(scene *s, uint64_t seed, bool large)
{
    static const fanin_dtype dtypes[] = {FANIN_DTYPE_U8, FANIN_DTYPE_BF16,
                                         FANIN_DTYPE_F32};
    *s = (scene){0};
    world *w = &s->w;
    world_init(w, 1 + seed % 3, seed);
    s->chain = 1 + (uint32_t)world_random(w, CHAIN_MOST);
    uint64_t n_keys = 1 + world_random(w, 4);
    for (uint64_t i = 0; i < n_keys; i++) {
        uint64_t shape[FANIN_MAX_DIMS];
        uint32_t n_dims = 1 + (uint32_t)world_random(w, 3);
        for (uint32_t d = 0; d < n_dims; d++)
            shape[d] = 1 + world_random(w, d ? 23 : 31);
        if (large)
            shape[0] *= 1200 / n_dims;
        world_key(w, dtypes[world_random(w, 3)], n_dims, shape);
    }
    hold_all(w);
    world_seal(w, NULL);
    landing_init(&s->l, 0);
    for (uint32_t key = 0; key < w->n_keys; key++) {
        block b = any_part(w, &w->entries[key]);
        landing_add(&s->l, w, key, &b, world_random(w, 2));
    }
    landing_clear(&s->l);
    assert_works(world_plan(w, &s->l, &s->whole.plan, ERROR));
    s->whole.sources = w->sources;
    s->whole.n_sources = w->n_sources;
    for (uint32_t rank = 0; rank < w->n_ranks; rank++)
        make_history(s, rank);
}

static void scene_end(scene *s)
{
    delta_free(&s->d);
    for (uint32_t rank = 0; rank < s->w.n_ranks; rank++) {
        history *h = &s->ranks[rank];
        for (uint32_t i = 0; i <= s->chain; i++)
            free(h->copies[i]);
        for (uint32_t k = 0; k < s->chain; k++) {
            buffer_free(&h->directories[k]);
            buffer_free(&h->changes[k]);
        }
    }
    plan_free(&s->whole.plan);
    landing_free(&s->l);
    world_free(&s->w);
}

/* -------------------------------------------------------------- what is done */

/* A pull of the whole of each rank's copy number @p copy. */
static void land_whole(scene *s, uint32_t copy, uint8_t *to)
{
    const plan *plan = s->whole.plan;
    for (size_t i = 0; i < s->whole.n_sources; i++) {
        const plan_source *source = &s->whole.sources[i];
        for (uint64_t j = 0; j < plan->ranks[i].n_pieces; j++) {
            const piece *p = &plan->ranks[i].pieces[j];
            const uint8_t *from =
                s->ranks[source->rank].copies[copy] + delta_origin(source->boxes, p);
            if (p->view)
                strided_copy(&plan->views[p->view - 1], to + p->to, from);
            else
                memcpy(to + p->to, from, p->length);
        }
    }
}

/* A delta whose directories are here, of a chain that is shorter for some ranks. */
static void begin_delta(scene *s, const uint32_t *chains)
{
    size_t n = s->whole.n_sources, at = 0;
    delta *d = s->d = calloc(1, sizeof *d);
    *d = (delta){.whole = &s->whole, .most = UINT64_MAX, .reader = &stream_reader};
    d->sources = calloc(n + 1, sizeof *d->sources);
    d->staging = malloc(n * CHAIN_MOST * 4096);
    for (size_t i = 0; i < n; i++) {
        const history *h = &s->ranks[s->whole.sources[i].rank];
        bool needed = s->whole.plan->ranks[i].n_pieces > 0;
        d->sources[i] = (delta_source){.offers = &h->offers,
                                       .chain = needed ? chains[i] : 0,
                                       .segments = h->offers.directory_bytes / 4};
        for (uint32_t k = 0; k < d->sources[i].chain; k++) {
            memcpy(d->staging + at, h->directories[k].data, h->directories[k].size);
            at += h->directories[k].size;
        }
    }
}

/* As ranks serve what is asked for. Returns its bytes. */
static uint64_t serve(const scene *s)
{
    const delta *d = s->d;
    uint64_t bytes = 0;
    for (size_t i = 0; i < d->whole->n_sources; i++) {
        const history *h = &s->ranks[d->whole->sources[i].rank];
        const plan_rank *rank = &d->read.plan->ranks[i];
        const read_list *list = d->details[i];
        uint64_t entries = 0;
        for (uint64_t j = 0; list && j < list->n_requests; j++)
            entries += list->requests[j].n_entries;
        assert_int_equal(entries, rank->n_pieces);
        for (uint64_t j = 0; j < rank->n_pieces; j++) {
            const read_entry *e = &list->entries[j];
            const buffer *from = &h->changes[(e->box - FIRST_BOX) / PATCH_BOXES];
            assert_int_equal((e->box - FIRST_BOX) % PATCH_BOXES, 1);
            assert_true(e->offset + e->length <= from->size);
            memcpy(d->staging + rank->pieces[j].to, from->data + e->offset, e->length);
            bytes += e->length;
        }
    }
    assert_int_equal(bytes, d->read.plan->bytes);
    return bytes;
}

static void read_and_apply(scene *s, uint8_t *to)
{
    const char *because = NULL;
    assert_works(delta_plan_changes(s->d, &because, ERROR));
    assert_null(because);
    (void)serve(s);
    assert_works(delta_check(s->d, 1, 2, ERROR));
    assert_works(delta_check(s->d, 0, 2, ERROR));
    for (size_t i = 0; i < s->whole.n_sources; i++) {
        uint64_t n = s->whole.plan->ranks[i].n_pieces;
        if (s->d->sources[i].chain == 0)
            continue;
        delta_apply(s->d, i, n / 2, n, to);
        delta_apply(s->d, i, 0, n / 2, to);
    }
}

static void compare_round(uint64_t seed, bool large)
{
    scene s;
    uint32_t chains[WORLD_RANKS];
    scene_make(&s, seed, large);
    uint8_t *is = malloc(s.l.size + 1);
    memcpy(is, s.l.bytes, s.l.size);
    /* A base of an older copy, for all. */
    uint32_t chain = 1 + (uint32_t)world_random(&s.w, s.chain);
    for (size_t i = 0; i < s.whole.n_sources; i++)
        chains[i] = chain;
    land_whole(&s, s.chain - chain, s.l.bytes);
    land_whole(&s, s.chain, is);
    begin_delta(&s, chains);
    read_and_apply(&s, s.l.bytes);
    assert_memory_equal(s.l.bytes, is, s.l.size);
    free(is);
    scene_end(&s);
}

TEST(patches_lead_to_what_the_whole_would_be)
{
    for (uint64_t seed = 0; seed < ROUNDS; seed++)
        compare_round(seed, seed % 200 == 0);
}

/* ------------------------------------------------------ one tensor, three segments */

#define ROWS 1024
#define COLUMNS 192 /* 384 KiB: 3 segments */

/* Rows [first, first + rows) and columns likewise are wanted. */
static void make_matrix(scene *s, uint64_t first, uint64_t rows, uint64_t column,
                        uint64_t columns)
{
    *s = (scene){.chain = 1};
    world_init(&s->w, 1, 7);
    world_key(&s->w, FANIN_DTYPE_BF16, 2, (uint64_t[]){ROWS, COLUMNS});
    hold_all(&s->w);
    world_seal(&s->w, NULL);
    landing_init(&s->l, 0);
    landing_add(
        &s->l, &s->w, 0,
        &(block){.n_dims = 2, .offset = {first, column}, .extent = {rows, columns}},
        false);
    landing_clear(&s->l);
    assert_works(world_plan(&s->w, &s->l, &s->whole.plan, ERROR));
    s->whole.sources = s->w.sources;
    s->whole.n_sources = 1;
    make_history(s, 0);
}

/* Word @p at of the newest copy is another one. */
static void change_word(scene *s, uint64_t at)
{
    history *h = &s->ranks[0];
    h->copies[1][2 * at] ^= 0x55;
    buffer_clear(&h->directories[0]);
    buffer_clear(&h->changes[0]);
    make_patch(h->copies[0], h->copies[1], h->size, &h->directories[0], &h->changes[0]);
    h->offers.patches[0].bytes = h->changes[0].size;
}

/* Of a patch only what the wanted rows lie in is asked for. */
TEST(a_part_needs_its_segments_alone)
{
    scene s;
    const char *because = NULL;
    make_matrix(&s, 0, 8, 0, COLUMNS);
    memcpy(s.ranks[0].copies[1], s.ranks[0].copies[0], s.ranks[0].size);
    for (uint64_t i = 0; i < 10; i++)
        change_word(&s, i);
    for (uint64_t i = 0; i < 30; i++)
        change_word(&s, PATCH_WORDS + 3 * i);
    begin_delta(&s, (uint32_t[]){1});
    assert_works(delta_plan_changes(s.d, &because, ERROR));
    assert_int_equal(serve(&s), 10 * PATCH_CHANGE);
    scene_end(&s);
    /* Rows of the first and of the last segment: not what lies between them. */
    make_matrix(&s, 0, ROWS, 0, COLUMNS);
    memcpy(s.ranks[0].copies[1], s.ranks[0].copies[0], s.ranks[0].size);
    for (uint64_t i = 0; i < 3; i++)
        change_word(&s, i * PATCH_WORDS);
    begin_delta(&s, (uint32_t[]){1});
    assert_works(delta_plan_changes(s.d, &because, ERROR));
    assert_int_equal(serve(&s), 3 * PATCH_CHANGE);
    assert_int_equal(s.d->read.plan->ranks[0].n_pieces, 1); /* neighbours are joined */
    scene_end(&s);
}

TEST(patches_that_are_too_large_are_not_read)
{
    scene s;
    const char *because = NULL;
    make_matrix(&s, 0, ROWS, 0, COLUMNS);
    memcpy(s.ranks[0].copies[1], s.ranks[0].copies[0], s.ranks[0].size);
    for (uint64_t i = 0; i < 100; i++)
        change_word(&s, i);
    begin_delta(&s, (uint32_t[]){1});
    s.d->most = 100 * PATCH_CHANGE - 1;
    assert_works(delta_plan_changes(s.d, &because, ERROR));
    assert_non_null(because);
    delta_free(&s.d);
    begin_delta(&s, (uint32_t[]){1});
    s.d->most = 100 * PATCH_CHANGE;
    because = NULL;
    assert_works(delta_plan_changes(s.d, &because, ERROR));
    assert_null(because);
    scene_end(&s);
}
