/* SPDX-License-Identifier: Apache-2.0 */
#include "tls_hello.h"

#include <stdbool.h>

#define RECORD_HEADER 5
#define RECORD_HANDSHAKE 22
#define CLIENT_HELLO 1
#define MESSAGE_HEADER 4

static size_t tls_hello_number(const uint8_t *at, unsigned bytes)
{
    size_t value = 0;
    while (bytes-- > 0)
        value = value << 8 | *at++;
    return value;
}

static bool is_short_hello(const uint8_t *message, size_t record)
{
    return message[0] == CLIENT_HELLO && record <= TLS_HELLO_MOST &&
           record == MESSAGE_HEADER + tls_hello_number(message + 1, 3);
}

ssize_t hello_guard_pass(hello_guard *g, const uint8_t *data, size_t size)
{
    if (g->left == 0) {
        if (size < RECORD_HEADER)
            return 0;
        size_t record = tls_hello_number(data + 3, 2);
        if (data[0] == RECORD_HANDSHAKE) {
            if (size < RECORD_HEADER + MESSAGE_HEADER)
                return 0;
            if (!is_short_hello(data + RECORD_HEADER, record))
                return -1;
        }
        g->left = RECORD_HEADER + record;
    }
    return (ssize_t)(size < g->left ? size : g->left);
}
