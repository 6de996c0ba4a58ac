/* SPDX-License-Identifier: Apache-2.0 */
#include "array.h"
#include "catalog.h"
#include "cursor.h"
#include "dtype.h"
#include "error_set.h"
#include "pack.h"
#include "text.h"

#include <stdlib.h>
#include <string.h>

#define KEY_BYTES_MIN 6 /* a key's objects: prefix, tail of a byte, dtype, shape */
#define PAIR_BYTES_MIN 3

/* ------------------------------------------------------------- encoding */

static size_t shared_prefix(const char *a, const char *b)
{
    size_t n = 0;
    while (a[n] && a[n] == b[n])
        n++;
    return n;
}

void key_table_encode(buffer *out, const key_entry *entries, uint32_t count,
                      const fanin_pair *pairs, uint32_t n_pairs)
{
    const char *last = "";
    pack_uint(out, count);
    pack_uint(out, n_pairs);
    for (uint32_t i = 0; i < count; i++) {
        const key_entry *e = &entries[i];
        size_t shared = shared_prefix(last, e->name);
        pack_uint(out, shared);
        pack_bin(out, e->name + shared, strlen(e->name + shared));
        pack_uint(out, (uint64_t)e->dtype);
        pack_array(out, e->n_dims);
        for (uint32_t dim = 0; dim < e->n_dims; dim++)
            pack_uint(out, e->shape[dim]);
        last = e->name;
    }
    for (uint32_t i = 0; i < n_pairs; i++) {
        pack_text(out, pairs[i].key, strlen(pairs[i].key));
        pack_text(out, pairs[i].value, strlen(pairs[i].value));
    }
}

/* ------------------------------------------------------------- decoding */

/* Names and pairs are collected in one growing buffer, so pointers into it are set at the
   end; until then the tables' pointers are NULL and `starts` keeps the positions. */
typedef struct key_reader {
    cursor in;
    key_table *table;
    buffer text;
    size_t *starts; /* of each name, then of each pair's key and value */
    const char *what;
    uint32_t index; /* of the entry at work, for messages */
    work_stop *stop;
    bool broken_off; /* out of memory, or stopped */
} key_reader;

static bool keys_break_off(key_reader *r)
{
    r->broken_off = true;
    return false;
}

/* How much of a valid text's first bytes are certainly whole characters: all before its last one.
   */
static size_t whole_characters(const uint8_t *text, size_t size)
{
    while (size > 0 && (text[--size] & 0xc0) == 0x80)
        continue;
    return size;
}

/* Everything a name needs follows from one comparison: the tail's first byte is above the
   byte it replaces, so names ascend and the prefix is as long as can be. */
static bool read_name(key_reader *r, size_t last, size_t *last_size)
{
    cursor *c = &r->in;
    uint64_t shared;
    bytes_view tail;
    if (!cursor_uint(c, *last_size, &shared) ||
        !cursor_bin(c, 1, FANIN_MAX_NAME, &tail))
        return false;
    size_t size = (size_t)shared + tail.size;
    if (size > FANIN_MAX_NAME)
        return cursor_fail(c, "a name is too long");
    if (r->text.size + size + 1 > LIMIT_NAMES)
        return cursor_fail(c, "the names are too long in all");
    if (!buffer_reserve(&r->text, size + 1))
        return keys_break_off(r);
    const uint8_t *before = r->text.data + last;
    uint8_t *name = r->text.data + r->text.size;
    if (shared < *last_size && tail.data[0] <= before[shared])
        return cursor_fail(c, "names are not ascending or share more than they say");
    memcpy(name, before, (size_t)shared);
    memcpy(name + shared, tail.data, tail.size);
    name[size] = '\0';
    size_t known = whole_characters(name, (size_t)shared);
    if (!utf8_valid(name + known, size - known))
        return cursor_fail(c, "a name is not UTF-8 or holds a NUL");
    r->text.size += size + 1;
    *last_size = size;
    return true;
}

