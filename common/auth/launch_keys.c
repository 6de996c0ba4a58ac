/* SPDX-License-Identifier: Apache-2.0 */
#include "launch_keys.h"
#include "digest.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#define SALT "fanin/1"
#define INFO_MOST 256

bool hmac_sha256(const openssl *o, const uint8_t *key, size_t key_size,
                 const void *data, size_t size, uint8_t out[KEY_SIZE])
{
    unsigned int made = 0;
    return o->HMAC(o->EVP_sha256(), key, (int)key_size, data, size, out, &made) &&
           made == KEY_SIZE;
}

bool hkdf_extract(const openssl *o, const void *salt, size_t salt_size,
                  const uint8_t *secret, size_t size, uint8_t out[KEY_SIZE])
{
    return hmac_sha256(o, salt, salt_size, secret, size, out);
}

bool hkdf_expand(const openssl *o, const uint8_t root[KEY_SIZE], const void *info,
                 size_t info_size, uint8_t *out, size_t size)
{
    uint8_t text[KEY_SIZE + INFO_MOST + 1], block[KEY_SIZE] = {0};
    size_t before = 0; /* bytes of the block before, which begins each but the first */
    bool good = info_size <= INFO_MOST && size <= 255 * (size_t)KEY_SIZE;
    for (unsigned i = 1; good && size > 0; i++) {
        memcpy(text, block, before);
        memcpy(text + before, info, info_size);
        text[before + info_size] = (uint8_t)i;
        good = hmac_sha256(o, root, KEY_SIZE, text, before + info_size + 1, block);
        size_t step = size < KEY_SIZE ? size : KEY_SIZE;
        memcpy(out, block, good ? step : 0);
        out += step;
        size -= step;
        before = KEY_SIZE;
    }
    explicit_bzero(text, sizeof text);
    explicit_bzero(block, sizeof block);
    return good;
}

bool launch_root(const openssl *o, const uint8_t secret[SECRET_SIZE],
                 uint8_t out[KEY_SIZE])
{
    return hkdf_extract(o, SALT, sizeof SALT - 1, secret, SECRET_SIZE, out);
}

void rank_identity(const uint8_t world_id[16], uint32_t rank, char out[IDENTITY_MOST])
{
    char hex[33];
    digest_hex(world_id, hex);
    snprintf(out, IDENTITY_MOST, "fanin/1/rank/%s/%" PRIu32, hex, rank);
}

bool launch_key(const openssl *o, const uint8_t root[KEY_SIZE], const char *identity,
                uint8_t out[KEY_SIZE])
{
    return hkdf_expand(o, root, identity, strlen(identity), out, KEY_SIZE);
}
