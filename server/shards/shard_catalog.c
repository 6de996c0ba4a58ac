/* SPDX-License-Identifier: Apache-2.0 */
#include "shards/shard_catalog.h"
#include "error_set.h"
#include "patch.h"
#include "shards/patch_room.h"
#include "shards/arena.h"
#include "shards/registration.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ------------------------------------------------------------------- parts */

/* What parts are made from, and the last one. */
typedef struct catalog_parts {
    key_table *keys;
    box_table *boxes;
    digest of; /* what was asked for */
    buffer blob;
    part_room room;
    uint64_t counted;
} catalog_parts;

/* What requests of a catalog's parts are answered with. */
enum { PARTS_NOT_ASKED, PARTS_WHOLE, PARTS_GIVEN };

#define OF_KEY 64 /* its name and its place, roughly */
#define OF_BOX 32

/* About what is kept, and rather more. */
static uint64_t memory_of_parts(const shard_catalog *s)
{
    return s->n_keys * (uint64_t)(sizeof(key_entry) + OF_KEY) + s->n_boxes * OF_BOX +
           2 * (uint64_t)(s->keys_blob.size + s->boxes_blob.size);
}

static void catalog_parts_free(catalog_parts *p)
{
    if (!p)
        return;
    box_table_free(&p->boxes);
    key_table_free(&p->keys);
    buffer_free(&p->blob);
    for (size_t i = 0; i < PART_ROOMS; i++)
        atomic_fetch_sub(p->room.in[i].used, p->counted);
    free(p);
}

/* The tables as readers have them; NULL: no memory. */
static catalog_parts *make_parts(const shard_catalog *s, part_room room)
{
    catalog_parts *p = calloc(1, sizeof *p);
    if (!p)
        return NULL;
    p->room = room;
    p->counted = memory_of_parts(s);
    bool fits = true;
    for (size_t i = 0; i < PART_ROOMS; i++) {
        uint64_t used = atomic_fetch_add(room.in[i].used, p->counted) + p->counted;
        fits = fits && used <= room.in[i].most;
    }
    if (fits &&
        key_table_decode(s->keys_blob.data, s->keys_blob.size, NULL, &p->keys, NULL) ==
            FANIN_OK &&
        box_table_decode(s->boxes_blob.data, s->boxes_blob.size, p->keys, NULL,
                         &p->boxes, NULL) == FANIN_OK)
        return p;
    catalog_parts_free(p);
    return NULL;
}

static catalog_parts *open_parts(shard_catalog *s, part_room room)
{
    uint8_t *answer = &s->parts_for[room.is_own];
    if (*answer == PARTS_NOT_ASKED) {
        s->parts = s->parts ? s->parts : make_parts(s, room);
        *answer = s->parts ? PARTS_GIVEN : PARTS_WHOLE;
    }
    return *answer == PARTS_GIVEN ? s->parts : NULL;
}

fanin_status shard_catalog_part(shard_catalog *s, bytes_view keys, part_room room,
                                const buffer **out, const char **why)
{
    key_set wanted;
    digest of = digest_of(keys.data, keys.size);
    *out = &s->boxes_blob;
    fanin_status status = key_set_decode(keys, s->n_keys, &wanted, why);
    catalog_parts *p = status == FANIN_OK && wanted.n > 0 ? open_parts(s, room) : NULL;
    if (p && (p->blob.size == 0 || !digest_equal(&p->of, &of))) {
        buffer_clear(&p->blob);
        box_table_encode_part(&p->blob, p->boxes, &wanted);
        p->of = of;
    }
    if (p && p->blob.failed)
        buffer_free(&p->blob);
    else if (p)
        *out = &p->blob;
    key_set_free(&wanted);
    return status == FANIN_ERR_MEMORY ? FANIN_OK : status;
}

