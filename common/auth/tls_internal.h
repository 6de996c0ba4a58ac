/* SPDX-License-Identifier: Apache-2.0 */
/** @file What an end and a connection are made of, for their own files. */
#ifndef TLS_INTERNAL_H
#define TLS_INTERNAL_H

#include "tls.h"

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
    SSL *ssl;
    int fd;
    tls_bytes in, out; /**< encrypted: received and not taken; made and not sent */
    uint8_t *small;    /**< where short runs of plain bytes come together */
    uint64_t written;  /**< plain bytes under the current key */
    bool up, closed;
    bool heard;    /**< something has come */
    bool unknown;  /**< the identity that a reader named */
    int sys_errno; /**< of the socket */
    tls_fault fault;
    const char *why;
    char *found; /**< TLS_NAMES bytes, once the other's certificate was refused */
};

#define TLS_NAMES 200

/* Index of the tls among an SSL's data. */
#define TLS_DATA 0

/** Settings that all connections have. NULL: OpenSSL does not do that, or there is no memory. */
SSL_CTX *tls_context_new(const openssl *o);
/** The error of it. */
fanin_status tls_no_context(const openssl *o, fanin_error *error);

/** What moves an SSL's bytes between its tls's buffers and its socket. NULL: no memory. */
BIO_METHOD *tls_method_new(const openssl *o);

#endif