static bool keys_read_shape(cursor *c, key_entry *e)
{
    uint32_t dtype;
    if (!cursor_u32(c, INT32_MAX, &dtype) || !cursor_array(c, &e->n_dims))
        return false;
    if (e->n_dims > FANIN_MAX_DIMS)
        return cursor_fail(c, "too many dimensions");
    for (uint32_t dim = 0; dim < e->n_dims; dim++)
        if (!cursor_uint(c, UINT64_MAX, &e->shape[dim]))
            return false;
    e->dtype = (fanin_dtype)dtype;
    if (!fanin_dtype_bits(e->dtype))
        return cursor_fail(c, "unknown dtype");
    if (!dtype_bytes(e->dtype, e->n_dims, e->shape, &e->bytes))
        return cursor_fail(c, "a shape does not fit its dtype or is too large");
    return true;
}

static bool read_keys(key_reader *r)
{
    key_table *t = r->table;
    size_t last = 0, last_size = 0;
    r->what = "key";
    for (r->index = 0; r->index < t->count; r->index++) {
        key_entry *e = &t->entries[r->index];
        size_t start = r->text.size;
        if (work_stopped(r->stop))
            return keys_break_off(r);
        if (!read_name(r, last, &last_size) || !keys_read_shape(&r->in, e))
            return false;
        if (__builtin_add_overflow(t->bytes, e->bytes, &t->bytes))
            return cursor_fail(&r->in, "the tensors are too large in all");
        r->starts[r->index] = last = start;
    }
    return true;
}

static bool keys_read_text(key_reader *r, size_t min, size_t *budget, size_t *start_out)
{
    bytes_view v;
    if (!cursor_text(&r->in, min, *budget, &v))
        return false;
    if (!buffer_reserve(&r->text, v.size + 1))
        return keys_break_off(r);
    *start_out = r->text.size;
    *budget -= v.size;
    buffer_append(&r->text, v.data, v.size);
    buffer_append(&r->text, "", 1);
    return true;
}

static bool read_pairs(key_reader *r)
{
    size_t budget = LIMIT_METADATA;
    size_t *starts = r->starts + r->table->count;
    r->what = "metadata pair";
    for (r->index = 0; r->index < r->table->n_pairs; r->index++, starts += 2) {
        if (work_stopped(r->stop))
            return keys_break_off(r);
        if (!keys_read_text(r, 1, &budget, &starts[0]) ||
            !keys_read_text(r, 0, &budget, &starts[1]))
            return false;
        const char *text = (const char *)r->text.data;
        if (r->index > 0 && strcmp(text + starts[-2], text + starts[0]) >= 0)
            return cursor_fail(&r->in, "metadata keys are not ascending");
    }
    return true;
}

static bool read_counts(key_reader *r)
{
    key_table *t = r->table;
    cursor *c = &r->in;
    r->what = "count";
    if (!cursor_u32(c, LIMIT_KEYS, &t->count) ||
        !cursor_u32(c, LIMIT_METADATA, &t->n_pairs))
        return false;
    if ((uint64_t)t->count * KEY_BYTES_MIN + (uint64_t)t->n_pairs * PAIR_BYTES_MIN >
        cursor_left(c))
        return cursor_fail(c, "more entries are announced than bytes are there");
    size_t n_starts = (size_t)t->count + 2 * (size_t)t->n_pairs;
    t->entries = calloc(t->count ? t->count : 1, sizeof *t->entries);
    t->pairs = calloc(t->n_pairs ? t->n_pairs : 1, sizeof *t->pairs);
    r->starts = malloc((n_starts ? n_starts : 1) * sizeof *r->starts);
    return (t->entries && t->pairs && r->starts) || keys_break_off(r);
}