static bool encode_keys(shard_catalog *s, const catalog_contents *what, key_entry *keys)
{
    const shard_set *shards = what->shards;
    for (size_t i = 0; i < shards->count; i++) {
        const shard *from = shards->shards[i];
        keys[i].name = from->name;
        keys[i].dtype = from->dtype;
        keys[i].n_dims = from->n_dims;
        memcpy(keys[i].shape, from->shape, sizeof keys[i].shape);
        keys[i].bytes = from->shape_bytes;
    }
    key_table_encode(&s->keys_blob, keys, (uint32_t)shards->count, what->pairs,
                     what->n_pairs);
    if (s->keys_blob.failed)
        return false;
    s->key_digest = digest_of(s->keys_blob.data, s->keys_blob.size);
    return true;
}

static void place_boxes(shard_catalog *s, const shard_set *shards,
                        const uint32_t *region_of_box, box_record *records)
{
    uint64_t n = 0, start = 0;
    uint32_t views = 0;
    for (size_t i = 0; i < shards->count; i++) {
        const shard *from = shards->shards[i];
        for (size_t j = 0; j < from->n_boxes; j++, n++) {
            const shard_box *b = &from->boxes[j];
            const region *in = s->regions.regions[region_of_box[n]];
            s->boxes[n] = (source_box){b->first, start, VIEW_PACKED, region_of_box[n]};
            if (!b->packed) {
                s->boxes[n].view = views;
                shard_box_view(from, b, &s->views[views++]);
            }
            start += b->bytes;
            box_record *record = &records[n];
            record->key = (uint32_t)i;
            record->block = b->block;
            record->place.region = region_of_box[n];
            record->place.offset = (uintptr_t)b->first - in->base;
            record->place.packed = b->packed;
            memcpy(record->place.stride, b->stride, sizeof b->stride);
        }
    }
    s->boxes[n].start = start;
    s->bytes = start;
}

static uint64_t count_views(const shard_set *shards)
{
    uint64_t views = 0;
    for (size_t i = 0; i < shards->count; i++)
        for (size_t j = 0; j < shards->shards[i]->n_boxes; j++)
            views += !shards->shards[i]->boxes[j].packed;
    return views;
}

static fanin_status fill(shard_catalog *s, const catalog_contents *what,
                         const shard_catalog *before, fanin_error *error)
{
    const shard_set *shards = what->shards;
    uint64_t sum = 0;
    for (size_t i = 0; i < shards->count; i++)
        for (size_t j = 0; j < shards->shards[i]->n_boxes; j++)
            if (__builtin_add_overflow(sum, shards->shards[i]->boxes[j].bytes, &sum))
                return error_set(error, FANIN_ERR_LIMIT, NULL,
                                 "the shards have more than 2^64 bytes");
    s->n_keys = (uint32_t)shards->count;
    s->n_boxes = shards->n_boxes;
    s->boxes = calloc(s->n_boxes + 1, sizeof *s->boxes);
    s->views = calloc(count_views(shards) + 1, sizeof *s->views);
    key_entry *keys = calloc(shards->count + 1, sizeof *keys);
    box_record *records = calloc(s->n_boxes + 1, sizeof *records);
    uint32_t *region_of_box = calloc(s->n_boxes + 1, sizeof *region_of_box);
    fanin_status status;
    if (!s->boxes || !s->views || !keys || !records || !region_of_box ||
        !encode_keys(s, what, keys))
        status = error_set_memory(error);
    else
        status =
            region_set_build(s->registrar, shards, before ? &before->regions : NULL,
                             &s->regions, region_of_box, error);
    if (status == FANIN_OK) {
        for (uint32_t i = 0; i < s->regions.count; i++)
            if (s->regions.regions[i]->memory.kind == FANIN_MEMORY_CUDA)
                s->has_device = true;
        place_boxes(s, shards, region_of_box, records);
        box_table_encode(&s->boxes_blob, keys, s->n_keys, records, s->n_boxes,
                         what->rank, what->world_size);
        if (s->boxes_blob.failed)
            status = error_set_memory(error);
    }
    free(keys);
    free(records);
    free(region_of_box);
    return status;
}

