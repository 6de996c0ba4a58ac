/* SPDX-License-Identifier: Apache-2.0 */
#include "secret_file.h"
#include "digest.h"
#include "own_file.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* -------------------------------------------------------------------- launch keys */

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

void relay_identity(const uint8_t world_id[16], const uint8_t incarnation[16],
                    char out[IDENTITY_MOST])
{
    char world[33], id[33];
    digest_hex(world_id, world);
    digest_hex(incarnation, id);
    snprintf(out, IDENTITY_MOST, "fanin/1/relay/%s/%s", world, id);
}

bool launch_key(const openssl *o, const uint8_t root[KEY_SIZE], const char *identity,
                uint8_t out[KEY_SIZE])
{
    return hkdf_expand(o, root, identity, strlen(identity), out, KEY_SIZE);
}

/* -------------------------------------------------------------------- secret file */

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

static bool secret_file_parse(const uint8_t *text, size_t size,
                              uint8_t out[SECRET_SIZE])
{
    if ((size == HEX_SIZE + 1 || size == SECRET_SIZE + 1) && text[size - 1] == '\n')
        size--;
    if (size == SECRET_SIZE) {
        memcpy(out, text, SECRET_SIZE);
        return true;
    }
    return size == HEX_SIZE && hex_read((const char *)text, out, SECRET_SIZE);
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
