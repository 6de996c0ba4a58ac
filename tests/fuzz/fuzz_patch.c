/* SPDX-License-Identifier: Apache-2.0 */
/* Patches of ranks that may lie, onto what a whole pull has landed. First byte: the world, and
   where its tensors land; then for each source a byte: bits 0-1: how many patches; 2: their
   directories are of one segment more; 3: of one less; 4: their bytes are told by a number (four
   bytes each) instead of what the directory says. Then for each source and patch, newest first,
   the number, if it is told, the directory and the changes. What is missing is zero.

   A lie is told of and nothing is written. Else every byte is what a whole pull of the patched
   memory lands, and no other byte changes. Nothing is asked of a rank that it has not told of. */
#include "delta/delta.h"
#include "fuzz.h"
#include "net/connection.h"
#include "plan_world.h"
#include "stream/stream_link.h"

#include <endian.h>
#include <string.h>

#define SOURCES 2
#define CHAIN 3
#define GUARD 64
#define GUARDED 0x5A
#define WORLDS 5
#define SHAPE(...) ((const uint64_t[]){__VA_ARGS__})

typedef struct scene {
    world w;
    landing l;
    path_plan whole;
    uint64_t segments[SOURCES];
} scene;

/* What a rank tells of one patch. */
typedef struct told {
    uint8_t *directory, *changes; /* changes: those that are told of, or the input's */
    uint64_t bytes, there;
} told;

typedef struct input {
    const uint8_t *data;
    size_t size;
} input;

/* ---------------------------------------------------------------------- worlds */

/* Of bytes: offsets of a rank's boxes may be odd. */
static void odd_world(scene *s)
{
    world_init(&s->w, 1, 1);
    for (uint32_t i = 0; i < 3; i++)
        world_key(&s->w, FANIN_DTYPE_U8, 1, SHAPE(60001 + i));
    for (uint32_t i = 0; i < 3; i++) {
        block b = {.n_dims = 1, .extent = {60001 + i}};
        world_hold(&s->w, 0, i, &b, 0, 1 + 2 * i, LAYOUT_PACKED);
    }
}

static void even_world(scene *s, uint32_t ranks)
{
    world_init(&s->w, ranks, 2);
    for (uint32_t i = 0; i < 3; i++)
        world_key(&s->w, i == 1 ? FANIN_DTYPE_F32 : FANIN_DTYPE_BF16, 2,
                  SHAPE(240, 256));
    for (uint32_t i = 0; i < ranks; i++)
        world_hold_chunks(&s->w, i, 0, ranks, i);
}

/* Of each key some columns, or columns of bytes that begin in a word's middle. */
static void land_columns(scene *s, bool with_strides)
{
    landing_init(&s->l, 0);
    for (uint32_t i = 0; i < s->w.n_keys; i++) {
        block b = {.n_dims = 2, .offset = {7, 64}, .extent = {200, 65}};
        landing_add(&s->l, &s->w, i, &b, with_strides);
    }
}

static void cube_world(scene *s)
{
    world_init(&s->w, 1, 3);
    world_key(&s->w, FANIN_DTYPE_U8, 3, SHAPE(50, 70, 51));
    block all = {.n_dims = 3, .extent = {50, 70, 51}};
    world_hold(&s->w, 0, 0, &all, 0, 0, LAYOUT_PACKED);
}

static void make_world(scene *s, unsigned number)
{
    block some = {.n_dims = 3, .offset = {3, 5, 9}, .extent = {40, 60, 33}};
    number == 0   ? odd_world(s)
    : number == 4 ? cube_world(s)
                  : even_world(s, number == 1 ? 2 : 1);
    world_seal(&s->w, NULL);
    if (number <= 1) {
        landing_whole(&s->l, &s->w, 0);
    } else if (number == 4) {
        landing_init(&s->l, 0);
        landing_add(&s->l, &s->w, 0, &some, true);
    } else {
        land_columns(s, number == 3);
    }
    s->whole = (path_plan){.sources = s->w.sources, .n_sources = s->w.n_sources};
    check(world_plan(&s->w, &s->l, &s->whole.plan, NULL) == FANIN_OK);
    static size_t peer_of[SOURCES] = {0, 1};
    s->whole.peer_of = peer_of;
    for (size_t i = 0; i < s->w.n_sources; i++)
        s->segments[i] = patch_segments(s->w.ranks[i].used[0]);
}

static scene *scene_of(uint8_t byte)
{
    static scene scenes[WORLDS];
    scene *s = &scenes[byte % WORLDS];
    if (!s->whole.plan)
        make_world(s, byte % WORLDS);
    return s;
}

/* --------------------------------------------------------------- what is told */

static void take(input *in, uint8_t *out, uint64_t size)
{
    uint64_t there = in->size < size ? in->size : size;
    memcpy(out, in->data, there);
    memset(out + there, 0, size - there);
    in->data += there;
    in->size -= there;
}

static uint32_t number_at(const uint8_t *at)
{
    uint32_t number;
    memcpy(&number, at, sizeof number);
    return le32toh(number);
}

