/* SPDX-License-Identifier: Apache-2.0 */
#include "recode.h"

#include <stdlib.h>

/* One case for every message whose decoder and encoder take a struct alone. */
#define RECODE(TYPE, name)                                                             \
    case TYPE: {                                                                       \
        msg_##name m;                                                                  \
        status = decode_##name(in, &m);                                                \
        if (!status)                                                                   \
            encode_##name(out, request, &m);                                           \
        return status;                                                                 \
    }

static fanin_status recode_list_ok(uint64_t request, body *in, buffer *out)
{
    msg_list_entry *entries;
    uint32_t count;
    fanin_status status = decode_list_ok(in, &entries, &count);
    if (!status)
        encode_list_ok(out, request, entries, count);
    free(entries);
    return status;
}

static fanin_status recode_stats(uint64_t request, body *in, buffer *out)
{
    char publication[80];
    fanin_status status = decode_stats(in, publication);
    if (!status)
        encode_stats(out, request, publication[0] ? publication : NULL);
    return status;
}

static fanin_status recode_stats_ok(uint64_t request, body *in, buffer *out)
{
    msg_stats_ok m;
    fanin_status status = decode_stats_ok(in, &m);
    if (!status)
        encode_stats_ok(out, request, &m);
    stats_free(&m);
    return status;
}

static fanin_status recode_holders_ok(uint64_t request, body *in, buffer *out)
{
    msg_holders_ok m;
    fanin_status status = decode_holders_ok(in, &m);
    if (!status)
        encode_holders_ok(out, request, &m);
    holders_free(&m);
    return status;
}

static fanin_status recode_landed_ok(uint64_t request, body *in, buffer *out)
{
    static landed_range ranges[LIMIT_LANDED_RANGES];
    msg_landed_ok m;
    fanin_status status = decode_landed_ok(in, &m, ranges);
    if (!status)
        encode_landed_ok(out, request, &m);
    return status;
}

static fanin_status recode_read(uint64_t request, body *in, buffer *out)
{
    static read_entry entries[LIMIT_READ_ENTRIES];
    msg_read m;
    fanin_status status = decode_read(in, &m, entries);
    if (!status)
        encode_read(out, request, &m);
    return status;
}

static fanin_status recode_digest(uint64_t request, body *in, buffer *out)
{
    static read_entry entries[LIMIT_READ_ENTRIES];
    msg_read m;
    fanin_status status = decode_digest(in, &m, entries);
    if (!status)
        encode_digest(out, request, &m);
    return status;
}

static fanin_status recode_list(uint64_t request, body *in, buffer *out)
{
    char publication[80];
    fanin_status status = decode_list(in, publication);
    if (!status)
        encode_list(out, request, publication[0] ? publication : NULL);
    return status;
}

static fanin_status recode_blobs(message_type type, uint64_t request, body *in,
                                 buffer *out)
{
    fanin_status status;
    if (type == MSG_KEYS || type == MSG_BOXES || type == MSG_REGIONS) {
        msg_blob_request m;
        status = decode_blob_request(in, type, &m);
        if (!status)
            encode_blob_request(out, request, type, &m);
        return status;
    }
    msg_blob_page m;
    status = decode_blob_page(in, &m);
    if (!status)
        encode_blob_page(out, request, type, &m);
    return status;
}

static fanin_status recode_open_path(message_type type, uint64_t request, body *in,
                                     buffer *out)
{
    msg_open_path m;
    fanin_status status = decode_open_path(in, &m);
    if (!status)
        encode_open_path(out, request, type, &m);
    return status;
}

static fanin_status recode_empty(message_type type, uint64_t request, body *in,
                                 buffer *out)
{
    fanin_status status = decode_empty(in);
    if (!status)
        encode_empty(out, request, type);
    return status;
}

fanin_status recode_message(message_type type, uint64_t request, body *in, buffer *out)
{
    fanin_status status;
    switch (type) {
        RECODE(MSG_HELLO, hello)
        RECODE(MSG_HELLO_OK, hello_ok)
        RECODE(MSG_WAIT, wait)
        RECODE(MSG_WAIT_OK, wait_ok)
        RECODE(MSG_BEGIN, begin)
        RECODE(MSG_BEGIN_OK, begin_ok)
        RECODE(MSG_END, end)
        RECODE(MSG_END_OK, end_ok)
        RECODE(MSG_WATCH, watch)
        RECODE(MSG_EVENT, event)
        RECODE(MSG_ERROR, error)
        RECODE(MSG_DIGEST_OK, digest_ok)
        RECODE(MSG_OFFER, offer)
        RECODE(MSG_HOLDERS, holders)
        RECODE(MSG_LANDED, landed)
    case MSG_HOLDERS_OK:
        return recode_holders_ok(request, in, out);
    case MSG_LANDED_OK:
        return recode_landed_ok(request, in, out);
    case MSG_LIST:
        return recode_list(request, in, out);
    case MSG_LIST_OK:
        return recode_list_ok(request, in, out);
    case MSG_STATS:
        return recode_stats(request, in, out);
    case MSG_STATS_OK:
        return recode_stats_ok(request, in, out);
    case MSG_READ:
        return recode_read(request, in, out);
    case MSG_DIGEST:
        return recode_digest(request, in, out);
    case MSG_OPEN_PATH:
    case MSG_OPEN_PATH_OK:
        return recode_open_path(type, request, in, out);
    case MSG_KEYS:
    case MSG_KEYS_OK:
    case MSG_BOXES:
    case MSG_BOXES_OK:
    case MSG_REGIONS:
    case MSG_REGIONS_OK:
        return recode_blobs(type, request, in, out);
    case MSG_PING:
    case MSG_PONG:
    case MSG_OFFER_OK:
        return recode_empty(type, request, in, out);
    default:
        in->why = "a message without a body of fields";
        return FANIN_ERR_UNSUPPORTED;
    }
}

box_record *recode_records(const box_table *table)
{
    uint64_t count = box_table_count(table);
    box_record *records = calloc(count + 1, sizeof *records);
    for (uint64_t i = 0; records && i < count; i++)
        box_table_get(table, i, &records[i].key, &records[i].block, &records[i].place);
    return records;
}

bool recode_boxes(const box_table *table, const key_table *keys, buffer *out)
{
    key_set known;
    if (!box_table_is_whole(table)) {
        bool ok = box_table_keys(table, &known);
        if (ok)
            box_table_encode_part(out, table, &known);
        key_set_free(&known);
        return ok;
    }
    uint32_t world = 1, index = 0;
    box_record *records = recode_records(table);
    if (!records)
        return false;
    if (box_table_rule(table, NULL, NULL, NULL) == BOXES_CHUNK)
        box_table_rule(table, NULL, &world, &index);
    box_table_encode(out, keys->entries, keys->count, records, box_table_count(table),
                     index, world);
    free(records);
    return !out->failed;
}
