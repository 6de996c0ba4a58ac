/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file
 * Records of TLS 1.3 (RFC 8446, 5) after the handshake, sealed and opened from and to where the
 * bytes lie: OpenSSL's own layer copies each byte once more at either end. The ciphers are
 * OpenSSL's; so is the handshake, which says the secrets.
 */
#ifndef TLS_RECORDS_H
#define TLS_RECORDS_H

#include "launch_keys.h"

#define RECORD_HEADER ((size_t)5)        /**< type, version, length */
#define RECORD_PLAIN ((size_t)16 << 10)  /**< content at most */
#define RECORD_ADDS ((size_t)17)         /**< to content: its type, and the tag */
#define RECORD_BODY (RECORD_PLAIN + 256) /**< at most, of any sender */

/** What a record holds. */
typedef enum record_type {
    RECORD_ALERT = 21,
    RECORD_HANDSHAKE = 22,
    RECORD_DATA = 23,
} record_type;

/** The keys of one direction. Zeros: none. */
typedef struct record_keys {
    const openssl *o;
    EVP_CIPHER_CTX *cipher;
    bool seals;
    uint16_t suite; /**< TLS's number of it */
    uint8_t secret
        [KEY_SIZE]; /**< the direction's traffic secret; the next is derived from it */
    uint8_t iv[12];
    uint64_t number; /**< of the next record */
} record_keys;

/** From a traffic secret of the suite TLS_AES_128_GCM_SHA256 or TLS_CHACHA20_POLY1305_SHA256; @p k
    has none yet. False: another suite, or no memory; record_keys_wipe() all the same. */
bool record_keys_set(record_keys *k, const openssl *o, bool seals, uint16_t suite,
                     const uint8_t secret[KEY_SIZE]);
/** As after a KeyUpdate (RFC 8446, 7.2). False: no memory; the keys are of no use. */
bool record_keys_next(record_keys *k);
void record_keys_wipe(record_keys *k);

/** Writes a record of @p size bytes, RECORD_PLAIN at most, to @p out, which has room for
    RECORD_HEADER and RECORD_ADDS bytes more. Returns its size; 0: no memory. */
size_t record_seal(record_keys *k, record_type type, const void *data, size_t size,
                   uint8_t *out);

/** The body's size, by the header; 0: nothing that may come inside. */
size_t record_body(const uint8_t header[RECORD_HEADER]);

/** What was in a record. */
typedef struct record_found {
    uint8_t type; /**< a record_type, or what else the other says */
    size_t size;  /**< of the content */
    size_t here;  /**< bytes of it in @p to, the rest is in @p rest */
} record_found;

/** Opens a whole record, whose body is @p body bytes as record_body() says: as much as there is
    room for into @p to, and what is left into @p rest, of @p body bytes. Up to @p room bytes of @p
    to may be written beyond the content. False: it is not what was sealed, and @p to and @p rest
    hold zeros; or nothing but padding. */
bool record_open(record_keys *k, const uint8_t *record, size_t body, void *to,
                 size_t room, uint8_t *rest, record_found *out);

#endif
