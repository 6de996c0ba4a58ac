/* SPDX-License-Identifier: Apache-2.0 */
#include "tls_records.h"

#include <stdio.h>
#include <string.h>

#define TAG ((size_t)16)
/* OpenSSL's numbers. */
#define CTRL_GET_TAG 0x10
#define CTRL_SET_TAG 0x11

/* HKDF-Expand-Label (RFC 8446, 7.1) with no context. */
static bool expand_label(const openssl *o, const uint8_t secret[KEY_SIZE],
                         const char *label, uint8_t *out, size_t size)
{
    char info[32] = {0, (char)size}; /* both lengths are short */
    int all = snprintf(info + 3, sizeof info - 4, "tls13 %s", label);
    info[2] = (char)all;
    return hkdf_expand(o, secret, info, 3 + (size_t)all + 1, out, size);
}

static const EVP_CIPHER *cipher_of(const openssl *o, uint16_t suite, size_t *key_size)
{
    *key_size = suite == SUITE_AES_128_GCM ? 16 : 32;
    return suite == SUITE_AES_128_GCM         ? o->EVP_aes_128_gcm()
           : suite == SUITE_CHACHA20_POLY1305 ? o->EVP_chacha20_poly1305()
                                              : NULL;
}

/* By the secret that is there. */
static bool use_secret(record_keys *k)
{
    uint8_t key[KEY_SIZE];
    size_t size;
    const EVP_CIPHER *cipher = cipher_of(k->o, k->suite, &size);
    bool good =
        cipher && k->cipher && expand_label(k->o, k->secret, "key", key, size) &&
        expand_label(k->o, k->secret, "iv", k->iv, sizeof k->iv) &&
        k->o->EVP_CipherInit_ex(k->cipher, cipher, NULL, key, NULL, k->seals) == 1;
    explicit_bzero(key, sizeof key);
    k->number = 0;
    return good;
}

bool record_keys_set(record_keys *k, const openssl *o, bool seals, uint16_t suite,
                     const uint8_t secret[KEY_SIZE])
{
    k->o = o;
    k->seals = seals;
    k->suite = suite;
    k->cipher = o->EVP_CIPHER_CTX_new();
    memcpy(k->secret, secret, KEY_SIZE);
    return use_secret(k);
}

bool record_keys_next(record_keys *k)
{
    uint8_t next[KEY_SIZE];
    openssl_enter(k->o);
    bool good = expand_label(k->o, k->secret, "traffic upd", next, sizeof next);
    memcpy(k->secret, next, sizeof next);
    explicit_bzero(next, sizeof next);
    good = good && use_secret(k);
    openssl_leave();
    return good;
}

void record_keys_wipe(record_keys *k)
{
    if (k->cipher)
        k->o->EVP_CIPHER_CTX_free(k->cipher); /* wipes its keys */
    explicit_bzero(k, sizeof *k);
}

/* Each record has a nonce of its own, and its header is proven with it. */
static bool start(record_keys *k, const uint8_t header[RECORD_HEADER])
{
    uint8_t nonce[sizeof k->iv];
    int n;
    memcpy(nonce, k->iv, sizeof nonce);
    for (int i = 0; i < 8; i++)
        nonce[sizeof nonce - 1 - (size_t)i] ^= (uint8_t)(k->number >> 8 * i);
    k->number++; /* 2^64 are never reached: keys change before */
    return k->o->EVP_CipherInit_ex(k->cipher, NULL, NULL, NULL, nonce, -1) == 1 &&
           k->o->EVP_CipherUpdate(k->cipher, NULL, &n, header, (int)RECORD_HEADER) == 1;
}

static bool update(record_keys *k, uint8_t *to, const uint8_t *from, size_t size)
{
    int n = 0;
    return size == 0 ||
           (k->o->EVP_CipherUpdate(k->cipher, to, &n, from, (int)size) == 1 &&
            (size_t)n == size);
}

size_t record_seal(record_keys *k, record_type type, const void *data, size_t size,
                   uint8_t *out)
{
    size_t body = size + RECORD_ADDS;
    uint8_t inner = (uint8_t)type, *tag = out + RECORD_HEADER + size + 1;
    int n;
    const uint8_t header[RECORD_HEADER] = {RECORD_DATA, 3, 3, (uint8_t)(body >> 8),
                                           (uint8_t)body};
    memcpy(out, header, sizeof header);
    bool good = start(k, header) && update(k, out + RECORD_HEADER, data, size) &&
                update(k, tag - 1, &inner, 1) &&
                k->o->EVP_CipherFinal_ex(k->cipher, tag, &n) == 1 &&
                k->o->EVP_CIPHER_CTX_ctrl(k->cipher, CTRL_GET_TAG, (int)TAG, tag) == 1;
    return good ? RECORD_HEADER + body : 0;
}

size_t record_body(const uint8_t header[RECORD_HEADER])
{
    size_t size = (size_t)header[3] << 8 | header[4];
    return header[0] == RECORD_DATA && size > TAG && size <= RECORD_BODY ? size : 0;
}

/* Behind the content come its type, not 0, and any number of zeros. */
static bool find_type(const uint8_t *to, size_t here, const uint8_t *rest, size_t left,
                      record_found *out)
{
    size_t i = here + left;
    uint8_t last = 0;
    while (i > 0 && last == 0) {
        i--;
        last = i < here ? to[i] : rest[i - here];
    }
    *out = (record_found){last, i, i < here ? i : here};
    return last != 0 && i <= RECORD_PLAIN;
}

bool record_open(record_keys *k, const uint8_t *record, size_t body, void *to,
                 size_t room, uint8_t *rest, record_found *out)
{
    const uint8_t *sealed = record + RECORD_HEADER;
    size_t size = body - TAG, here = size < room ? size : room;
    uint8_t tag[TAG], nothing[TAG];
    int n;
    memcpy(tag, sealed + size, TAG);
    bool good =
        start(k, record) && update(k, to, sealed, here) &&
        update(k, rest, sealed + here, size - here) &&
        k->o->EVP_CIPHER_CTX_ctrl(k->cipher, CTRL_SET_TAG, (int)TAG, tag) == 1 &&
        k->o->EVP_CipherFinal_ex(k->cipher, nothing, &n) == 1;
    if (good)
        return find_type(to, here, rest, size - here, out);
    memset(to, 0, here); /* whoever is between chose it */
    memset(rest, 0, size - here);
    return false;
}
