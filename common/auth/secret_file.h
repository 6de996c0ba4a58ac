/* SPDX-License-Identifier: Apache-2.0 */
/** @file The file with a launch's secret: its rules, and reading it. */
#ifndef SECRET_FILE_H
#define SECRET_FILE_H

#include "openssl.h"
#include <fanin/error.h>

#define SECRET_SIZE 32
#define SECRET_ENV "FANIN_SECRET_FILE"

/** What a configuration's secret_file means: NULL the environment's FANIN_SECRET_FILE, "" none.
    NULL: there is no secret. */
const char *secret_file_of(const char *configured);

/**
 * Reads 64 hexadecimal digits or 32 bytes, with at most one newline behind. The file, to which
 * symbolic links may lead, belongs to this process's user or to root; others may do nothing with
 * it, and its group may read it only if it is root's. Blocks as reading a file does, never on a
 * pipe. FANIN_ERR_NOT_FOUND: there is no such file. FANIN_ERR_AUTH: owner or mode.
 * FANIN_ERR_ARGUMENT: it holds something else, or one byte 32 times. FANIN_ERR_IO. All name the
 * file and what to do; none tells anything of what it holds.
 */
fanin_status secret_file_read(const char *path, uint8_t out[SECRET_SIZE],
                              fanin_error *error);

/*
 * Keys out of a launch's secret, by HKDF with SHA-256 (RFC 5869; PROTOCOL.md, "Secured
 * connections"). Who has a derived key learns nothing of the secret, nor of another key.
 */

#define KEY_SIZE 32
/** The TLS identity of whoever reads. */
#define IDENTITY_READER "fanin/1/reader"
#define IDENTITY_MOST 96

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
/** "fanin/1/relay/<world id in hex>/<incarnation in hex>" */
void relay_identity(const uint8_t world_id[16], const uint8_t incarnation[16],
                    char out[IDENTITY_MOST]);
/** The key of an identity. */
bool launch_key(const openssl *o, const uint8_t root[KEY_SIZE], const char *identity,
                uint8_t out[KEY_SIZE]);

#endif