static uint64_t sum_of(const uint8_t *directory, uint64_t segments)
{
    uint64_t sum = 0;
    for (uint64_t i = 0; i < segments; i++)
        sum += number_at(directory + 4 * i);
    return sum;
}

static void tell(input *in, bool by_number, uint64_t segments, told *out)
{
    uint8_t number[4];
    if (by_number)
        take(in, number, sizeof number);
    out->directory = malloc(4 * segments + 1);
    check(out->directory != NULL);
    take(in, out->directory, 4 * segments);
    out->bytes =
        by_number ? number_at(number) : PATCH_CHANGE * sum_of(out->directory, segments);
    out->there = out->bytes < in->size ? out->bytes : in->size;
    out->changes = malloc(out->there + 1);
    check(out->changes != NULL);
    take(in, out->changes, out->there);
}

static uint8_t change_byte(const told *t, uint64_t at)
{
    check(at < t->bytes);
    return at < t->there ? t->changes[at] : 0;
}

/* -------------------------------------------------------------- the naive way */

typedef enum verdict { IS_LIE, IS_TOO_LARGE, IS_GOOD } verdict;

static bool is_wanted(const scene *s, size_t source, uint64_t segment)
{
    const plan_rank *rank = &s->whole.plan->ranks[source];
    for (uint64_t i = 0; i < rank->n_pieces; i++) {
        uint64_t from = delta_origin(s->w.sources[source].boxes, &rank->pieces[i]);
        if (from < (segment + 1) * PATCH_SEGMENT &&
            from + rank->pieces[i].length > segment * PATCH_SEGMENT)
            return true;
    }
    return false;
}

/* Changes at @p at of the patch, of a segment that is wanted; false: a place that lies. */
static bool patch_segment(const told *t, uint64_t at, uint64_t count, uint8_t *memory)
{
    int32_t before = -1;
    bool sound = true;
    for (uint64_t j = 0; j < count; j++) {
        int32_t place = change_byte(t, at + 2 * j) | change_byte(t, at + 2 * j + 1)
                                                         << 8;
        sound = sound && place > before;
        before = place;
        for (unsigned b = 0; b < 2; b++)
            memory[2 * place + (int32_t)b] = change_byte(t, at + 2 * (count + j) + b);
    }
    return sound;
}

static bool is_sound(const told *t, uint64_t segments)
{
    for (uint64_t i = 0; i < segments; i++)
        if (number_at(t->directory + 4 * i) > PATCH_WORDS)
            return false;
    return t->bytes == PATCH_CHANGE * sum_of(t->directory, segments);
}

/* The patches of one source, oldest first, onto @p memory. *@p read: bytes of changes that are
   wanted. */
static verdict patch_memory(const scene *s, size_t source, uint64_t segments,
                            unsigned n, const told *patches, uint8_t *memory,
                            uint64_t *read)
{
    verdict all = IS_GOOD;
    for (uint64_t i = segments; i < s->segments[source] && n > 0; i++)
        all = is_wanted(s, source, i) ? IS_LIE : all;
    for (unsigned k = n; k-- > 0;) {
        uint64_t at = 0;
        if (!is_sound(&patches[k], segments))
            return IS_LIE;
        for (uint64_t i = 0; i < segments; i++) {
            uint64_t count = number_at(patches[k].directory + 4 * i);
            if (i < s->segments[source] && is_wanted(s, source, i)) {
                *read += PATCH_CHANGE * count;
                if (!patch_segment(&patches[k], at, count, memory + i * PATCH_SEGMENT))
                    all = IS_LIE;
            }
            at += PATCH_CHANGE * count;
        }
    }
    return all;
}

/* What a whole pull lands of @p memory. */
static void land_piece(const scene *s, const piece *p, const uint8_t *memory,
                       uint8_t *to)
{
    const strided *view = p->view ? &s->whole.plan->views[p->view - 1] : NULL;
    if (view)
        strided_copy(view, to + p->to, memory);
    else
        memcpy(to + p->to, memory, p->length);
}

static void land(const scene *s, size_t source, const uint8_t *memory, uint8_t *to)
{
    const plan_rank *rank = &s->whole.plan->ranks[source];
    for (uint64_t i = 0; i < rank->n_pieces; i++) {
        const piece *p = &rank->pieces[i];
        land_piece(s, p, memory + delta_origin(s->w.sources[source].boxes, p), to);
    }
}

/* ------------------------------------------------------------ the client's way */

/* As its rank answers. */
static void serve(const delta *d, told (*patches)[CHAIN])
{
    for (size_t i = 0; i < d->whole->n_sources; i++) {
        const plan_rank *rank = &d->read.plan->ranks[i];
        for (uint64_t j = 0; j < rank->n_pieces; j++) {
            const piece *p = &rank->pieces[j];
            uint64_t box = p->box - d->sources[i].offers->first_box;
            check(box % 2 == 1 && box / 2 < d->sources[i].chain);
            for (uint64_t b = 0; b < p->length; b++)
                d->staging[p->to + b] =
                    change_byte(&patches[i][box / 2], p->offset + b);
        }
    }
}

