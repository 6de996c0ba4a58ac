/* SPDX-License-Identifier: Apache-2.0 */
/** @file What an end and a connection are made of, for their own files. */
#ifndef TLS_INTERNAL_H
#define TLS_INTERNAL_H

#include "tls.h"
#include <errno.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

/*
 * How long a hello may be. OpenSSL makes room for as many bytes as the beginning of a message says
 * that it has, and takes hellos of 128 KiB; whoever says one has proven nothing. A hello that is
 * taken here is short, and one whole record.
 */

#define TLS_HELLO_MOST ((size_t)8 << 10)
/** As tls_why() says it. */
#define TLS_HELLO_ODD "its hello is in parts, or longer than 8 KiB"

/** Of a connection to a rank. Zeroed: nothing has come. */
typedef struct hello_guard {
    size_t left; /**< bytes of the record that has begun */
} hello_guard;

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
    /* After the handshake. */
    uint64_t records; /**< sent under the current key */
    size_t idle;      /**< encrypted bytes taken since there was data in them */
    bool more;        /**< the last receive ended for lack of room */
    bool by_kernel;   /**< it seals what is sent */
    bool within;      /**< OpenSSL, which opens what may take locks */
    bool asked;  /**< the other has changed its keys, and may want others of this end */
    int control; /**< the type of its next record, which is no data */
    bool to_relay; /**< a reader's: the other has to be one */
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
#define TLS_RECORD ((size_t)16 << 10) /**< plain bytes of a record at most */
#define RECORD_HANDSHAKE 22

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

size_t tls_left(const tls_bytes *b);

/** There is no memory. -1, with ENOMEM. */
static inline int tls_lack_memory(tls *t)
{
    t->why = "out of memory";
    t->fault = TLS_MEMORY;
    errno = ENOMEM;
    return -1;
}

#endif
