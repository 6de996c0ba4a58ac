/* SPDX-License-Identifier: Apache-2.0 */
#include "secret_file.h"
#include "own_file.h"

#include <stdlib.h>
#include <string.h>

#define HEX_SIZE ((size_t)2 * SECRET_SIZE)
#define MOST (HEX_SIZE + 1) /* the newline */

const char *secret_file_of(const char *configured)
{
    const char *path = configured ? configured : getenv(SECRET_ENV);
    return path && path[0] ? path : NULL;
}

static const own_file_rules rules = {
    .what = "secret file",
    .phase = "secret",
    .is_private = true,
    .make = "make one: nixl-fetch secret FILE",
    .leaked = "secret",
};

/* -1: it is no digit. */
static int hex_value(uint8_t c)
{
    if (c >= '0' && c <= '9')
        return c - '0';
    if (c >= 'a' && c <= 'f')
        return c - 'a' + 10;
    return c >= 'A' && c <= 'F' ? c - 'A' + 10 : -1;
}

bool secret_of_hex(const char *text, uint8_t out[SECRET_SIZE])
{
    for (size_t i = 0; i < SECRET_SIZE; i++) {
        int high = hex_value((uint8_t)text[2 * i]);
        int low = high < 0 ? -1 : hex_value((uint8_t)text[2 * i + 1]);
        if (low < 0)
            return false;
        out[i] = (uint8_t)(high << 4 | low);
    }
    return true;
}

static bool secret_file_parse(const uint8_t *text, size_t size,
                              uint8_t out[SECRET_SIZE])
{
    if ((size == HEX_SIZE + 1 || size == SECRET_SIZE + 1) && text[size - 1] == '\n')
        size--;
    if (size == SECRET_SIZE) {
        memcpy(out, text, SECRET_SIZE);
        return true;
    }
    return size == HEX_SIZE && secret_of_hex((const char *)text, out);
}

/* As an unset variable or an empty disk leaves it. */
static bool is_one_byte(const uint8_t secret[SECRET_SIZE])
{
    size_t same = 1;
    while (same < SECRET_SIZE && secret[same] == secret[0])
        same++;
    return same == SECRET_SIZE;
}

fanin_status secret_file_read(const char *path, uint8_t out[SECRET_SIZE],
                              fanin_error *error)
{
    uint8_t text[MOST + 1];
    size_t size = 0;
    fanin_status status = own_file_read(&rules, path, text, sizeof text, &size, error);
    if (status == FANIN_OK && !secret_file_parse(text, size, out))
        status = own_file_refuse(&rules, path, FANIN_ERR_ARGUMENT,
                                 "holds neither 64 hexadecimal digits nor 32 bytes",
                                 rules.make, error);
    if (status == FANIN_OK && is_one_byte(out)) {
        status = own_file_refuse(&rules, path, FANIN_ERR_ARGUMENT,
                                 "holds one byte 32 times, which anybody can guess",
                                 rules.make, error);
        explicit_bzero(out, SECRET_SIZE);
    }
    explicit_bzero(text, sizeof text);
    return status;
}
