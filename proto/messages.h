/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file
 * Bodies of messages as C structs. Encoders append a whole frame (header and body, and the seal
 * if the buffer is sealed) to a buffer. Decoders take a body, refuse what PROTOCOL.md refuses with
 * FANIN_ERR_PROTOCOL or FANIN_ERR_UNSUPPORTED (unknown critical key) and a static sentence, and
 * point into the body for blobs ("borrowed": valid as long as the body).
 */
#ifndef MESSAGES_H
#define MESSAGES_H

#include "array.h"
#include "counters.h"
#include "frame.h"
#include <fanin/types.h>

#define VERSION_MIN 1 /**< protocol versions this code speaks */
#define VERSION_MAX FANIN_PROTOCOL_VERSION

typedef enum role { ROLE_CONTROL = 1, ROLE_DATA = 2 } role;

/* Numbers on the wire; the public constants of the same meaning have the same values. */
typedef enum wire_path {
    WIRE_PATH_STREAM = 1,
    WIRE_PATH_CMA = 2,
    WIRE_PATH_RDMA = 3,
    WIRE_PATH_CUDA_IPC = 4,
    WIRE_KEYS_NONE = WIRE_PATH_STREAM, /**< regions that are asked for without keys */
} wire_path;

typedef enum wire_rule {
    WIRE_RULE_NEWEST = 0,
    WIRE_RULE_EXACT = 1,
    WIRE_RULE_AT_LEAST = 2,
} wire_rule;

typedef enum wire_state {
    WIRE_STATE_UNPUBLISHED = 0,
    WIRE_STATE_STABLE = 1,
    WIRE_STATE_DRAINING = 2,
    WIRE_STATE_WRITING = 3,
    WIRE_STATE_PAUSED = 4, /**< only to peers with FEATURE_PAUSED */
} wire_state;

/** Bits of features in hello and hello_ok. */
#define FEATURE_PAUSED UINT64_C(1) /**< knows WIRE_STATE_PAUSED */
#define FEATURE_SEALS UINT64_C(2) /**< on if both ends have it: frames have checksums */
#define FEATURE_DIGESTS UINT64_C(4) /**< a server knows MSG_DIGEST */
#define FEATURE_STATS UINT64_C(8)   /**< a server knows MSG_STATS */
/** A server knows MSG_OFFER, MSG_HOLDERS, MSG_LANDED and an end that keeps the lease. A client
    knows that a relay is no rank. */
#define FEATURE_RELAYS UINT64_C(16)
#define FEATURES                                                                       \
    (FEATURE_PAUSED | FEATURE_SEALS | FEATURE_DIGESTS | FEATURE_STATS |                \
     FEATURE_RELAYS) /**< that this code has */

typedef struct bytes_view {
    const uint8_t *data;
    size_t size;
} bytes_view;

typedef struct msg_hello {
    uint32_t version_min, version_max;
    uint64_t features;
    role role;
    uint8_t id[16]; /**< control: the client's random id; data: hello_ok's session id */
    char ucx_version[32], software[64], trace_id[128];
} msg_hello;

typedef struct msg_hello_ok {
    uint32_t version;
    uint64_t features;
    uint8_t world_id[16], incarnation[16], session[16];
    uint32_t rank, world_size;
    char server_name[160], ucx_version[32], software[64];
    /** boot id + ipc/pid namespace ids, to tell whether cma can work */
    char host_id[64];
    uint32_t paths; /**< bit 1 << fanin_path */
    uint32_t lease_ms;
    char warnings[512]; /**< lines */
    char address[64];   /**< that the server listens on, "127.0.0.1:6000" */
    bytes_view
        proof;  /**< by TLS: that it is this rank, 32 bytes; else empty; borrowed */
    bool relay; /**< a reader that hands on what it has read: no rank */
} msg_hello_ok;

typedef struct msg_open_path { /* request and reply */
    int32_t path;
    bytes_view address; /**< UCX worker address; borrowed */
    /** cma's reply: where the incarnation lies in the server's memory; 0: not told */
    uint64_t witness;
} msg_open_path;

