/* SPDX-License-Identifier: Apache-2.0 */
#include "catalog.h"
#include "cursor.h"
#include "error_set.h"
#include "pack.h"

#include <stdlib.h>

#define REGION_BYTES_MIN 6
#define DEVICE_MAX 65535

void region_table_encode(buffer *out, const region_entry *entries, uint32_t count)
{
    pack_uint(out, count);
    for (uint32_t i = 0; i < count; i++) {
        const region_entry *e = &entries[i];
        pack_uint(out, e->base);
        pack_uint(out, e->length);
        pack_uint(out, (uint64_t)e->memory);
        pack_int(out, e->device);
        pack_bin(out, e->rkey, e->rkey_size);
    }
}

static bool regions_read_region(cursor *c, region_entry *e)
{
    uint32_t memory;
    int64_t device;
    bytes_view rkey;
    if (!cursor_uint(c, UINT64_MAX, &e->base) ||
        !cursor_uint(c, UINT64_MAX, &e->length) ||
        !cursor_u32(c, FANIN_MEMORY_CUDA, &memory) ||
        !cursor_int(c, -1, DEVICE_MAX, &device) || !cursor_bin(c, 0, LIMIT_RKEY, &rkey))
        return false;
    if (memory == FANIN_MEMORY_DETECT)
        return cursor_fail(c, "unknown kind of memory");
    if (e->length == 0 || e->length > UINT64_MAX - e->base)
        return cursor_fail(c, "a region is empty or wraps around");
    e->memory = (int32_t)memory;
    e->device = (int32_t)device;
    e->rkey = rkey.data;
    e->rkey_size = rkey.size;
    return true;
}

/* The rkeys point into the blob so far; the table keeps its own bytes. */
static bool own_rkeys(region_table *table)
{
    buffer storage = {0};
    size_t total = 0;
    for (uint32_t i = 0; i < table->count; i++)
        total += table->entries[i].rkey_size;
    if (!buffer_reserve(&storage, total + 1))
        return false;
    for (uint32_t i = 0; i < table->count; i++) {
        region_entry *e = &table->entries[i];
        const uint8_t *copy = storage.data + storage.size;
        buffer_append(&storage, e->rkey, e->rkey_size);
        e->rkey = copy;
    }
    table->storage = storage.data;
    return true;
}

static fanin_status regions_fill(region_table *table, cursor *c, work_stop *stop,
                                 fanin_error *error)
{
    static const error_place place = {.phase = "catalog"};
    uint32_t count = 0, index = 0;
    if (cursor_u32(c, LIMIT_BOXES, &count) && count > cursor_left(c) / REGION_BYTES_MIN)
        cursor_fail(c, "more regions are announced than bytes are there");
    if (!c->why) {
        table->entries = calloc(count ? count : 1, sizeof *table->entries);
        if (!table->entries)
            return error_set_memory(error);
    }
    for (; index < count && !c->why; index++) {
        if (work_stopped(stop))
            return work_broken_off(stop, "catalog", "a table of regions was read",
                                   error);
        table->entries[index].id = index;
        if (!regions_read_region(c, &table->entries[index]))
            break;
    }
    if (!c->why && cursor_left(c) != 0)
        cursor_fail(c, "bytes after the table's end");
    if (c->why)
        return error_set(error, FANIN_ERR_PROTOCOL, &place, "regions, entry %u: %s",
                         index, c->why);
    table->count = count;
    return own_rkeys(table) ? FANIN_OK : error_set_memory(error);
}

fanin_status region_table_decode(const uint8_t *blob, size_t size, work_stop *stop,
                                 region_table **out, fanin_error *error)
{
    region_table *table = calloc(1, sizeof *table);
    *out = NULL;
    if (!table)
        return error_set_memory(error);
    cursor c = {.at = blob, .end = blob + size, .canonical = true};
    fanin_status status = regions_fill(table, &c, stop, error);
    if (status != FANIN_OK)
        region_table_free(&table);
    *out = table;
    return status;
}

void region_table_free(region_table **table)
{
    if (!table || !*table)
        return;
    free((*table)->entries);
    free((*table)->storage);
    free(*table);
    *table = NULL;
}
