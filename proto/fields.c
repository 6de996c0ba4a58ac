/* SPDX-License-Identifier: Apache-2.0 */
#include "dtype.h"
#include "fields.h"
#include "patch.h"

#include <stddef.h>

#define AT(type, member) (uint16_t) offsetof(type, member)
#define ROOM(type, member) (sizeof((type *)0)->member - 1)

#define NUMBER(key, kind, type, member, min, max)                                      \
    {                                                                                  \
        key, kind, true, AT(type, member), min, max                                    \
    }
#define OPTIONAL_NUMBER(key, kind, type, member, max)                                  \
    {                                                                                  \
        key, kind, false, AT(type, member), 0, max                                     \
    }
#define U32(key, type, member, min, max) NUMBER(key, FIELD_U32, type, member, min, max)
#define U64(key, type, member) NUMBER(key, FIELD_U64, type, member, 0, UINT64_MAX)
#define I32(key, type, member, min, max) NUMBER(key, FIELD_I32, type, member, min, max)
#define FLAG(key, type, member) NUMBER(key, FIELD_BOOL, type, member, 0, 1)
#define OPTIONAL_FLAG(key, type, member)                                               \
    OPTIONAL_NUMBER(key, FIELD_BOOL, type, member, 1)
#define ID(key, type, member) NUMBER(key, FIELD_ID, type, member, 16, 16)
#define NAME(key, type, member)                                                        \
    {                                                                                  \
        key, FIELD_TEXT, true, AT(type, member), 1, ROOM(type, member)                 \
    }
#define OPTIONAL_TEXT(key, type, member)                                               \
    {                                                                                  \
        key, FIELD_TEXT, false, AT(type, member), 0, ROOM(type, member)                \
    }
#define CHECKED_TABLE(name, check, ...)                                                \
    static const field name##_rows[] = {__VA_ARGS__};                                  \
    const field_table name = {name##_rows, sizeof name##_rows / sizeof *name##_rows,   \
                              check}
#define TABLE(name, ...) CHECKED_TABLE(name, NULL, __VA_ARGS__)

static const char *check_hello(const void *message)
{
    const msg_hello *m = message;
    return m->version_min > m->version_max ? "the range of versions is empty" : NULL;
}

static const char *check_hello_ok(const void *message)
{
    const msg_hello_ok *m = message;
    return m->rank >= m->world_size ? "the rank is not below the world size" : NULL;
}

static const char *check_page(const void *message)
{
    const msg_blob_page *m = message;
    if (m->offset > m->total || m->data.size > m->total - m->offset)
        return "a page reaches beyond its table";
    return m->data.size == 0 && m->total != 0 ? "an empty page" : NULL;
}

static const char *check_digest_ok(const void *message)
{
    const msg_digest_ok *m = message;
    return m->digests.size % 16 != 0 ? "digests have 16 bytes each" : NULL;
}

#define WORD_SIZE 8
#define WORD_MISPLACED "a word lies at a multiple of 8"

static const char *check_wait_ok(const void *message)
{
    const msg_wait_ok *m = message;
    if (m->token.size != 0 && m->token.size != 16)
        return "a token has 16 bytes";
    if (m->patches.size > 0 && (m->patches.size < 24 || m->patches.size % 16 != 8))
        return "patches are three numbers and two for each patch";
    return m->word % WORD_SIZE ? WORD_MISPLACED : NULL;
}

static const char *check_begin_granted(const void *message)
{
    const msg_begin_ok *m = message;
    return m->word % WORD_SIZE ? WORD_MISPLACED : NULL;
}

CHECKED_TABLE(fields_hello, check_hello, U32(1, msg_hello, version_min, 1, UINT16_MAX),
              U32(2, msg_hello, version_max, 1, UINT16_MAX),
              OPTIONAL_NUMBER(3, FIELD_U64, msg_hello, features, UINT64_MAX),
              U32(4, msg_hello, role, ROLE_CONTROL, ROLE_DATA), ID(5, msg_hello, id),
              OPTIONAL_TEXT(6, msg_hello, ucx_version),
              OPTIONAL_TEXT(7, msg_hello, software),
              OPTIONAL_TEXT(8, msg_hello, trace_id));

