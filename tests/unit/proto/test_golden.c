/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The wire format, byte for byte: tests/golden/NAME.hex holds what each sample is encoded
 * to. FANIN_GOLDEN_WRITE=1 writes the files anew, for a deliberate change of the format.
 */
#include "framing.h"
#include "ipc_key.h"
#include "recode.h"
#include "samples.h"
#include "testing.h"

static FILE *open_golden(const char *name, const char *mode)
{
    const char *root = getenv("FANIN_SOURCE_DIR");
    char path[4096];
    snprintf(path, sizeof path, "%s/tests/golden/%s.hex", root ? root : ".", name);
    FILE *file = fopen(path, mode);
    if (!file)
        fail_msg("cannot open %s", path);
    return file;
}

static void write_golden(const sample *s)
{
    FILE *file = open_golden(s->name, "w");
    for (size_t i = 0; i < s->bytes.size; i++) {
        bool last = i + 1 == s->bytes.size || i % 16 == 15;
        fprintf(file, "%02x%c", s->bytes.data[i], last ? '\n' : ' ');
    }
    fclose(file);
}

static void compare_golden(const sample *s)
{
    assert_false(s->bytes.failed);
    if (getenv("FANIN_GOLDEN_WRITE"))
        write_golden(s);
    FILE *file = open_golden(s->name, "r");
    size_t at = 0;
    unsigned byte;
    while (fscanf(file, "%2x", &byte) == 1) {
        if (at >= s->bytes.size || s->bytes.data[at] != byte)
            fail_msg("%s differs at byte %zu", s->name, at);
        at++;
    }
    fclose(file);
    if (at != s->bytes.size)
        fail_msg("%s has %zu bytes, %zu are expected", s->name, s->bytes.size, at);
}

/* A sealed frame, and that any other bit does not fit. */
TEST(seals_have_their_bytes)
{
    sample s = {.name = "ping_sealed", .bytes = {.sealed = true}};
    encode_empty(&s.bytes, SAMPLE_REQUEST, MSG_PING);
    compare_golden(&s);
    size_t size = s.bytes.size - SEAL_SIZE;
    frame f;
    const char *why = NULL;
    assert_int_equal(size, FRAME_SIZE + 1);
    assert_int_equal(seal_decode(s.bytes.data, true, &f, &why), FANIN_OK);
    assert_int_equal(f.type, MSG_PING);
    assert_true(f.request == SAMPLE_REQUEST);
    assert_true(seal_check(s.bytes.data, size));
    for (size_t bit = 0; bit < 8 * s.bytes.size; bit++) {
        s.bytes.data[bit / 8] ^= (uint8_t)(1u << bit % 8);
        assert_false(seal_check(s.bytes.data, size));
        fanin_status status = seal_decode(s.bytes.data, true, &f, &why);
        assert_int_equal(status, bit < 8 * FRAME_SIZE ? FANIN_ERR_TRANSPORT : FANIN_OK);
        s.bytes.data[bit / 8] ^= (uint8_t)(1u << bit % 8);
    }
    /* A plain frame is no sealed one, and the other way round. */
    assert_int_equal(frame_decode(s.bytes.data, &f, &why), FANIN_ERR_PROTOCOL);
    assert_int_equal(seal_decode(s.bytes.data, false, &f, &why), FANIN_ERR_PROTOCOL);
    buffer_free(&s.bytes);
}

TEST(messages_have_their_bytes)
{
    samples all = samples_of_messages();
    for (size_t i = 0; i < all.count; i++) {
        const sample *s = &all.list[i];
        compare_golden(s);
        framing f = {.bytes = s->bytes, .longest = LIMIT_READ_BYTES};
        framed got;
        assert_int_equal(framing_peek(&f, &got), FRAMING_WHOLE);
        assert_true(got.head.request == SAMPLE_REQUEST || got.head.request == 0);
        if (got.head.type == MSG_READ_OK)
            continue; /* a header alone: raw bytes follow */
        assert_int_equal(framing_take(&f, &got), FRAMING_WHOLE);
        assert_int_equal(f.used, s->bytes.size);
        buffer again = {0};
        fanin_status status =
            recode_message(got.head.type, got.head.request, &got.body, &again);
        if (status)
            fail_msg("%s: %s", s->name, got.body.why);
        assert_int_equal(again.size, s->bytes.size);
        assert_memory_equal(again.data, s->bytes.data, again.size);
        buffer_free(&again);
    }
    samples_free(&all);
}