static uint8_t *directories(const delta *d, told (*patches)[CHAIN])
{
    uint64_t size = 0;
    uint8_t *all = malloc(SOURCES * CHAIN * 4 * 8);
    check(all != NULL);
    for (size_t i = 0; i < d->whole->n_sources; i++)
        for (uint32_t k = 0; k < d->sources[i].chain; k++) {
            memcpy(all + size, patches[i][k].directory, 4 * d->sources[i].segments);
            size += 4 * d->sources[i].segments;
        }
    return all;
}

static verdict pull(const scene *s, patch_offers *offers, told (*patches)[CHAIN],
                    uint8_t *to)
{
    static connection ends[SOURCES];
    static peer peers[SOURCES] = {{.control = &ends[0]}, {.control = &ends[1]}};
    static fanin_client client = {.peers = peers, .n_peers = SOURCES};
    fanin_error error = FANIN_ERROR_INIT;
    const char *because = NULL;
    delta *d = calloc(1, sizeof *d);
    check(d != NULL);
    *d = (delta){.client = &client,
                 .whole = &s->whole,
                 .most = s->whole.plan->bytes / 2,
                 .reader = &stream_reader,
                 .sources = calloc(SOURCES, sizeof *d->sources)};
    check(d->sources != NULL);
    for (size_t i = 0; i < s->whole.n_sources; i++)
        d->sources[i] = (delta_source){.offers = &offers[i],
                                       .chain = offers[i].count,
                                       .segments = offers[i].directory_bytes / 4};
    d->staging = directories(d, patches);
    fanin_status status = delta_plan_changes(d, &because, &error);
    if (status == FANIN_OK && !because) {
        check(d->read.plan->bytes <= d->most);
        serve(d, patches);
        status = delta_check(d, 0, 1, &error);
    }
    check(status == FANIN_OK || status == FANIN_ERR_PROTOCOL);
    verdict found = status ? IS_LIE : because ? IS_TOO_LARGE : IS_GOOD;
    for (size_t i = 0; found == IS_GOOD && i < s->whole.n_sources; i++) {
        uint64_t n = s->whole.plan->ranks[i].n_pieces;
        delta_apply(d, i, 0, n / 2, to);
        delta_apply(d, i, n / 2, n, to);
    }
    delta_free(&d);
    return found;
}

/* ------------------------------------------------------------------------- both */

typedef struct trial {
    const scene *s;
    patch_offers offers[SOURCES];
    told patches[SOURCES][CHAIN];
    uint8_t *found, *wanted; /* memory that both have landed in, with guards */
    verdict expected;
    uint64_t read;
} trial;

static uint8_t *room_for(const scene *s)
{
    uint64_t size = s->l.size + 2 * GUARD;
    uint8_t *all = malloc(size);
    check(all != NULL);
    memset(all, GUARDED, size);
    return all;
}

static void try_source(trial *t, input *in, size_t source, uint8_t how)
{
    const world_rank *rank = &t->s->w.ranks[source];
    patch_offers *offers = &t->offers[source];
    uint64_t segments = t->s->segments[source] + (how >> 2 & 1) - (how >> 3 & 1);
    uint8_t *memory = calloc(t->s->segments[source] + 1, PATCH_SEGMENT);
    check(memory != NULL);
    memcpy(memory, rank->memory[0], rank->used[0]);
    land(t->s, source, memory, t->found + GUARD);
    *offers = (patch_offers){.generation = 9,
                             .directory_bytes = 4 * segments,
                             .first_box = 100,
                             .count = how & 3};
    for (unsigned k = 0; k < offers->count; k++) {
        tell(in, how >> 4 & 1, segments, &t->patches[source][k]);
        offers->patches[k].bytes = t->patches[source][k].bytes;
    }
    verdict one = patch_memory(t->s, source, segments, offers->count,
                               t->patches[source], memory, &t->read);
    t->expected = one < t->expected ? one : t->expected;
    land(t->s, source, memory, t->wanted + GUARD);
    free(memory);
}

static void compare(trial *t)
{
    uint64_t most = t->s->whole.plan->bytes / 2;
    verdict is = pull(t->s, t->offers, t->patches, t->found + GUARD);
    check(is == t->expected || (is == IS_TOO_LARGE && t->read > most));
    if (is == IS_GOOD) {
        check(t->read <= most);
        check(memcmp(t->found, t->wanted, t->s->l.size + 2 * GUARD) == 0);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    input in = {data, size};
    uint8_t head[1 + SOURCES];
    take(&in, head, sizeof head);
    trial t = {.s = scene_of(head[0]), .expected = IS_GOOD};
    t.found = room_for(t.s);
    t.wanted = room_for(t.s);
    for (size_t i = 0; i < t.s->whole.n_sources; i++)
        try_source(&t, &in, i, head[1 + i]);
    compare(&t);
    for (size_t i = 0; i < SOURCES; i++) {
        for (unsigned k = 0; k < CHAIN; k++) {
            free(t.patches[i][k].directory);
            free(t.patches[i][k].changes);
        }
    }
    free(t.found);
    free(t.wanted);
    return 0;
}