CHECKED_TABLE(
    fields_hello_ok, check_hello_ok, U32(1, msg_hello_ok, version, 1, UINT16_MAX),
    OPTIONAL_NUMBER(2, FIELD_U64, msg_hello_ok, features, UINT64_MAX),
    ID(3, msg_hello_ok, world_id), ID(4, msg_hello_ok, incarnation),
    ID(5, msg_hello_ok, session), U32(6, msg_hello_ok, rank, 0, 65535),
    U32(7, msg_hello_ok, world_size, 1, 65536), NAME(8, msg_hello_ok, server_name),
    OPTIONAL_TEXT(9, msg_hello_ok, ucx_version),
    OPTIONAL_TEXT(10, msg_hello_ok, software), OPTIONAL_TEXT(11, msg_hello_ok, host_id),
    U32(12, msg_hello_ok, paths, 0, UINT32_MAX),
    U32(13, msg_hello_ok, lease_ms, 0, UINT32_MAX),
    OPTIONAL_TEXT(14, msg_hello_ok, warnings), OPTIONAL_TEXT(15, msg_hello_ok, address),
    {16, FIELD_BYTES, false, AT(msg_hello_ok, proof), 0, 32},
    OPTIONAL_FLAG(17, msg_hello_ok, relay));

TABLE(fields_open_path,
      I32(1, msg_open_path, path, WIRE_PATH_STREAM, WIRE_PATH_CUDA_IPC),
      {2, FIELD_BYTES, false, AT(msg_open_path, address), 0, LIMIT_UCX_ADDRESS},
      OPTIONAL_NUMBER(3, FIELD_U64, msg_open_path, witness, UINT64_MAX));

TABLE(fields_list, OPTIONAL_TEXT(1, msg_list, publication));

TABLE(fields_list_entry, NAME(1, msg_list_entry, publication),
      U64(2, msg_list_entry, step), U64(3, msg_list_entry, epoch),
      U64(4, msg_list_entry, catalog_version), U64(5, msg_list_entry, tensors),
      U64(6, msg_list_entry, bytes), ID(7, msg_list_entry, key_digest),
      I32(8, msg_list_entry, state, WIRE_STATE_UNPUBLISHED, WIRE_STATE_PAUSED),
      OPTIONAL_NUMBER(9, FIELD_U64, msg_list_entry, state_age_ms, UINT64_MAX),
      OPTIONAL_NUMBER(10, FIELD_U64, msg_list_entry, commit_age_ms, UINT64_MAX),
      OPTIONAL_NUMBER(11, FIELD_U64, msg_list_entry, taken_back, UINT64_MAX),
      OPTIONAL_NUMBER(12, FIELD_U64, msg_list_entry, patches, UINT64_MAX),
      OPTIONAL_NUMBER(13, FIELD_U64, msg_list_entry, patch_bytes, UINT64_MAX));

#define COUNT(key, type, member)                                                       \
    OPTIONAL_NUMBER(key, FIELD_U64, type, member, UINT64_MAX)
TABLE(fields_stats_entry, NAME(1, stats_entry, publication),
      I32(2, stats_entry, state, WIRE_STATE_UNPUBLISHED, WIRE_STATE_PAUSED),
      COUNT(3, stats_entry, step), COUNT(4, stats_entry, state_age_ms),
      COUNT(5, stats_entry, commit_age_ms), COUNT(6, stats_entry, update_age_ms),
      COUNT(7, stats_entry, leases), COUNT(8, stats_entry, lease_age_ms),
      OPTIONAL_FLAG(9, stats_entry, pending), OPTIONAL_TEXT(10, stats_entry, reason),
      COUNT(11, stats_entry, bytes), COUNT(12, stats_entry, bytes_left));

TABLE(fields_stats_holder, U32(1, stats_holder, publication, 0, LIMIT_STATS - 1),
      OPTIONAL_TEXT(2, stats_holder, who), COUNT(3, stats_holder, leases),
      COUNT(4, stats_holder, age_ms), COUNT(5, stats_holder, held_up_ns));

TABLE(fields_stats_relay, U32(1, stats_relay, publication, 0, LIMIT_STATS - 1),
      NAME(2, stats_relay, address), OPTIONAL_TEXT(3, stats_relay, place),
      COUNT(4, stats_relay, step), COUNT(5, stats_relay, units),
      COUNT(6, stats_relay, landed), COUNT(7, stats_relay, bytes_origin),
      COUNT(8, stats_relay, bytes_relays), COUNT(9, stats_relay, bytes_handed_on),
      COUNT(10, stats_relay, late), COUNT(11, stats_relay, taken_over));

