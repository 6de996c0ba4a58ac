/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file
 * How long a hello may be. OpenSSL makes room for as many bytes as the beginning of a message says
 * that it has, and takes hellos of 128 KiB; whoever says one has proven nothing. A hello that is
 * taken here is short, and one whole record.
 */
#ifndef TLS_HELLO_H
#define TLS_HELLO_H

#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#define TLS_HELLO_MOST ((size_t)8 << 10)
/** As tls_why() says it. */
#define TLS_HELLO_ODD "its hello is in parts, or longer than 8 KiB"

/** Of a connection to a rank. Zeroed: nothing has come. */
typedef struct hello_guard {
    size_t left; /**< bytes of the record that has begun */
} hello_guard;

/** How many of the @p size bytes that have come next may go on to OpenSSL; 0: not before more have
    come; -1: never. Whoever passes them on takes them from g->left. */
ssize_t hello_guard_pass(hello_guard *g, const uint8_t *data, size_t size);

#endif