static void set_pointers(key_reader *r)
{
    key_table *t = r->table;
    const size_t *starts = r->starts;
    const char *text = (const char *)r->text.data;
    for (uint32_t i = 0; i < t->count; i++)
        t->entries[i].name = text + *starts++;
    for (uint32_t i = 0; i < t->n_pairs; i++) {
        t->pairs[i].key = text + *starts++;
        t->pairs[i].value = text + *starts++;
    }
    t->storage = r->text.data;
    r->text = (buffer){0};
}

/* Names that are not in the table are nobody's. */
static void mark_kept(key_table *t)
{
    const char *names = NULL;
    for (uint32_t i = 0; i < t->n_pairs && !names; i++) {
        if (strcmp(t->pairs[i].key, KEEP_F32_PAIR) == 0)
            names = t->pairs[i].value;
    }
    while (names && *names) {
        size_t length = strcspn(names, "\n");
        char name[FANIN_MAX_NAME + 1];
        if (length < sizeof name) {
            memcpy(name, names, length);
            name[length] = '\0';
            int64_t key = key_table_find(t, name);
            if (key >= 0)
                t->entries[key].keep = true;
        }
        names += length + (names[length] == '\n');
    }
}

static fanin_status keys_report(const key_reader *r, fanin_error *error)
{
    static const error_place place = {.phase = "catalog"};
    if (r->broken_off)
        return work_broken_off(r->stop, "catalog", "the key table was read", error);
    return error_set(error, FANIN_ERR_PROTOCOL, &place, "key table, %s %u: %s", r->what,
                     r->index, r->in.why);
}

fanin_status key_table_decode(const uint8_t *blob, size_t size, work_stop *stop,
                              key_table **out, fanin_error *error)
{
    key_table *table = calloc(1, sizeof *table);
    *out = NULL;
    if (!table)
        return error_set_memory(error);
    key_reader r = {.in = {.at = blob, .end = blob + size, .canonical = true},
                    .table = table,
                    .stop = stop};
    fanin_status status = FANIN_OK;
    bool good = read_counts(&r) && read_keys(&r) && read_pairs(&r);
    if (good && cursor_left(&r.in) != 0)
        good = cursor_fail(&r.in, "bytes after the table's end");
    if (good) {
        table->id = digest_of(blob, size);
        set_pointers(&r);
        mark_kept(table);
        *out = table;
    } else {
        status = keys_report(&r, error);
        key_table_free(&table);
    }
    buffer_free(&r.text);
    free(r.starts);
    return status;
}

void key_table_free(key_table **table)
{
    if (!table || !*table)
        return;
    free((*table)->entries);
    free((*table)->pairs);
    free((*table)->storage);
    free(*table);
    *table = NULL;
}

static int keys_compare_name(const void *key, const void *element)
{
    return strcmp(key, ((const key_entry *)element)->name);
}

int64_t key_table_find(const key_table *table, const char *name)
{
    const key_entry *entry = array_find(name, table->entries, table->count,
                                        sizeof *table->entries, keys_compare_name);
    return entry ? entry - table->entries : -1;
}

/* Names that are asked for one after the other mostly lie close: one module's, one layer's. */
#define NEAR 64

int64_t key_table_find_near(const key_table *table, const char *name, uint32_t *near)
{
    const key_entry *all = table->entries;
    uint32_t first = *near > NEAR ? *near - NEAR : 0;
    uint32_t end = table->count - *near > NEAR ? *near + NEAR : table->count;
    int64_t found = -1;
    if (*near < table->count && strcmp(name, all[*near].name) == 0) {
        found = *near;
    } else if (first < end && strcmp(name, all[first].name) >= 0 &&
               strcmp(name, all[end - 1].name) <= 0) {
        const key_entry *entry =
            array_find(name, all + first, end - first, sizeof *all, keys_compare_name);
        found = entry ? entry - all : -1;
    } else {
        found = key_table_find(table, name);
    }
    if (found >= 0)
        *near = (uint32_t)found + 1;
    return found;
}
