/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file
 * Keys out of a launch's secret, by HKDF with SHA-256 (RFC 5869; PROTOCOL.md, "Secured
 * connections"). Who has a derived key learns nothing of the secret, nor of another key.
 */
#ifndef LAUNCH_KEYS_H
#define LAUNCH_KEYS_H

#include "openssl.h"
#include "secret_file.h"

#define KEY_SIZE 32
/** The TLS identity of whoever reads. */
#define IDENTITY_READER "fanin/1/reader"
#define IDENTITY_MOST 64

/** HMAC-SHA256. False: OpenSSL fails. */
bool hmac_sha256(const openssl *o, const uint8_t *key, size_t key_size,
                 const void *data, size_t size, uint8_t out[KEY_SIZE]);
/** HKDF's two halves; @p size is at most 255 * 32. */
bool hkdf_extract(const openssl *o, const void *salt, size_t salt_size,
                  const uint8_t *secret, size_t size, uint8_t out[KEY_SIZE]);
bool hkdf_expand(const openssl *o, const uint8_t root[KEY_SIZE], const void *info,
                 size_t info_size, uint8_t *out, size_t size);

/** What all of a launch's keys are derived from. */
bool launch_root(const openssl *o, const uint8_t secret[SECRET_SIZE],
                 uint8_t out[KEY_SIZE]);
/** "fanin/1/rank/<world id in hex>/<rank>" */
void rank_identity(const uint8_t world_id[16], uint32_t rank, char out[IDENTITY_MOST]);
/** The key of an identity. */
bool launch_key(const openssl *o, const uint8_t root[KEY_SIZE], const char *identity,
                uint8_t out[KEY_SIZE]);

#endif
