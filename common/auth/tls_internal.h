/* SPDX-License-Identifier: Apache-2.0 */
/** @file What an end and a connection are made of, for their own files. */
#ifndef TLS_INTERNAL_H
#define TLS_INTERNAL_H

#include "tls.h"
#include "tls_hello.h"
#include "tls_records.h"

#include <errno.h>

struct tls_end {
    const openssl *o;
    SSL_CTX *context; /**< with a secret */
    BIO_METHOD *method;
    bool is_rank;
    char *file;
    certificates *certificates; /**< NULL: there is a secret, and its keys: */
    uint8_t reader_key[KEY_SIZE];
    uint8_t key[KEY_SIZE]; /**< a rank's: its own; a reader's: the launch's root */
};

/** Bytes of a connection that wait: [used, size). */
typedef struct tls_bytes {
    uint8_t *data;
    size_t used, size, capacity;
} tls_bytes;

struct tls {
    const tls_end *end;
    SSL *ssl; /**< shakes hands, and exports keys afterwards */
    int fd;
    tls_bytes in, out; /**< encrypted: received and not taken; made and not sent */
    /* After the handshake. */
    record_keys seals, opens;
    tls_bytes left;               /**< plain, of a record of which a part was taken */
    uint8_t *small;               /**< where short runs of plain bytes come together */
    uint64_t written;             /**< plain bytes under the current key */
    unsigned idle;                /**< records since there was one with data */
    bool asked;                   /**< the other wants this end to change its keys */
    uint8_t secrets[2][KEY_SIZE]; /**< what it begins with: the reader's, the rank's */
    unsigned told;                /**< a bit for each */
    bool up, closed;
    hello_guard guard; /**< a rank's, until it is up */
    bool heard;        /**< something has come */
    bool unknown;      /**< the identity that a reader named */
    int sys_errno;     /**< of the socket */
    tls_fault fault;
    const char *why;
    char *found; /**< TLS_NAMES bytes, once the other's certificate was refused */
};

#define TLS_NAMES 200

/* Index of the tls among an SSL's data. */
#define TLS_DATA 0

/** Settings that all connections have. NULL: OpenSSL does not do that, or there is no memory.
    Within OpenSSL. */
SSL_CTX *tls_context_new(const openssl *o);
/** The error of it, or of keys: what openssl_fault() says. */
fanin_status tls_no_context(const openssl *o, fanin_error *error);
/** NULL is fine. */
void tls_context_free(const openssl *o, SSL_CTX *context);

/** What moves an SSL's bytes between its tls's buffers and its socket. NULL: no memory. */
BIO_METHOD *tls_method_new(const openssl *o);

/** Room for @p more bytes behind those that are there. False: no memory. */
bool tls_reserve(tls_bytes *b, size_t more);
size_t tls_left(const tls_bytes *b);
/** Receives once, behind what is there, with room for @p need bytes in all at least: more than 0, 0
    at the end, -1 with t->sys_errno. */
ssize_t tls_refill(tls *t, size_t need);

/** OpenSSL's number of an alert's reason, less the alert's. */
#define TLS_REASON_ALERT 1000
#define LIBRARY_SSL (20ul << 23) /* of OpenSSL's numbers of errors */
/** internal_error: who says it cannot go on. */
#define TLS_ALERT_INTERNAL 80

/** Why it failed, by OpenSSL's number of it; what is known already stays, but for a lack of memory:
    what else
    went wrong may follow from that. */
void tls_fail(tls *t, unsigned long code);
/** There is no memory. -1, with ENOMEM. */
static inline int tls_lack_memory(tls *t)
{
    t->why = "out of memory";
    t->fault = TLS_MEMORY;
    errno = ENOMEM;
    return -1;
}
/** From now on records are sealed and opened here, by the secrets that the handshake made. False:
    tls_failed(). */
bool tls_records_begin(tls *t);

#endif
