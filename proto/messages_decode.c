/* SPDX-License-Identifier: Apache-2.0 */
#include "cursor.h"
#include "fields.h"

#include <stdlib.h>
#include <string.h>

/* ------------------------------------------------------------- one field */

static void store(void *message, const field *f, const void *value, size_t size)
{
    memcpy((char *)message + f->offset, value, size);
}

static bool read_integer(cursor *c, void *message, const field *f)
{
    uint64_t u64 = 0;
    int64_t i64 = 0;
    if (f->kind == FIELD_I32) {
        if (!cursor_int(c, f->min, (int64_t)f->max, &i64))
            return false;
        store(message, f, &(int32_t){(int32_t)i64}, sizeof(int32_t));
        return true;
    }
    if (!cursor_uint(c, f->max, &u64))
        return false;
    if (u64 < (uint64_t)f->min)
        return cursor_fail(c, "a number is out of range");
    if (f->kind == FIELD_U32)
        store(message, f, &(uint32_t){(uint32_t)u64}, sizeof(uint32_t));
    else
        store(message, f, &u64, sizeof u64);
    return true;
}

static bool body_read_value(cursor *c, void *message, const field *f)
{
    bytes_view v;
    bool flag;
    switch ((field_kind)f->kind) {
    case FIELD_U32:
    case FIELD_U64:
    case FIELD_I32:
        return read_integer(c, message, f);
    case FIELD_BOOL:
        if (!cursor_bool(c, &flag))
            return false;
        store(message, f, &flag, sizeof flag);
        return true;
    case FIELD_TEXT:
        if (!cursor_text(c, (size_t)f->min, (size_t)f->max, &v))
            return false;
        store(message, f, v.data, v.size);
        *((char *)message + f->offset + v.size) = '\0';
        return true;
    case FIELD_ID:
        if (!cursor_bin(c, 16, 16, &v))
            return false;
        store(message, f, v.data, 16);
        return true;
    case FIELD_BYTES:
        if (!cursor_bin(c, (size_t)f->min, (size_t)f->max, &v))
            return false;
        store(message, f, &v, sizeof v);
        return true;
    }
    return false;
}

/* ------------------------------------------------------------- a map of fields */

static fanin_status verdict(const cursor *c)
{
    return c->why ? FANIN_ERR_PROTOCOL : FANIN_OK;
}

/* An array, which a table can't describe. */
typedef struct array_field {
    uint8_t key;
    bool optional;
    void (*read)(cursor *c, void *context); /* mistakes stay in the cursor */
    void *context;
    bool seen;
    struct array_field *next; /* another one */
} array_field;

static array_field *find_array(array_field *first, uint64_t key)
{
    while (first && first->key != key)
        first = first->next;
    return first;
}

static bool skip_required(cursor *c, const field_table *table, uint32_t *next,
                          uint64_t key)
{
    for (; *next < table->count && table->fields[*next].key < key; ++*next)
        if (table->fields[*next].required)
            return cursor_fail(c, "a required field is missing");
    return true;
}

/* Both the map and the table ascend, so one walk over each does. */
static fanin_status read_map(cursor *c, const field_table *table, void *message,
                             array_field *arrays)
{
    array_field *array;
    uint32_t count, next = 0;
    uint64_t last = 0;
    if (!cursor_map(c, &count))
        return FANIN_ERR_PROTOCOL;
    for (uint32_t i = 0; i < count; i++) {
        uint64_t key;
        if (!cursor_uint(c, UINT64_MAX, &key))
            return FANIN_ERR_PROTOCOL;
        if (i > 0 && key <= last) {
            cursor_fail(c, "keys are not ascending");
            return FANIN_ERR_PROTOCOL;
        }
        last = key;
        if (!skip_required(c, table, &next, key))
            return FANIN_ERR_PROTOCOL;
        if (next < table->count && table->fields[next].key == key) {
            body_read_value(c, message, &table->fields[next++]);
        } else if ((array = find_array(arrays, key)) != NULL) {
            array->seen = true;
            array->read(c, array->context);
        } else if (key < KEY_CRITICAL) {
            cursor_skip(c, NULL);
        } else {
            cursor_fail(c, "a field that must be understood is unknown here");
            return FANIN_ERR_UNSUPPORTED;
        }
        if (c->why)
            return FANIN_ERR_PROTOCOL;
    }
    skip_required(c, table, &next, UINT64_MAX);
    for (array = arrays; array; array = array->next)
        if (!array->seen && !array->optional)
            cursor_fail(c, "a required field is missing");
    return verdict(c);
}

