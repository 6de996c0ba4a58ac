/* SPDX-License-Identifier: Apache-2.0 */
#include "digest.h"
#include "digest_library.h"

#include <errno.h>
#include <string.h>
#include <sys/random.h>

static digest canonical(XXH128_hash_t hash)
{
    XXH128_canonical_t canonical;
    XXH128_canonicalFromHash(&canonical, hash);
    digest d;
    memcpy(d.bytes, canonical.digest, sizeof d.bytes);
    return d;
}

digest digest_of(const void *data, size_t size)
{
    return canonical(XXH3_128bits(data, size));
}

digest digest_of_words(uint64_t low, uint64_t high)
{
    return canonical((XXH128_hash_t){.low64 = low, .high64 = high});
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
