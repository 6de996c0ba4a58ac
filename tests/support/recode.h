/* SPDX-License-Identifier: Apache-2.0 */
/** @file Decode and encode again: what golden tests and fuzz targets compare. */
#ifndef RECODE_H
#define RECODE_H

#include "catalog.h"
#include "messages.h"

/** Decodes a body of message @p type and appends the frame that says the same. An unknown
    type is FANIN_ERR_UNSUPPORTED. */
fanin_status recode_message(message_type type, uint64_t request, body *in, buffer *out);

/** The records that box_table_encode() takes; malloc'ed, NULL: out of memory. */
box_record *recode_records(const box_table *table);

/** Appends what box_table_encode() makes of a decoded table, as a rank that the table's
    rule fits, or box_table_encode_part() of a part. False: out of memory. */
bool recode_boxes(const box_table *table, const key_table *keys, buffer *out);

#endif
