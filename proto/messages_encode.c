/* SPDX-License-Identifier: Apache-2.0 */
#include "fields.h"
#include "pack.h"
#include "digest.h"
#include "text.h"

#include <string.h>

/* ------------------------------------------------------------- frame around a body */

static size_t frame_open(buffer *b)
{
    static const uint8_t room[FRAME_SIZE];
    size_t start = b->size;
    buffer_append(b, room, sizeof room);
    return start;
}

static void frame_close(buffer *b, size_t start, uint64_t request, message_type type)
{
    if (b->failed)
        return;
    frame f = {.type = type,
               .request = request,
               .length = (uint32_t)(b->size - start - FRAME_SIZE)};
    frame_encode(&f, b->data + start);
    if (!b->sealed)
        return;
    uint8_t seal[SEAL_SIZE];
    seal_header(b->data + start);
    seal_encode(checksum_of(b->data + start, b->size - start), seal);
    buffer_append(b, seal, sizeof seal);
}

/* ------------------------------------------------------------- one field */

static const void *member(const void *message, const field *f)
{
    return (const char *)message + f->offset;
}

static uint64_t encode_number(const void *message, const field *f)
{
    uint64_t u64;
    uint32_t u32;
    int32_t i32;
    bool flag;
    switch ((field_kind)f->kind) {
    case FIELD_U32:
        memcpy(&u32, member(message, f), sizeof u32);
        return u32;
    case FIELD_U64:
        memcpy(&u64, member(message, f), sizeof u64);
        return u64;
    case FIELD_I32:
        memcpy(&i32, member(message, f), sizeof i32);
        return (uint64_t)(int64_t)i32;
    case FIELD_BOOL:
        memcpy(&flag, member(message, f), sizeof flag);
        return flag;
    default:
        return 0;
    }
}

static bytes_view view(const void *message, const field *f)
{
    bytes_view v;
    memcpy(&v, member(message, f), sizeof v);
    return v;
}

static bool present(const void *message, const field *f)
{
    if (f->required)
        return true;
    switch ((field_kind)f->kind) {
    case FIELD_TEXT:
        return *(const char *)member(message, f) != '\0';
    case FIELD_BYTES:
        return view(message, f).size != 0;
    case FIELD_ID:
        return true;
    default:
        return encode_number(message, f) != 0;
    }
}

/* Messages may carry names of files and other foreign bytes; a peer would refuse a body
   with a text that is not UTF-8, so such bytes are replaced. */
static void pack_member_text(buffer *b, const char *text, size_t max)
{
    size_t size = strnlen(text, max);
    if (utf8_valid(text, size)) {
        pack_text(b, text, size);
        return;
    }
    char plain[1024];
    if (size > sizeof plain)
        size = sizeof plain;
    for (size_t i = 0; i < size; i++)
        plain[i] = (unsigned char)text[i] < 0x80 ? text[i] : '?';
    pack_text(b, plain, size);
}

static void pack_value(buffer *b, const void *message, const field *f)
{
    switch ((field_kind)f->kind) {
    case FIELD_U32:
    case FIELD_U64:
        pack_uint(b, encode_number(message, f));
        break;
    case FIELD_I32:
        pack_int(b, (int64_t)encode_number(message, f));
        break;
    case FIELD_BOOL:
        pack_bool(b, encode_number(message, f) != 0);
        break;
    case FIELD_TEXT:
        pack_member_text(b, member(message, f), (size_t)f->max);
        break;
    case FIELD_ID:
        pack_bin(b, member(message, f), 16);
        break;
    case FIELD_BYTES:
        pack_bin(b, view(message, f).data, view(message, f).size);
        break;
    }
}

/* The map's head counts @p more fields that the caller packs after these. */
static void pack_fields(buffer *b, const field_table *table, const void *message,
                        uint32_t more)
{
    uint32_t count = more;
    for (uint32_t i = 0; i < table->count; i++)
        count += present(message, &table->fields[i]);
    pack_map(b, count);
    for (uint32_t i = 0; i < table->count; i++) {
        const field *f = &table->fields[i];
        if (present(message, f)) {
            pack_uint(b, f->key);
            pack_value(b, message, f);
        }
    }
}

static void encode(buffer *b, uint64_t request, message_type type,
                   const field_table *table, const void *message)
{
    size_t start = frame_open(b);
    pack_fields(b, table, message, 0);
    frame_close(b, start, request, type);
}

/* ------------------------------------------------------------- messages */