typedef struct msg_list_entry {
    char publication[80];
    uint64_t step, epoch, catalog_version, tensors, bytes;
    uint8_t key_digest[16];
    int32_t state; /**< FANIN_PUBLICATION_... */
    /** since it has this state, since the last commit; rounded up, 0: not known */
    uint64_t state_age_ms, commit_age_ms;
    uint64_t taken_back; /**< 1 and the last step that was withdrawn; 0: none */
    uint64_t patches, patch_bytes; /**< how many there are, and bytes of the newest */
} msg_list_entry;

typedef struct msg_blob_request { /* MSG_KEYS, MSG_BOXES, MSG_REGIONS */
    char publication[80];         /**< "" for MSG_KEYS */
    uint8_t digest[16];           /**< MSG_KEYS only */
    uint64_t catalog_version;     /**< 0 for MSG_KEYS */
    int32_t path;                 /**< MSG_REGIONS only */
    uint64_t offset;
    /** MSG_BOXES only: key_set_encode(); empty: of all keys; borrowed */
    bytes_view keys;
} msg_blob_request;

typedef struct msg_blob_page { /* their replies */
    uint64_t total, offset;
    bytes_view data; /**< at most LIMIT_PAGE; empty only if total is 0; borrowed */
} msg_blob_page;

typedef struct msg_wait {
    char publication[80];
    int32_t rule;
    uint64_t step;
    uint32_t timeout_ms;
    /** begin too, if the answer comes at once and this is the catalog version; 0: only announce */
    uint64_t begin_version;
    bool deltas; /**< tell the patches that there are; the session wants more of them */
} msg_wait;

typedef struct msg_wait_ok {
    uint64_t step, catalog_version;
    uint8_t key_digest[16];
    /** how long the publication was stable on average of its last
        commits; 0: unknown */
    uint64_t stable_ns;
    bytes_view
        token; /**< of the lease at this step; empty: none was granted; borrowed */
    uint32_t lease_ms;
    uint64_t epoch, word;  /**< of older servers; no epoch without a word */
    uint32_t first_region; /**< as of begin_ok */
    bytes_view patches;    /**< patch_offers (patch.h); empty: not told; borrowed */
    uint64_t digest_bytes; /**< that one digest may ask for; 0: as a read */
} msg_wait_ok;

typedef struct msg_begin {
    char publication[80];
    uint64_t step, catalog_version;
} msg_begin;

typedef struct msg_begin_ok {
    bool granted;
    /* granted */
    uint8_t token[16];
    uint64_t epoch; /**< of the publication, or the generation of the arena */
    uint32_t lease_ms;
    /** added to the region numbers of the box table: which arena of a snapshot holds the bytes.
        Critical when not 0 */
    uint32_t first_region;
    uint64_t word; /**< of older servers: where in their memory the epoch stands */
    /* refused */
    int32_t state;                  /**< FANIN_PUBLICATION_... now */
    uint64_t step, catalog_version; /**< now */
    char why[128];
} msg_begin_ok;

/** A part of a rank's boxes, at most LIMIT_READ_BYTES in all. Boxes are numbered in the order of
    the rank's box table. */
typedef struct read_entry {
    uint64_t box;
    uint64_t count;  /**< whole boxes box .. box+count-1, or 0: */
    uint64_t offset; /**< a range of the box's packed row-major bytes */
    uint64_t length;
} read_entry;

typedef struct msg_read {
    uint8_t token[16];
    /** what the entries sum up to. The decoder compares it with the ranges alone; the
        server, which knows the boxes, with everything */
    uint64_t bytes;
    const read_entry *entries;
    uint32_t n_entries;
    /** MSG_DIGEST: what F32 tensors are converted to first, as by fanin_pull_options; 0: nothing */
    uint32_t dtype;
} msg_read;

typedef struct msg_digest_ok {
    bytes_view digests; /**< 16 bytes an entry; borrowed */
} msg_digest_ok;

typedef struct msg_end {
    uint8_t token[16];
    bool abandon; /**< only give the lease back */
    /** not 0: of this session's begin of that request number, whose answer, and so whose token, has
        not come; the token says nothing */
    uint64_t begin;
    bool quiet; /**< no end_ok is wanted; of older clients */
    uint64_t bytes_cma, bytes_rdma,
        bytes_cuda_ipc; /**< that were read under the lease */
    bool keep;          /**< confirm only: the lease stays */
} msg_end;

typedef struct msg_end_ok {
    bool good;
    uint64_t step; /**< committed now */
} msg_end_ok;

