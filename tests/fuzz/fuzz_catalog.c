/* SPDX-License-Identifier: Apache-2.0 */
/* First byte: which table; 3: a set of keys, behind the number that there are (two bytes,
   little-endian); 4: what maps a region of CUDA memory, behind its length (eight). A box table's
   key table goes before it, its length first (two). All are canonical: what decodes has just these
   bytes. */
#include "fuzz.h"
#include "ipc_key.h"
#include "key_set.h"
#include "recode.h"
#include <string.h>

static bool same(const buffer *b, const uint8_t *data, size_t size)
{
    return b->failed ||
           (b->size == size && (size == 0 || memcmp(b->data, data, size) == 0));
}

static void try_keys(const uint8_t *data, size_t size)
{
    key_table *table;
    fanin_error error = FANIN_ERROR_INIT;
    buffer again = {0};
    if (key_table_decode(data, size, NULL, &table, &error)) {
        check(table == NULL && error.message[0] != '\0');
        return;
    }
    for (uint32_t i = 0; i < table->count; i++)
        check(key_table_find(table, table->entries[i].name) == i);
    key_table_encode(&again, table->entries, table->count, table->pairs,
                     table->n_pairs);
    check(same(&again, data, size));
    buffer_free(&again);
    key_table_free(&table);
}

static void compare_tables(const box_table *a, const box_table *b)
{
    check(box_table_count(a) == box_table_count(b));
    for (uint64_t i = 0; i < box_table_count(a); i++) {
        uint32_t key_a, key_b;
        block block_a, block_b;
        box_place place_a, place_b;
        box_table_get(a, i, &key_a, &block_a, &place_a);
        box_table_get(b, i, &key_b, &block_b, &place_b);
        check(key_a == key_b && block_equal(&block_a, &block_b));
        check(memcmp(&place_a, &place_b, sizeof place_a) == 0);
    }
}

/* The sender is free in its choice of the rule, so only tables of the same rule must have
   the same bytes; the boxes must be the same in any case. */
static void compare_boxes(const box_table *table, const key_table *keys,
                          const uint8_t *data, size_t size)
{
    buffer again = {0};
    box_table *second;
    uint32_t a[3], b[3];
    check(recode_boxes(table, keys, &again));
    check(box_table_decode(again.data, again.size, keys, NULL, &second, NULL) ==
          FANIN_OK);
    compare_tables(table, second);
    if (box_table_rule(table, &a[0], &a[1], &a[2]) ==
            box_table_rule(second, &b[0], &b[1], &b[2]) &&
        memcmp(a, b, sizeof a) == 0)
        check(same(&again, data, size));
    buffer_free(&again);
    box_table_free(&second);
}

/* A part says of its keys what it says, and is cut into the same bytes; its halves are joined. */
static void try_part(const box_table *table, const key_table *keys, const uint8_t *data,
                     size_t size)
{
    key_set known, first = {0}, rest = {0};
    buffer again = {0};
    check(box_table_keys(table, &known));
    box_table_encode_part(&again, table, &known);
    check(same(&again, data, size));
    check(key_set_add(&first, known.ranges[0].first, 1) &&
          key_set_less(&known, &first, &rest));
    if (rest.n > 0) {
        buffer halves[2] = {{0}, {0}};
        box_table *joined, *other;
        box_table_encode_part(&halves[0], table, &first);
        box_table_encode_part(&halves[1], table, &rest);
        check(box_table_decode(halves[0].data, halves[0].size, keys, NULL, &joined,
                               NULL) == FANIN_OK);
        check(box_table_decode(halves[1].data, halves[1].size, keys, NULL, &other,
                               NULL) == FANIN_OK);
        check(box_table_join(&joined, other, NULL) == FANIN_OK);
        buffer_clear(&again);
        box_table_encode_part(&again, joined, &known);
        check(same(&again, data, size));
        box_table_free(&joined);
        buffer_free(&halves[0]);
        buffer_free(&halves[1]);
    }
    buffer_free(&again);
    key_set_free(&known);
    key_set_free(&first);
    key_set_free(&rest);
}

static void try_boxes(const uint8_t *data, size_t size)
{
    key_table *keys;
    box_table *table;
    if (size < 2)
        return;
    size_t keys_size = (size_t)data[0] | (size_t)data[1] << 8;
    data += 2;
    size -= 2;
    if (keys_size > size || key_table_decode(data, keys_size, NULL, &keys, NULL))
        return;
    data += keys_size;
    size -= keys_size;
    if (box_table_decode(data, size, keys, NULL, &table, NULL) == FANIN_OK) {
        uint64_t boxes = 0;
        for (uint32_t key = 0; key < keys->count; key++) {
            uint64_t count, first = box_table_of_key(table, key, &count);
            check(count == 0 || !box_table_is_whole(table) || first == boxes);
            boxes += count;
        }
        check(boxes == box_table_count(table));
        if (box_table_is_whole(table))
            compare_boxes(table, keys, data, size);
        else
            try_part(table, keys, data, size);
        box_table_free(&table);
    }
    key_table_free(&keys);
}

static void try_regions(const uint8_t *data, size_t size)
{
    region_table *table;
    buffer again = {0};
    if (region_table_decode(data, size, NULL, &table, NULL))
        return;
    region_table_encode(&again, table->entries, table->count);
    check(same(&again, data, size));
    buffer_free(&again);
    region_table_free(&table);
}

/* Without its first range, and with it again, it is what it was. */
static void check_set(const key_set *all, uint32_t n_keys)
{
    key_set first = {0}, rest, both;
    check(key_set_count(all) <= n_keys && key_set_has(all, all->ranges[0].first));
    check(key_set_add(&first, all->ranges[0].first, all->ranges[0].count));
    check(key_set_less(all, &first, &rest) && key_set_join(&rest, &first, &both));
    check(rest.n == all->n - 1 && key_set_holds(all, &rest) &&
          !key_set_holds(&rest, &first) && key_set_equal(&both, all));
    key_set_coarsen(&both, 1 + all->n / 2);
    check(both.n <= 1 + all->n / 2 && key_set_holds(&both, all));
    key_set_free(&first);
    key_set_free(&rest);
    key_set_free(&both);
}

static void try_key_set(const uint8_t *data, size_t size)
{
    key_set set;
    const char *why = NULL;
    buffer again = {0};
    if (size < 2)
        return;
    uint32_t n_keys = data[0] | (uint32_t)data[1] << 8;
    if (key_set_decode((bytes_view){data + 2, size - 2}, n_keys, &set, &why) ==
        FANIN_OK) {
        key_set_encode(&again, &set);
        check(same(&again, data + 2, size - 2));
        if (set.n > 0)
            check_set(&set, n_keys);
    } else {
        check(why != NULL);
    }
    buffer_free(&again);
    key_set_free(&set);
}

static void try_ipc_key(const uint8_t *data, size_t size)
{
    ipc_key key;
    uint8_t again[IPC_KEY_SIZE];
    uint64_t length;
    if (size < sizeof length)
        return;
    memcpy(&length, data, sizeof length);
    if (!ipc_key_decode(data + sizeof length, size - sizeof length, length, &key))
        return;
    check(length <= key.length && key.offset <= key.length - length);
    ipc_key_encode(&key, again);
    check(size == sizeof length + sizeof again &&
          memcmp(again, data + sizeof length, sizeof again) == 0);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static void (*const tries[])(const uint8_t *, size_t) = {
        try_keys, try_boxes, try_regions, try_key_set, try_ipc_key};
    if (size > 0 && data[0] < sizeof tries / sizeof tries[0])
        tries[data[0]](data + 1, size - 1);
    return 0;
}
