/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file
 * A rank that lies: it speaks the protocol correctly, as rank 0 of a world of one that
 * publishes one tensor, except for the one thing that a test asks it to do wrong.
 */
#ifndef FAKE_SERVER_H
#define FAKE_SERVER_H

#include "array.h"
#include "digest.h"
#include <pthread.h>
#include <stdatomic.h>

#define FAKE_ROWS 64
#define FAKE_COLUMNS 64
#define FAKE_BYTES (FAKE_ROWS * FAKE_COLUMNS * 4)
#define FAKE_NAME "matrix"

typedef enum mischief {
    HONEST,
    HONEST_BYTE_BY_BYTE, /**< right, but in segments of one byte */
    HONEST_SMALL_PAGES,  /**< right, but tables in pages of one byte */
    HONEST_AT_LIMIT,     /**< right, but the first read is one too many */

    /* before the hello is answered */
    ACCEPT_CLOSE,
    ACCEPT_SILENT,
    ACCEPT_GARBAGE,
    ACCEPT_HTTP,
    HELLO_MAGIC,
    HELLO_MAJOR,
    HELLO_HUGE_LENGTH,
    HELLO_NEVER_ENDS, /**< one byte of it after the other, too slowly */
    HELLO_GARBAGE,
    HELLO_BOMB, /**< announces an array of 2^32 - 1 elements */
    HELLO_OTHER_TYPE,
    HELLO_ERROR,
    HELLO_RANK,
    HELLO_WORLD_SIZE,
    HELLO_NO_WORLD, /**< a world id of zeros */
    HELLO_VERSION,
    HELLO_CLOSE,

    /* instead of an announcement */
    WAIT_OTHER_TYPE,
    WAIT_OTHER_REQUEST,
    WAIT_GARBAGE,
    WAIT_LATER_STEP,   /**< than was asked for: superseded, or so it says */
    WAIT_EARLIER_STEP, /**< than was asked for, which no rank may answer */
    WAIT_UNASKED_FLOOD,
    WAIT_SILENT,
    WAIT_CLOSE,

    /* instead of a catalog */
    KEYS_OTHER_DIGEST,
    KEYS_GARBAGE,
    KEYS_HUGE_COUNT,
    KEYS_HUGE_TOTAL,
    KEYS_OFFSET,
    KEYS_EMPTY_PAGE,
    KEYS_BEYOND_TOTAL,
    KEYS_ERROR,
    KEYS_STALE, /**< after megabytes of it, again and again */
    KEYS_CLOSE,
    BOXES_GARBAGE,
    BOXES_HUGE_COUNT,
    BOXES_HUGE_TOTAL,
    BOXES_OUTSIDE,
    BOXES_OTHER_KEY,
    BOXES_HOLE,
    BOXES_OVERLAP,
    BOXES_STALE, /**< "the catalog has changed", for ever */
    BOXES_CLOSE,

    /* instead of a lease, bytes and a confirmation */
    BEGIN_REFUSED, /**< for ever */
    BEGIN_GARBAGE,
    REGIONS_GONE, /**< offers cuda_ipc, and has lost the publication when asked for regions */
    BEGIN_CLOSE,
    DATA_GARBAGE,
    DATA_DIGESTS, /**< as the answer to a hello */
    DATA_SILENT,
    DATA_UNASKED,
    READ_SHORT,
    READ_LONG,
    READ_OTHER_REQUEST,
    READ_OTHER_TYPE,
    READ_ERROR,
    READ_LIMIT, /**< one too many, for ever */
    READ_SILENT,
    READ_CLOSE,
    READ_CLOSE_IN_BODY,
    END_NOT_GOOD, /**< for ever */
    END_GARBAGE,
    END_CLOSE,
    N_MISCHIEFS
} mischief;

typedef struct fake_connection fake_connection;

typedef struct fake_server {
    char address[32];
    mischief mischief;
    pthread_t thread;
    int listener, wake;
    bool at_limit; /**< a read has been refused */
    fake_connection *connections;
    uint8_t bytes[FAKE_BYTES];
    buffer keys, boxes;
    digest key_digest;
} fake_server;

/** Listens on a free port of 127.0.0.1. Fails the test. */
void fake_server_start(fake_server *f, mischief mischief);
void fake_server_stop(fake_server *f);

#endif
