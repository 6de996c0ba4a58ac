/* SPDX-License-Identifier: Apache-2.0 */
#include "shards/catalog_part.h"

#include <stdlib.h>

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

void catalog_parts_free(catalog_parts *p)
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
