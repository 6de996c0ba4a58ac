/* SPDX-License-Identifier: Apache-2.0 */
#include "shards/catalog_part.h"

#include <stdlib.h>

/* What parts are made from, and the last one. */
typedef struct catalog_parts {
    key_table *keys;
    box_table *boxes;
    digest of; /* what was asked for */
    buffer blob;
} catalog_parts;

void catalog_parts_free(catalog_parts *p)
{
    if (!p)
        return;
    box_table_free(&p->boxes);
    key_table_free(&p->keys);
    buffer_free(&p->blob);
    free(p);
}

/* The tables as readers have them; NULL: no memory. */
static catalog_parts *open_parts(shard_catalog *s)
{
    if (s->parts)
        return s->parts;
    catalog_parts *p = calloc(1, sizeof *p);
    if (p &&
        key_table_decode(s->keys_blob.data, s->keys_blob.size, NULL, &p->keys, NULL) ==
            FANIN_OK &&
        box_table_decode(s->boxes_blob.data, s->boxes_blob.size, p->keys, NULL,
                         &p->boxes, NULL) == FANIN_OK)
        return s->parts = p;
    catalog_parts_free(p);
    return NULL;
}

fanin_status shard_catalog_part(shard_catalog *s, bytes_view keys, const buffer **out,
                                const char **why)
{
    key_set wanted;
    digest of = digest_of(keys.data, keys.size);
    *out = &s->boxes_blob;
    fanin_status status = key_set_decode(keys, s->n_keys, &wanted, why);
    catalog_parts *p = status == FANIN_OK && wanted.n > 0 ? open_parts(s) : NULL;
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
