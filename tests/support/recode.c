/* SPDX-License-Identifier: Apache-2.0 */
#include "recode.h"

#include <stdlib.h>

/* A case of the switch: declares m and more, decodes, and encodes if that was good. */
#define RECODE_AS(declare, decode, encode, forget)                                     \
    {                                                                                  \
        declare;                                                                       \
        status = decode;                                                               \
        if (!status)                                                                   \
            encode;                                                                    \
        forget;                                                                        \
        return status;                                                                 \
    }
#define NOTHING (void)0
#define RECODE_WITH(name, more, forget)                                                \
    RECODE_AS(msg_##name m, decode_##name more, encode_##name(out, request, &m), forget)
/* One whose decoder and encoder take a struct alone. */
#define RECODE(TYPE, name)                                                             \
    case TYPE:                                                                         \
        RECODE_WITH(name, (in, &m), NOTHING)

fanin_status recode_message(message_type type, uint64_t request, body *in, buffer *out)
{
    static landed_range ranges[LIMIT_LANDED_RANGES];
    static read_entry entries[LIMIT_READ_ENTRIES];
    char run[80];
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
        RECODE_WITH(holders_ok, (in, &m), holders_free(&m))
    case MSG_LANDED_OK:
        RECODE_WITH(landed_ok, (in, &m, ranges), NOTHING)
    case MSG_STATS_OK:
        RECODE_WITH(stats_ok, (in, &m), stats_free(&m))
    case MSG_READ:
        RECODE_WITH(read, (in, &m, entries), NOTHING)
    case MSG_DIGEST:
        RECODE_AS(msg_read m, decode_digest(in, &m, entries),
                  encode_digest(out, request, &m), NOTHING)
    case MSG_LIST:
        RECODE_AS(NOTHING, decode_list(in, run),
                  encode_list(out, request, run[0] ? run : NULL), NOTHING)
    case MSG_STATS:
        RECODE_AS(NOTHING, decode_stats(in, run),
                  encode_stats(out, request, run[0] ? run : NULL), NOTHING)
    case MSG_LIST_OK:
        RECODE_AS(msg_list_entry * list; uint32_t n, decode_list_ok(in, &list, &n),
                                         encode_list_ok(out, request, list, n),
                                         free(list))
    case MSG_OPEN_PATH:
    case MSG_OPEN_PATH_OK:
        RECODE_AS(msg_open_path m, decode_open_path(in, &m),
                  encode_open_path(out, request, type, &m), NOTHING)
    case MSG_KEYS:
    case MSG_BOXES:
    case MSG_REGIONS:
        RECODE_AS(msg_blob_request m, decode_blob_request(in, type, &m),
                  encode_blob_request(out, request, type, &m), NOTHING)
    case MSG_KEYS_OK:
    case MSG_BOXES_OK:
    case MSG_REGIONS_OK:
        RECODE_AS(msg_blob_page m, decode_blob_page(in, &m),
                  encode_blob_page(out, request, type, &m), NOTHING)
    case MSG_PING:
    case MSG_PONG:
    case MSG_OFFER_OK:
        RECODE_AS(NOTHING, decode_empty(in), encode_empty(out, request, type), NOTHING)
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