fanin_status shard_catalog_build(registrar *r, const catalog_contents *what,
                                 const shard_catalog *before, shard_catalog **out,
                                 fanin_error *error)
{
    shard_catalog *s = calloc(1, sizeof *s);
    if (!s)
        return error_set_memory(error);
    atomic_init(&s->references, 1);
    s->registrar = r;
    s->version = what->version;
    fanin_status status = fill(s, what, before, error);
    if (status != FANIN_OK) {
        shard_catalog_release(s);
        return status;
    }
    *out = s;
    return FANIN_OK;
}

shard_catalog *shard_catalog_of_patch(registrar *r, uint8_t *packed,
                                      struct patch_room *room, uint64_t first,
                                      uint64_t second)
{
    shard_catalog *s = calloc(1, sizeof *s);
    source_box *boxes = calloc(PATCH_BOXES + 1, sizeof *boxes);
    if (!s || !boxes) {
        free(s);
        free(boxes);
        return NULL;
    }
    boxes[0] = (source_box){packed, 0, VIEW_PACKED, 0};
    boxes[1] = (source_box){packed + first, first, VIEW_PACKED, 0};
    boxes[2].start = first + second;
    atomic_init(&s->references, 1);
    s->registrar = r;
    s->n_boxes = PATCH_BOXES;
    s->boxes = boxes;
    s->bytes = first + second;
    s->packed = packed;
    s->room = room;
    return s;
}

void shard_catalog_end_patch(shard_catalog *s, uint64_t bytes)
{
    s->bytes = s->boxes[2].start = s->boxes[1].start + bytes;
    patch_room_shrink(s->room, s->packed, s->bytes);
}

/* Names are kept as they are sent. */
static void name_of_box(const shard_catalog *s, uint64_t box, char *out, size_t room)
{
    key_table *keys = NULL;
    box_table *boxes = NULL;
    uint32_t key;
    snprintf(out, room, "a tensor");
    if (key_table_decode(s->keys_blob.data, s->keys_blob.size, NULL, &keys, NULL) ==
            FANIN_OK &&
        box_table_decode(s->boxes_blob.data, s->boxes_blob.size, keys, NULL, &boxes,
                         NULL) == FANIN_OK) {
        box_table_get(boxes, box, &key, NULL, NULL);
        snprintf(out, room, "%s", keys->entries[key].name);
    }
    if (boxes)
        box_table_free(&boxes);
    if (keys)
        key_table_free(&keys);
}

void shard_unreadable(const char *name, uint32_t rank, fanin_error *error)
{
    error_place place = {.phase = "read",
                         .key = name,
                         .rank_plus_1 = (int32_t)rank + 1,
                         .remedy = "the trainer has freed or protected memory that it "
                                   "publishes: put the shard anew, and remove it "
                                   "before its memory goes"};
    error_set(error, FANIN_ERR_TRANSPORT, &place,
              "the memory of %.200s cannot be read on rank %u", name, (unsigned)rank);
}

void shard_catalog_unreadable(const shard_catalog *s, uint64_t box, uint32_t rank,
                              fanin_error *error)
{
    char name[640];
    name_of_box(s, box, name, sizeof name);
    shard_unreadable(name, rank, error);
}

shard_catalog *shard_catalog_retain(shard_catalog *s)
{
    atomic_fetch_add_explicit(&s->references, 1, memory_order_relaxed);
    return s;
}

bool shard_catalog_drop(shard_catalog *s)
{
    return atomic_fetch_sub_explicit(&s->references, 1, memory_order_acq_rel) == 1;
}

void shard_catalog_free(shard_catalog *s)
{
    /* Arenas are memory of ours: who maps them is told, and they go after their regions. */
    bool last = s->plan && arena_plan_drop(s->plan);
    if (last)
        region_set_forget(s->registrar, &s->regions, NULL);
    region_set_free(s->registrar, &s->regions);
    if (s->plan)
        arena_plan_free(s->plan, last);
    buffer_free(&s->keys_blob);
    buffer_free(&s->boxes_blob);
    catalog_parts_free(s->parts);
    if (s->room)
        patch_room_give(s->room, s->packed);
    else
        free(s->packed);
    free(s->boxes);
    free(s->views);
    free(s);
}

void shard_catalog_release(shard_catalog *s)
{
    if (s && shard_catalog_drop(s))
        shard_catalog_free(s);
}