static fanin_status body_read_body(body *in, const field_table *table, void *message,
                                   array_field *array)
{
    cursor c = {.at = in->data, .end = in->data + in->size};
    fanin_status status = read_map(&c, table, message, array);
    if (status == FANIN_OK && cursor_left(&c) != 0) {
        cursor_fail(&c, "bytes after the body's map");
        status = FANIN_ERR_PROTOCOL;
    }
    if (status != FANIN_OK)
        in->why = c.why;
    return status;
}

static fanin_status body_refuse(body *in, const char *why)
{
    in->why = why;
    return FANIN_ERR_PROTOCOL;
}

static fanin_status read_message(body *in, const field_table *table, void *message,
                                 size_t size)
{
    memset(message, 0, size);
    fanin_status status = body_read_body(in, table, message, NULL);
    const char *why = status == FANIN_OK && table->check ? table->check(message) : NULL;
    return why ? body_refuse(in, why) : status;
}

/* ------------------------------------------------------------- messages */

#define DECODER(name, type)                                                            \
    fanin_status decode_##name(body *in, msg_##name *out)                              \
    {                                                                                  \
        return read_message(in, &fields_##name, out, sizeof *out);                     \
    }
FLAT_MESSAGES(DECODER)

fanin_status decode_open_path(body *in, msg_open_path *out)
{
    return read_message(in, &fields_open_path, out, sizeof *out);
}

fanin_status decode_list(body *in, char publication_out[80])
{
    msg_list m = {.publication = ""};
    fanin_status status = body_read_body(in, &fields_list, &m, NULL);
    memcpy(publication_out, m.publication, sizeof m.publication);
    return status;
}

/* An array of maps. */
typedef struct map_reader {
    const field_table *table;
    size_t size; /* of one */
    uint32_t most;
    const char *too_many;
    char *items;
    uint32_t count;
    fanin_status status; /* of the map that failed, or MEMORY */
} map_reader;

static void read_maps(cursor *c, void *context)
{
    map_reader *r = context;
    uint32_t count;
    if (!cursor_array(c, &count))
        return;
    if (count > r->most) {
        cursor_fail(c, r->too_many);
        return;
    }
    r->items = calloc(count ? count : 1, r->size);
    if (!r->items) {
        r->status = FANIN_ERR_MEMORY;
        cursor_fail(c, "out of memory");
    }
    for (; r->count < count && !r->status; r->count++)
        r->status = read_map(c, r->table, r->items + r->count * r->size, NULL);
}

fanin_status decode_list_ok(body *in, msg_list_entry **entries_out, uint32_t *count_out)
{
    map_reader r = {.table = &fields_list_entry,
                    .size = sizeof **entries_out,
                    .most = LIMIT_PUBLICATIONS,
                    .too_many = "too many publications"};
    array_field array = {.key = KEY_LIST_ENTRIES, .read = read_maps, .context = &r};
    fanin_status status = body_read_body(in, &fields_none, NULL, &array);
    *entries_out = NULL;
    *count_out = 0;
    if (status != FANIN_OK) {
        free(r.items);
        return r.status ? r.status : status;
    }
    *entries_out = (msg_list_entry *)(void *)r.items;
    *count_out = r.count;
    return FANIN_OK;
}

fanin_status decode_holders_ok(body *in, msg_holders_ok *out)
{
    map_reader r = {.table = &fields_holder_entry,
                    .size = sizeof *out->entries,
                    .most = LIMIT_HOLDERS,
                    .too_many = "too many holders"};
    array_field array = {.key = KEY_HOLDERS_ENTRIES, .read = read_maps, .context = &r};
    memset(out, 0, sizeof *out);
    fanin_status status = body_read_body(in, &fields_holders_ok, out, &array);
    out->entries = (holder_entry *)(void *)r.items;
    out->n_entries = r.count;
    return r.status ? r.status : status;
}

void holders_free(msg_holders_ok *m)
{
    free(m->entries);
    m->entries = NULL;
    m->n_entries = 0;
}

fanin_status decode_stats(body *in, char publication_out[80])
{
    return decode_list(in, publication_out);
}

static const char *check_holders(const msg_stats_ok *m)
{
    for (uint32_t i = 0; i < m->n_holders; i++)
        if (m->holders[i].publication >= m->n_entries)
            return "a lease of no publication";
    for (uint32_t i = 0; i < m->n_told_relays; i++)
        if (m->told_relays[i].publication >= m->n_entries)
            return "a relay of no publication";
    return NULL;
}

fanin_status decode_stats_ok(body *in, msg_stats_ok *out)
{
    map_reader entries = {.table = &fields_stats_entry,
                          .size = sizeof *out->entries,
                          .most = LIMIT_STATS,
                          .too_many = "too many publications"};
    map_reader holders = {.table = &fields_stats_holder,
                          .size = sizeof *out->holders,
                          .most = LIMIT_STATS,
                          .too_many = "too many holders of leases"};
    map_reader relays = {.table = &fields_stats_relay,
                         .size = sizeof *out->told_relays,
                         .most = LIMIT_STATS,
                         .too_many = "too many relays"};
    array_field third = {.key = KEY_STATS_RELAYS,
                         .optional = true,
                         .read = read_maps,
                         .context = &relays};
    array_field second = {.key = KEY_STATS_HOLDERS,
                          .optional = true,
                          .read = read_maps,
                          .context = &holders,
                          .next = &third};
    array_field first = {.key = KEY_STATS_ENTRIES,
                         .read = read_maps,
                         .context = &entries,
                         .next = &second};
    memset(out, 0, sizeof *out);
    fanin_status status = body_read_body(in, &fields_stats, out, &first);
    out->entries = (stats_entry *)(void *)entries.items;
    out->holders = (stats_holder *)(void *)holders.items;
    out->n_entries = entries.count;
    out->n_holders = holders.count;
    out->told_relays = (stats_relay *)(void *)relays.items;
    out->n_told_relays = relays.count;
    if (status != FANIN_OK)
        return entries.status   ? entries.status
               : holders.status ? holders.status
               : relays.status  ? relays.status
                                : status;
    const char *why = check_holders(out);
    return why ? body_refuse(in, why) : FANIN_OK;
}

void stats_free(msg_stats_ok *m)
{
    free(m->entries);
    free(m->holders);
    free(m->told_relays);
    m->told_relays = NULL;
    m->n_told_relays = 0;
    m->entries = NULL;
    m->holders = NULL;
    m->n_entries = m->n_holders = 0;
}

fanin_status decode_blob_request(body *in, message_type type, msg_blob_request *out)
{
    const field_table *table = fields_of_blob_request(type);
    if (!table)
        return body_refuse(in, "no catalog request");
    return read_message(in, table, out, sizeof *out);
}

fanin_status decode_blob_page(body *in, msg_blob_page *out)
{
    return read_message(in, &fields_page, out, sizeof *out);
}

fanin_status decode_begin_ok(body *in, msg_begin_ok *out)
{
    fanin_status status = read_message(in, &fields_begin_verdict, out, sizeof *out);
    if (status != FANIN_OK)
        return status;
    return body_read_body(
        in, out->granted ? &fields_begin_granted : &fields_begin_refused, out, NULL);
}

typedef struct read_reader {
    read_entry *entries;
    uint32_t count;
    uint64_t boxes, bytes; /* boxes asked for whole, bytes of the ranges */
} read_reader;

static bool read_entry_parts(cursor *c, read_entry *out)
{
    uint32_t parts;
    *out = (read_entry){0};
    if (!cursor_array(c, &parts) || !cursor_uint(c, LIMIT_BOXES - 1, &out->box))
        return false;
    if (parts == 2) {
        if (!cursor_uint(c, LIMIT_BOXES - out->box, &out->count))
            return false;
        return out->count > 0 || cursor_fail(c, "an entry asks for nothing");
    }
    if (parts != 3)
        return cursor_fail(c, "an entry has two or three parts");
    if (!cursor_uint(c, INT64_MAX, &out->offset) ||
        !cursor_uint(c, LIMIT_READ_BYTES, &out->length))
        return false;
    return out->length > 0 || cursor_fail(c, "an entry asks for nothing");
}

static void read_entries(cursor *c, void *context)
{
    read_reader *r = context;
    uint32_t count;
    if (!cursor_array(c, &count))
        return;
    if (count == 0 || count > LIMIT_READ_ENTRIES) {
        cursor_fail(c, "the number of entries is out of range");
        return;
    }
    for (; r->count < count; r->count++) {
        read_entry *entry = &r->entries[r->count];
        if (!read_entry_parts(c, entry))
            return;
        r->boxes += entry->count;
        r->bytes += entry->length;
    }
}

static fanin_status decode_entries(body *in, const field_table *table, msg_read *out,
                                   read_entry *entries)
{
    read_reader r = {.entries = entries};
    array_field array = {.key = KEY_READ_ENTRIES, .read = read_entries, .context = &r};
    memset(out, 0, sizeof *out);
    fanin_status status = body_read_body(in, table, out, &array);
    if (status != FANIN_OK)
        return status;
    /* Without the box table: a whole box holds a byte at least. */
    bool fits = r.boxes ? r.boxes <= out->bytes && r.bytes <= out->bytes - r.boxes
                        : r.bytes == out->bytes;
    if (!fits)
        return body_refuse(in, "the entries do not sum up to the bytes announced");
    out->entries = entries;
    out->n_entries = r.count;
    return FANIN_OK;
}

fanin_status decode_read(body *in, msg_read *out, read_entry *entries)
{
    return decode_entries(in, &fields_read, out, entries);
}

fanin_status decode_digest(body *in, msg_read *out, read_entry *entries)
{
    return decode_entries(in, &fields_digest, out, entries);
}

typedef struct landed_reader {
    landed_range *ranges;
    uint32_t count;
} landed_reader;

static void read_landed(cursor *c, void *context)
{
    landed_reader *r = context;
    uint64_t first, number;
    uint32_t count;
    if (!cursor_array(c, &count))
        return;
    if (count % 2 != 0 || count > 2 * LIMIT_LANDED_RANGES) {
        cursor_fail(c, "the number of ranges is out of range");
        return;
    }
    for (; r->count < count / 2; r->count++) {
        if (!cursor_uint(c, LIMIT_BOXES - 1, &first) ||
            !cursor_uint(c, LIMIT_BOXES - first, &number))
            return;
        if (number == 0) {
            cursor_fail(c, "a range of no boxes");
            return;
        }
        r->ranges[r->count] = (landed_range){(uint32_t)first, (uint32_t)number};
    }
}

fanin_status decode_landed_ok(body *in, msg_landed_ok *out, landed_range *ranges)
{
    landed_reader r = {.ranges = ranges};
    array_field array = {.key = KEY_LANDED_RANGES, .read = read_landed, .context = &r};
    memset(out, 0, sizeof *out);
    fanin_status status = body_read_body(in, &fields_landed_ok, out, &array);
    out->ranges = ranges;
    out->n_ranges = r.count;
    return status;
}

fanin_status decode_empty(body *in)
{
    return body_read_body(in, &fields_none, NULL, NULL);
}
