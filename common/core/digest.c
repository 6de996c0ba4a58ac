/* SPDX-License-Identifier: Apache-2.0 */
#include "digest.h"
#include "digest_library.h"

#include <errno.h>
#include <string.h>
#include <sys/random.h>

digest digest_of(const void *data, size_t size)
{
    XXH128_canonical_t canonical;
    XXH128_canonicalFromHash(&canonical, XXH3_128bits(data, size));
    digest d;
    memcpy(d.bytes, canonical.digest, sizeof d.bytes);
    return d;
}

bool digest_equal(const digest *a, const digest *b)
{
    return memcmp(a->bytes, b->bytes, sizeof a->bytes) == 0;
}

void digest_hex(const uint8_t bytes[16], char out[33])
{
    static const char digits[] = "0123456789abcdef";
    for (int i = 0; i < 16; i++) {
        out[2 * i] = digits[bytes[i] >> 4];
        out[2 * i + 1] = digits[bytes[i] & 15];
    }
    out[32] = '\0';
}

static int hex_value(char c)
{
    if (c >= '0' && c <= '9')
        return c - '0';
    if (c >= 'a' && c <= 'f')
        return c - 'a' + 10;
    if (c >= 'A' && c <= 'F')
        return c - 'A' + 10;
    return -1;
}

bool digest_from_hex(const char *hex, uint8_t out[16])
{
    if (!hex || strlen(hex) != 32)
        return false;
    uint8_t bytes[16];
    for (int i = 0; i < 16; i++) {
        int high = hex_value(hex[2 * i]), low = hex_value(hex[2 * i + 1]);
        if (high < 0 || low < 0)
            return false;
        bytes[i] = (uint8_t)(high << 4 | low);
    }
    memcpy(out, bytes, sizeof bytes);
    return true;
}

bool random_bytes(void *out, size_t size)
{
    uint8_t *at = out;
    while (size) {
        ssize_t got = getrandom(at, size, 0);
        if (got < 0 && errno == EINTR)
            continue;
        if (got <= 0)
            return false;
        at += got;
        size -= (size_t)got;
    }
    return true;
}