#define DRAINS(key, n) [(key)-1] = COUNT(key, msg_stats_ok, drain_waits[n])
#define COUNTED(key, name, ...) [(key)-1] = COUNT(key, msg_stats_ok, name),
TABLE(fields_stats, COUNTERS(COUNTED, COUNTER_NOT_SHOWN, COUNTED) DRAINS(13, 0),
      DRAINS(14, 1), DRAINS(15, 2), DRAINS(16, 3), DRAINS(17, 4), DRAINS(18, 5),
      DRAINS(19, 6), DRAINS(20, 7), DRAINS(21, 8), DRAINS(22, 9), DRAINS(23, 10),
      DRAINS(24, 11), DRAINS(25, 12));

TABLE(fields_keys, ID(2, msg_blob_request, digest), U64(5, msg_blob_request, offset));
TABLE(fields_boxes, NAME(1, msg_blob_request, publication),
      U64(3, msg_blob_request, catalog_version), U64(5, msg_blob_request, offset),
      {6, FIELD_BYTES, false, AT(msg_blob_request, keys), 0, LIMIT_KEY_SET});
TABLE(fields_regions, NAME(1, msg_blob_request, publication),
      U64(3, msg_blob_request, catalog_version),
      I32(4, msg_blob_request, path, WIRE_PATH_STREAM, WIRE_PATH_CUDA_IPC),
      U64(5, msg_blob_request, offset));

CHECKED_TABLE(fields_page, check_page, U64(1, msg_blob_page, total),
              U64(2, msg_blob_page, offset),
              {3, FIELD_BYTES, true, AT(msg_blob_page, data), 0, LIMIT_PAGE});

TABLE(fields_wait, NAME(1, msg_wait, publication),
      I32(2, msg_wait, rule, WIRE_RULE_NEWEST, WIRE_RULE_AT_LEAST),
      U64(3, msg_wait, step), U32(4, msg_wait, timeout_ms, 0, UINT32_MAX),
      OPTIONAL_NUMBER(5, FIELD_U64, msg_wait, begin_version, UINT64_MAX),
      OPTIONAL_NUMBER(6, FIELD_BOOL, msg_wait, deltas, 1));
CHECKED_TABLE(fields_wait_ok, check_wait_ok, U64(1, msg_wait_ok, step),
              U64(2, msg_wait_ok, catalog_version), ID(3, msg_wait_ok, key_digest),
              OPTIONAL_NUMBER(4, FIELD_U64, msg_wait_ok, stable_ns, UINT64_MAX),
              {5, FIELD_BYTES, false, AT(msg_wait_ok, token), 0, 16},
              OPTIONAL_NUMBER(6, FIELD_U32, msg_wait_ok, lease_ms, UINT32_MAX),
              OPTIONAL_NUMBER(7, FIELD_U64, msg_wait_ok, epoch, UINT64_MAX),
              OPTIONAL_NUMBER(8, FIELD_U64, msg_wait_ok, word, UINT64_MAX),
              {9, FIELD_BYTES, false, AT(msg_wait_ok, patches), 0, PATCH_OFFERS_BYTES},
              OPTIONAL_NUMBER(10, FIELD_U64, msg_wait_ok, digest_bytes, UINT64_MAX),
              OPTIONAL_NUMBER(KEY_CRITICAL, FIELD_U32, msg_wait_ok, first_region,
                              UINT32_MAX));

TABLE(fields_begin, NAME(1, msg_begin, publication), U64(2, msg_begin, step),
      U64(3, msg_begin, catalog_version));
#define FIRST_REGION                                                                   \
    OPTIONAL_NUMBER(KEY_CRITICAL, FIELD_U32, msg_begin_ok, first_region, UINT32_MAX)
TABLE(fields_begin_verdict, FLAG(1, msg_begin_ok, granted), FIRST_REGION);
CHECKED_TABLE(fields_begin_granted, check_begin_granted, FLAG(1, msg_begin_ok, granted),
              ID(2, msg_begin_ok, token), U64(3, msg_begin_ok, epoch),
              U32(4, msg_begin_ok, lease_ms, 0, UINT32_MAX),
              OPTIONAL_NUMBER(9, FIELD_U64, msg_begin_ok, word, UINT64_MAX),
              FIRST_REGION);
TABLE(fields_begin_refused, FLAG(1, msg_begin_ok, granted),
      I32(5, msg_begin_ok, state, WIRE_STATE_UNPUBLISHED, WIRE_STATE_PAUSED),
      U64(6, msg_begin_ok, step), U64(7, msg_begin_ok, catalog_version),
      OPTIONAL_TEXT(8, msg_begin_ok, why));