typedef struct msg_watch {
    char publication[80];
} msg_watch;

typedef struct msg_event {
    char publication[80];
    uint64_t step;
    int32_t state;
} msg_event;

/** A relay's: that its session's peer hands on what it has of a step. */
typedef struct msg_offer {
    char publication[80];
    uint64_t step;
    uint8_t holding[16];     /**< what is held, in which units; equal: the same */
    uint32_t port;           /**< that it listens on; nothing with gone */
    uint8_t incarnation[16]; /**< of its hello_ok */
    char host[64];           /**< host_id of its hello_ok */
    char place[64];          /**< place.h */
    bool local;              /**< only its own host reaches it */
    bool gone;               /**< it hands on nothing of this publication any more */
    /** what it has done, for the rank's statistics */
    uint64_t units, landed, bytes_origin, bytes_relays, bytes_handed_on, late,
        taken_over;
} msg_offer;

typedef struct msg_holders {
    char publication[80];
    uint64_t step;
    uint8_t holding[16];
    uint64_t version; /**< that the client knows; 0: none */
    uint32_t timeout_ms;
    uint64_t roster; /**< likewise */
} msg_holders;

typedef struct holder_entry {
    /** "10.0.0.7:7000"; ":7000": the host is the rank's, as the client reaches it */
    char address[64];
    uint8_t incarnation[16];
    char host[64], place[64];
    bool local;
    uint32_t number; /**< by which lists tell it */
} holder_entry;

typedef struct msg_holders_ok {
    uint64_t version, roster;
    holder_entry *entries; /**< that have come into the roster */
    uint32_t n_entries;
    /** a bit a number, lowest first: who is in the list; borrowed. Empty: that has not changed */
    bytes_view members;
    const bytes_view *encoded; /**< instead of entries, for encode_holders_ok() alone */
} msg_holders_ok;

typedef struct msg_landed {
    uint8_t token[16];
    uint64_t version; /**< that the client knows; 0: none */
    uint32_t timeout_ms;
} msg_landed;

/** Boxes first .. first+count-1. */
typedef struct landed_range {
    uint32_t first, count;
} landed_range;

typedef struct msg_landed_ok {
    uint64_t version;
    uint32_t serving;           /**< reads under way there now */
    const landed_range *ranges; /**< that have come since the known version */
    uint32_t n_ranges;
} msg_landed_ok;

/** What a rank says of one publication. */
typedef struct stats_entry {
    char publication[80];
    int32_t state;
    uint64_t step; /**< last committed */
    /** since it has this state, since the last commit, since begin_update was called for the update
        that is under way, since its oldest lease; rounded up, 0: none, or not known */
    uint64_t state_age_ms, commit_age_ms, update_age_ms, lease_age_ms;
    uint64_t leases;
    bool pending;     /**< a commit waits for its stream */
    char reason[256]; /**< of a pause */
    /** of its boxes; and what readers have got of them since the last commit */
    uint64_t bytes, bytes_left;
} stats_entry;

/** A session that holds leases of a publication. */
typedef struct stats_holder {
    uint32_t publication;    /**< index of its entry */
    char who[64];            /**< "10.0.0.7", "this user" */
    uint64_t leases, age_ms; /**< of the oldest */
    uint64_t held_up_ns;     /**< for which its peer's leases held updates up, in all */
} stats_holder;

/** A session that offers to hand on, and what it told last. */
typedef struct stats_relay {
    uint32_t publication; /**< index of its entry */
    char address[64], place[64];
    uint64_t step, units, landed, bytes_origin, bytes_relays, bytes_handed_on, late,
        taken_over;
} stats_relay;

typedef struct msg_stats_ok {
#define MEMBER(key, name, ...) uint64_t name;
    COUNTERS(MEMBER, COUNTER_NOT_SHOWN, MEMBER)
#undef MEMBER
    uint64_t drain_waits[FANIN_DRAIN_BUCKETS];
    stats_entry *entries;
    stats_holder *holders;
    stats_relay *told_relays;
    uint32_t n_entries, n_holders, n_told_relays;
} msg_stats_ok;

typedef struct msg_error {
    fanin_status code;
    char message[512], remedy[256], key[640];
    uint64_t step; /**< with SUPERSEDED: the newest */
} msg_error;

