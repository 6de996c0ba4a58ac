/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file
 * The 24-byte frame header (PROTOCOL.md, "Frames"), and checksums of frames ("Checksums"). A sealed
 * frame has a checksum of its header in the header's reserved field, and 8 bytes behind its body:
 * the
 * checksum of header and body.
 */
#ifndef FRAME_H
#define FRAME_H

#include <fanin/error.h>

#define FRAME_SIZE 24
#define FRAME_CHECKED                                                                  \
    20 /**< bytes of a header that its own checksum, behind them, covers */
#define FRAME_MAGIC UINT32_C(0x314e4146) /**< "FAN1", little-endian */
#define FRAME_MAJOR 1

typedef enum message_type {
    MSG_HELLO = 1,
    MSG_HELLO_OK = 2,
    MSG_AUTH = 3,    /* reserved */
    MSG_AUTH_OK = 4, /* reserved */
    MSG_OPEN_PATH = 5,
    MSG_OPEN_PATH_OK = 6,
    MSG_LIST = 7,
    MSG_LIST_OK = 8,
    MSG_KEYS = 9,
    MSG_KEYS_OK = 10,
    MSG_BOXES = 11,
    MSG_BOXES_OK = 12,
    MSG_REGIONS = 13,
    MSG_REGIONS_OK = 14,
    MSG_WAIT = 15,
    MSG_WAIT_OK = 16,
    MSG_BEGIN = 17,
    MSG_BEGIN_OK = 18,
    MSG_READ = 19,
    MSG_READ_OK = 20, /* the body is the bytes asked for, raw */
    MSG_END = 21,
    MSG_END_OK = 22,
    MSG_WATCH = 23,
    MSG_EVENT = 24,
    MSG_PING = 25,
    MSG_PONG = 26,
    MSG_DIGEST = 27,
    MSG_DIGEST_OK = 28,
    MSG_STATS = 29,
    MSG_STATS_OK = 30,
    MSG_ERROR = 31,
    MSG_OFFER = 33,
    MSG_OFFER_OK = 34,
    MSG_HOLDERS = 35,
    MSG_HOLDERS_OK = 36,
    MSG_LANDED = 37,
    MSG_LANDED_OK = 38,
} message_type;

/** What a server makes of a message's type. */
typedef enum kind { KIND_REQUEST, KIND_REPLY, KIND_UNKNOWN } kind;

static inline kind message_kind(unsigned type)
{
    if (type == MSG_ERROR)
        return KIND_REPLY;
    if (type == MSG_AUTH || type == 0 || type == MSG_ERROR + 1 || type > MSG_LANDED_OK)
        return KIND_UNKNOWN;
    return type % 2 == 1 ? KIND_REQUEST : KIND_REPLY;
}

/* Largest bodies (bytes). */
#define LIMIT_BEFORE_HELLO 4096
#define LIMIT_REQUEST 65536
#define LIMIT_READ_REQUEST 131072
#define LIMIT_PAGE (1 << 20)            /**< of a blob in one reply */
#define LIMIT_REPLY (LIMIT_PAGE + 4096) /**< any reply but MSG_READ_OK */
#define LIMIT_READ_BYTES (4 << 20)      /**< that one read may ask for */
#define LIMIT_DIGEST_BYTES (256 << 20)  /**< that a digest may where wait_ok says so */
#define LIMIT_READ_ENTRIES 4096
#define LIMIT_METADATA (1 << 20)
#define LIMIT_KEYS (1 << 20)
#define LIMIT_NAMES (128 << 20)               /**< bytes of all names of a key table */
#define LIMIT_BOXES (1 << 22)                 /**< a rank */
#define LIMIT_KEY_RANGES 4096                 /**< of a request for boxes */
#define LIMIT_KEY_SET (10 * LIMIT_KEY_RANGES) /**< bytes of them */
#define LIMIT_PUBLICATIONS 4096
#define LIMIT_STATS                                                                    \
    64 /**< publications, and holders of leases, in a reply to MSG_STATS */
#define LIMIT_HOLDERS 4096       /**< of one list, and in a reply to MSG_HOLDERS */
#define LIMIT_LANDED_RANGES 4096 /**< in a reply to MSG_LANDED */
#define LIMIT_UCX_ADDRESS 4096
#define LIMIT_RKEY 1024

typedef struct frame {
    message_type type; /**< any uint16_t value may come from the network */
    uint64_t request;  /**< chosen by the requester, echoed in the reply */
    uint32_t length;   /**< of the body */
} frame;

void frame_encode(const frame *f, uint8_t out[FRAME_SIZE]);

/**
 * FANIN_ERR_PROTOCOL (magic, flags, reserved field) with a static sentence in *why_out;
 * FANIN_ERR_VERSION (another major). Does not judge type or length.
 */
fanin_status frame_decode(const uint8_t in[FRAME_SIZE], frame *out,
                          const char **why_out);

#define SEAL_SIZE 8 /**< behind the body; not counted in the header's length */

/** What a peer is told of whom a frame does not fit. */
#define SEAL_BROKEN "a checksum does not fit: what came is not what was sent"
/** What to look at then, and where TLS says the same. */
#define WAY_REMEDY                                                                     \
    "is a link, a switch or memory on the way faulty, or does somebody alter what "    \
    "passes?"

/** Bytes behind a body. */
static inline size_t seal_size(bool sealed)
{
    return sealed ? SEAL_SIZE : 0;
}

/** Fills in the reserved field of a header that is otherwise complete. */
void seal_header(uint8_t header[FRAME_SIZE]);
void seal_encode(uint64_t sum, uint8_t out[SEAL_SIZE]);

/** frame_decode() of a header that is @p sealed or not. FANIN_ERR_TRANSPORT: its checksum does not
    fit. */
fanin_status seal_decode(const uint8_t header[FRAME_SIZE], bool sealed, frame *out,
                         const char **why_out);
/** Whether the 8 bytes are those of this sum. */
bool seal_fits(uint64_t sum, const uint8_t in[SEAL_SIZE]);
/** Whether a frame of @p size bytes, with header and without seal, fits the seal behind it. */
bool seal_check(const uint8_t *frame, size_t size);

#endif