TABLE(fields_read, ID(1, msg_read, token),
      NUMBER(2, FIELD_U64, msg_read, bytes, 1, LIMIT_READ_BYTES));

TABLE(fields_digest, ID(1, msg_read, token),
      NUMBER(2, FIELD_U64, msg_read, bytes, 1, LIMIT_DIGEST_BYTES),
      OPTIONAL_NUMBER(4, FIELD_U32, msg_read, dtype, DTYPE_LAST));
CHECKED_TABLE(fields_digest_ok, check_digest_ok,
              {1, FIELD_BYTES, true, AT(msg_digest_ok, digests), 16,
               16 * LIMIT_READ_ENTRIES});

TABLE(fields_end, ID(1, msg_end, token), OPTIONAL_FLAG(2, msg_end, abandon),
      OPTIONAL_NUMBER(3, FIELD_U64, msg_end, begin, UINT64_MAX),
      OPTIONAL_FLAG(4, msg_end, quiet), COUNT(5, msg_end, bytes_cma),
      COUNT(6, msg_end, bytes_rdma), COUNT(7, msg_end, bytes_cuda_ipc),
      OPTIONAL_FLAG(8, msg_end, keep));
TABLE(fields_end_ok, FLAG(1, msg_end_ok, good), U64(2, msg_end_ok, step));

TABLE(fields_watch, NAME(1, msg_watch, publication));
TABLE(fields_event, NAME(1, msg_event, publication), U64(2, msg_event, step),
      I32(3, msg_event, state, WIRE_STATE_UNPUBLISHED, WIRE_STATE_PAUSED));

TABLE(fields_offer, NAME(1, msg_offer, publication), U64(2, msg_offer, step),
      ID(3, msg_offer, holding), U32(4, msg_offer, port, 0, UINT16_MAX),
      ID(5, msg_offer, incarnation), OPTIONAL_TEXT(6, msg_offer, host),
      OPTIONAL_TEXT(7, msg_offer, place), OPTIONAL_FLAG(8, msg_offer, local),
      OPTIONAL_FLAG(9, msg_offer, gone), COUNT(10, msg_offer, units),
      COUNT(11, msg_offer, landed), COUNT(12, msg_offer, bytes_origin),
      COUNT(13, msg_offer, bytes_relays), COUNT(14, msg_offer, bytes_handed_on),
      COUNT(15, msg_offer, late), COUNT(16, msg_offer, taken_over));
TABLE(fields_holders, NAME(1, msg_holders, publication), U64(2, msg_holders, step),
      ID(3, msg_holders, holding), COUNT(4, msg_holders, version),
      U32(5, msg_holders, timeout_ms, 0, UINT32_MAX), COUNT(6, msg_holders, roster));
TABLE(fields_holders_ok, U64(1, msg_holders_ok, version),
      U64(2, msg_holders_ok, roster),
      {3, FIELD_BYTES, false, AT(msg_holders_ok, members), 0, LIMIT_HOLDERS / 8});
TABLE(fields_holder_entry, NAME(1, holder_entry, address),
      ID(2, holder_entry, incarnation), OPTIONAL_TEXT(3, holder_entry, host),
      OPTIONAL_TEXT(4, holder_entry, place), OPTIONAL_FLAG(5, holder_entry, local),
      U32(6, holder_entry, number, 0, LIMIT_HOLDERS - 1));
TABLE(fields_landed, ID(1, msg_landed, token), COUNT(2, msg_landed, version),
      U32(3, msg_landed, timeout_ms, 0, UINT32_MAX));
TABLE(fields_landed_ok, U64(1, msg_landed_ok, version),
      OPTIONAL_NUMBER(2, FIELD_U32, msg_landed_ok, serving, UINT32_MAX));

TABLE(fields_error, NUMBER(1, FIELD_I32, msg_error, code, -999, (uint64_t)-100),
      OPTIONAL_TEXT(2, msg_error, message), OPTIONAL_TEXT(3, msg_error, remedy),
      OPTIONAL_TEXT(4, msg_error, key),
      OPTIONAL_NUMBER(5, FIELD_U64, msg_error, step, UINT64_MAX));

const field_table fields_none = {NULL, 0, NULL};

const field_table *fields_of_blob_request(message_type type)
{
    switch (type) {
    case MSG_KEYS:
        return &fields_keys;
    case MSG_BOXES:
        return &fields_boxes;
    case MSG_REGIONS:
        return &fields_regions;
    default:
        return NULL;
    }
}