typedef struct body {
    const uint8_t *data;
    size_t size;
    const char *why; /**< set when a decoder fails; static */
} body;

/** Messages whose body is one struct: encode_NAME() and decode_NAME() of msg_NAME. */
#define FLAT_MESSAGES(X)                                                               \
    X(hello, MSG_HELLO)                                                                \
    X(hello_ok, MSG_HELLO_OK)                                                          \
    X(wait, MSG_WAIT)                                                                  \
    X(wait_ok, MSG_WAIT_OK)                                                            \
    X(begin, MSG_BEGIN)                                                                \
    X(digest_ok, MSG_DIGEST_OK)                                                        \
    X(end, MSG_END)                                                                    \
    X(end_ok, MSG_END_OK)                                                              \
    X(watch, MSG_WATCH)                                                                \
    X(event, MSG_EVENT)                                                                \
    X(offer, MSG_OFFER)                                                                \
    X(holders, MSG_HOLDERS)                                                            \
    X(landed, MSG_LANDED)                                                              \
    X(error, MSG_ERROR)
#define DECLARE(name, type)                                                            \
    void encode_##name(buffer *b, uint64_t request, const msg_##name *m);              \
    fanin_status decode_##name(body *in, msg_##name *out);
FLAT_MESSAGES(DECLARE)
#undef DECLARE

void encode_open_path(buffer *b, uint64_t request, message_type type,
                      const msg_open_path *m);
void encode_list(buffer *b, uint64_t request, const char *publication_or_null);
void encode_list_ok(buffer *b, uint64_t request, const msg_list_entry *entries,
                    uint32_t count);
void encode_stats(buffer *b, uint64_t request, const char *publication_or_null);
void encode_stats_ok(buffer *b, uint64_t request, const msg_stats_ok *m);
void encode_blob_request(buffer *b, uint64_t request, message_type type,
                         const msg_blob_request *m);
void encode_blob_page(buffer *b, uint64_t request, message_type type,
                      const msg_blob_page *m);
void encode_begin_ok(buffer *b, uint64_t request, const msg_begin_ok *m);
void encode_read(buffer *b, uint64_t request, const msg_read *m);
/** Header only: body_bytes raw bytes follow, and the seal. */
void encode_read_ok(buffer *b, uint64_t request, uint32_t body_bytes);
void encode_digest(buffer *b, uint64_t request, const msg_read *m);
void encode_holders_ok(buffer *b, uint64_t request, const msg_holders_ok *m);
/** One of `encoded`. */
void encode_holder_entry(buffer *b, const holder_entry *e);
void encode_landed_ok(buffer *b, uint64_t request, const msg_landed_ok *m);
/** PING, PONG, OFFER_OK: an empty map. */
void encode_empty(buffer *b, uint64_t request, message_type type);

fanin_status decode_open_path(body *in, msg_open_path *out);
fanin_status decode_list(body *in, char publication_out[80]); /**< "" for all */
/** *entries_out is malloc'ed, the caller frees it. */
fanin_status decode_list_ok(body *in, msg_list_entry **entries_out,
                            uint32_t *count_out);
fanin_status decode_stats(body *in, char publication_out[80]); /**< "" for all */
/** Entries and holders are malloc'ed; stats_free() in either case. */
fanin_status decode_stats_ok(body *in, msg_stats_ok *out);
void stats_free(msg_stats_ok *m);
fanin_status decode_blob_request(body *in, message_type type, msg_blob_request *out);
fanin_status decode_blob_page(body *in, msg_blob_page *out);
fanin_status decode_begin_ok(body *in, msg_begin_ok *out);
/** out->entries points to @p entries, which has room for LIMIT_READ_ENTRIES. */
fanin_status decode_read(body *in, msg_read *out, read_entry *entries);
/** The same, with the dtype. */
fanin_status decode_digest(body *in, msg_read *out, read_entry *entries);
/** Entries are malloc'ed; holders_free() in either case. */
fanin_status decode_holders_ok(body *in, msg_holders_ok *out);
void holders_free(msg_holders_ok *m);
/** out->ranges points to @p ranges, which has room for LIMIT_LANDED_RANGES. */
fanin_status decode_landed_ok(body *in, msg_landed_ok *out, landed_range *ranges);
fanin_status decode_empty(body *in); /**< PING, PONG, OFFER_OK */

#endif