TEST(every_message_has_a_sample)
{
    samples all = samples_of_messages();
    for (int type = MSG_HELLO; type <= MSG_DIGEST_OK; type++) {
        bool found = type == MSG_AUTH || type == MSG_AUTH_OK;
        for (size_t i = 0; i < all.count && !found; i++)
            found = all.list[i].bytes.data[6] == type;
        if (!found)
            fail_msg("message %d has no sample", type);
    }
    samples_free(&all);
}

TEST(key_tables_have_their_bytes)
{
    samples all = samples_of_keys();
    for (size_t i = 0; i < all.count; i++) {
        const buffer *blob = &all.list[i].bytes;
        key_table *table;
        buffer again = {0};
        compare_golden(&all.list[i]);
        assert_int_equal(key_table_decode(blob->data, blob->size, NULL, &table, NULL),
                         0);
        key_table_encode(&again, table->entries, table->count, table->pairs,
                         table->n_pairs);
        assert_int_equal(again.size, blob->size);
        assert_memory_equal(again.data, blob->data, again.size);
        buffer_free(&again);
        key_table_free(&table);
    }
    samples_free(&all);
}

TEST(box_tables_have_their_bytes)
{
    samples all_keys = samples_of_keys(), all = samples_of_boxes();
    key_table *keys;
    assert_int_equal(key_table_decode(all_keys.list[0].bytes.data,
                                      all_keys.list[0].bytes.size, NULL, &keys, NULL),
                     0);
    for (size_t i = 0; i < all.count; i++) {
        const buffer *blob = &all.list[i].bytes;
        box_table *table;
        buffer again = {0};
        compare_golden(&all.list[i]);
        assert_int_equal(
            box_table_decode(blob->data, blob->size, keys, NULL, &table, NULL), 0);
        assert_true(recode_boxes(table, keys, &again));
        assert_int_equal(again.size, blob->size);
        assert_memory_equal(again.data, blob->data, again.size);
        buffer_free(&again);
        box_table_free(&table);
    }
    key_table_free(&keys);
    samples_free(&all);
    samples_free(&all_keys);
}

TEST(region_tables_have_their_bytes)
{
    samples all = samples_of_regions();
    for (size_t i = 0; i < all.count; i++) {
        const buffer *blob = &all.list[i].bytes;
        region_table *table;
        buffer again = {0};
        compare_golden(&all.list[i]);
        assert_int_equal(
            region_table_decode(blob->data, blob->size, NULL, &table, NULL), 0);
        region_table_encode(&again, table->entries, table->count);
        assert_int_equal(again.size, blob->size);
        assert_memory_equal(again.data, blob->data, again.size);
        buffer_free(&again);
        region_table_free(&table);
    }
    samples_free(&all);
}

/* What another client has to find in the table of a snapshot on the path cuda_ipc. */
TEST(arenas_have_keys_to_map)
{
    samples all = samples_of_regions();
    const buffer *blob = &all.list[all.count - 1].bytes;
    region_table *table;
    assert_string_equal(all.list[all.count - 1].name, "region_table_arenas");
    assert_int_equal(region_table_decode(blob->data, blob->size, NULL, &table, NULL),
                     0);
    assert_int_equal(table->count, 2);
    for (uint32_t i = 0; i < table->count; i++) {
        const region_entry *e = &table->entries[i];
        ipc_key key;
        assert_int_equal(e->base, 0);
        assert_int_equal(e->length, table->entries[0].length);
        assert_true(ipc_key_decode(e->rkey, e->rkey_size, e->length, &key));
        assert_int_equal(key.handle[0], 0x80 + 0x40 * i);
        assert_int_equal(key.handle[63], 0xbf + 0x40 * i);
        assert_int_equal(key.uuid[0], 0x70);
        assert_int_equal(key.offset, 512);
        assert_int_equal(key.length, 2 << 20);
        /* The key says how long the allocation is: a region may not reach beyond it. */
        assert_false(ipc_key_decode(e->rkey, e->rkey_size - 1, e->length, &key));
        assert_true(ipc_key_decode(e->rkey, e->rkey_size, (2 << 20) - 512, &key));
        assert_false(ipc_key_decode(e->rkey, e->rkey_size, (2 << 20) - 511, &key));
        assert_false(ipc_key_decode(e->rkey, e->rkey_size, UINT64_MAX, &key));
    }
    region_table_free(&table);
    samples_free(&all);
}
