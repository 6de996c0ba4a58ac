/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file
 * The fields of each body, once for encoder and decoder: PROTOCOL.md's tables in C.
 */
#ifndef FIELDS_H
#define FIELDS_H

#include "messages.h"

#define KEY_CRITICAL 64 /* unknown keys from here on may not be ignored */

typedef enum field_kind {
    FIELD_U32, /* also enum role */
    FIELD_U64,
    FIELD_I32,
    FIELD_BOOL,
    FIELD_TEXT,  /* char[]; min, max: bytes without the NUL */
    FIELD_ID,    /* uint8_t[16] */
    FIELD_BYTES, /* bytes_view of a byte string; min, max: bytes */
} field_kind;

/* An optional field is left out when its value is 0 or empty, and 0 or empty when it is
   left out. */
typedef struct field {
    uint8_t key; /* ascending in a table */
    uint8_t kind;
    bool required;
    uint16_t offset;
    int64_t min;
    uint64_t max;
} field;

typedef struct field_table {
    const field *fields;
    uint32_t count;
    /** what is wrong with a message whose fields are fine by themselves, or NULL; may be NULL */
    const char *(*check)(const void *message);
} field_table;

extern const field_table fields_hello, fields_hello_ok, fields_open_path, fields_list,
    fields_list_entry, fields_stats, fields_stats_entry, fields_stats_holder,
    fields_stats_relay, fields_keys, fields_boxes, fields_regions, fields_page,
    fields_wait, fields_wait_ok, fields_begin, fields_begin_verdict,
    fields_begin_granted, fields_begin_refused, fields_read, fields_digest,
    fields_digest_ok, fields_end, fields_end_ok, fields_watch, fields_event,
    fields_error, fields_offer, fields_holders, fields_holders_ok, fields_holder_entry,
    fields_landed, fields_landed_ok, fields_none;

/** MSG_LIST's only field; elsewhere a publication is a member of the message. */
typedef struct msg_list {
    char publication[80];
} msg_list;

/* Arrays, handled outside of the tables: */
#define KEY_LIST_ENTRIES 1    /* of MSG_LIST_OK: maps of fields_list_entry */
#define KEY_STATS_ENTRIES 40  /* of MSG_STATS_OK: maps of fields_stats_entry */
#define KEY_STATS_HOLDERS 41  /* maps of fields_stats_holder */
#define KEY_STATS_RELAYS 42   /* maps of fields_stats_relay */
#define KEY_HOLDERS_ENTRIES 4 /* of MSG_HOLDERS_OK: maps of fields_holder_entry */
#define KEY_LANDED_RANGES 3   /* of MSG_LANDED_OK: first, count, first, count ... */
#define KEY_DIGEST_DTYPE 4
#define KEY_READ_ENTRIES                                                               \
    3 /* of MSG_READ and MSG_DIGEST: [box, count] or [box, offset, length] */

/** The table of a MSG_KEYS, MSG_BOXES or MSG_REGIONS request. */
const field_table *fields_of_blob_request(message_type type);

#endif