#define ENCODER(name, type)                                                            \
    void encode_##name(buffer *b, uint64_t request, const msg_##name *m)               \
    {                                                                                  \
        encode(b, request, type, &fields_##name, m);                                   \
    }
FLAT_MESSAGES(ENCODER)

void encode_open_path(buffer *b, uint64_t request, message_type type,
                      const msg_open_path *m)
{
    encode(b, request, type, &fields_open_path, m);
}

static void encode_about(buffer *b, uint64_t request, message_type type,
                         const char *publication_or_null)
{
    msg_list m = {.publication = ""};
    if (publication_or_null)
        strncpy(m.publication, publication_or_null, sizeof m.publication - 1);
    encode(b, request, type, &fields_list, &m);
}

void encode_list(buffer *b, uint64_t request, const char *publication_or_null)
{
    encode_about(b, request, MSG_LIST, publication_or_null);
}

void encode_list_ok(buffer *b, uint64_t request, const msg_list_entry *entries,
                    uint32_t count)
{
    size_t start = frame_open(b);
    pack_map(b, 1);
    pack_uint(b, KEY_LIST_ENTRIES);
    pack_array(b, count);
    for (uint32_t i = 0; i < count; i++)
        pack_fields(b, &fields_list_entry, &entries[i], 0);
    frame_close(b, start, request, MSG_LIST_OK);
}

void encode_stats(buffer *b, uint64_t request, const char *publication_or_null)
{
    encode_about(b, request, MSG_STATS, publication_or_null);
}

void encode_stats_ok(buffer *b, uint64_t request, const msg_stats_ok *m)
{
    size_t start = frame_open(b);
    pack_fields(b, &fields_stats, m, 1 + (m->n_holders > 0) + (m->n_told_relays > 0));
    pack_uint(b, KEY_STATS_ENTRIES);
    pack_array(b, m->n_entries);
    for (uint32_t i = 0; i < m->n_entries; i++)
        pack_fields(b, &fields_stats_entry, &m->entries[i], 0);
    if (m->n_holders > 0) {
        pack_uint(b, KEY_STATS_HOLDERS);
        pack_array(b, m->n_holders);
    }
    for (uint32_t i = 0; i < m->n_holders; i++)
        pack_fields(b, &fields_stats_holder, &m->holders[i], 0);
    if (m->n_told_relays > 0) {
        pack_uint(b, KEY_STATS_RELAYS);
        pack_array(b, m->n_told_relays);
    }
    for (uint32_t i = 0; i < m->n_told_relays; i++)
        pack_fields(b, &fields_stats_relay, &m->told_relays[i], 0);
    frame_close(b, start, request, MSG_STATS_OK);
}

void encode_blob_request(buffer *b, uint64_t request, message_type type,
                         const msg_blob_request *m)
{
    encode(b, request, type, fields_of_blob_request(type), m);
}

void encode_blob_page(buffer *b, uint64_t request, message_type type,
                      const msg_blob_page *m)
{
    encode(b, request, type, &fields_page, m);
}

void encode_begin_ok(buffer *b, uint64_t request, const msg_begin_ok *m)
{
    encode(b, request, MSG_BEGIN_OK,
           m->granted ? &fields_begin_granted : &fields_begin_refused, m);
}

/* Keys ascend, so the dtype, 0: none, comes behind the entries. */
static void encode_entries(buffer *b, uint64_t request, message_type type,
                           const msg_read *m, uint32_t dtype)
{
    size_t start = frame_open(b);
    pack_fields(b, &fields_read, m, dtype ? 2 : 1);
    pack_uint(b, KEY_READ_ENTRIES);
    pack_array(b, m->n_entries);
    for (uint32_t i = 0; i < m->n_entries; i++) {
        const read_entry *e = &m->entries[i];
        pack_array(b, e->count ? 2 : 3);
        pack_uint(b, e->box);
        pack_uint(b, e->count ? e->count : e->offset);
        if (!e->count)
            pack_uint(b, e->length);
    }
    if (dtype) {
        pack_uint(b, KEY_DIGEST_DTYPE);
        pack_uint(b, dtype);
    }
    frame_close(b, start, request, type);
}

void encode_read(buffer *b, uint64_t request, const msg_read *m)
{
    encode_entries(b, request, MSG_READ, m, 0);
}

void encode_digest(buffer *b, uint64_t request, const msg_read *m)
{
    encode_entries(b, request, MSG_DIGEST, m, m->dtype);
}

void encode_read_ok(buffer *b, uint64_t request, uint32_t body_bytes)
{
    frame f = {.type = MSG_READ_OK, .request = request, .length = body_bytes};
    uint8_t head[FRAME_SIZE];
    frame_encode(&f, head);
    if (b->sealed)
        seal_header(head);
    buffer_append(b, head, sizeof head);
}

void encode_holders_ok(buffer *b, uint64_t request, const msg_holders_ok *m)
{
    size_t start = frame_open(b);
    pack_fields(b, &fields_holders_ok, m, 1);
    pack_uint(b, KEY_HOLDERS_ENTRIES);
    pack_array(b, m->n_entries);
    for (uint32_t i = 0; i < m->n_entries; i++) {
        if (m->encoded)
            buffer_append(b, m->encoded[i].data, m->encoded[i].size);
        else
            encode_holder_entry(b, &m->entries[i]);
    }
    frame_close(b, start, request, MSG_HOLDERS_OK);
}

void encode_holder_entry(buffer *b, const holder_entry *e)
{
    pack_fields(b, &fields_holder_entry, e, 0);
}

void encode_landed_ok(buffer *b, uint64_t request, const msg_landed_ok *m)
{
    size_t start = frame_open(b);
    pack_fields(b, &fields_landed_ok, m, 1);
    pack_uint(b, KEY_LANDED_RANGES);
    pack_array(b, 2 * (size_t)m->n_ranges);
    for (uint32_t i = 0; i < m->n_ranges; i++) {
        pack_uint(b, m->ranges[i].first);
        pack_uint(b, m->ranges[i].count);
    }
    frame_close(b, start, request, MSG_LANDED_OK);
}

void encode_empty(buffer *b, uint64_t request, message_type type)
{
    encode(b, request, type, &fields_none, NULL);
}
