/* SPDX-License-Identifier: Apache-2.0 */
/** @file Secrets and certificates, for tests. */
#ifndef SECRETS_H
#define SECRETS_H

#include "tls.h"

/** A file of 64 digits, the last of them @p digit, in a folder of its own; fails the test. The path
    is the process's; secrets_remove() removes all. */
const char *secret_of(char digit);
void secrets_remove(void);
int secrets_tear_down(void **state); /**< the same, of a group of tests */

/** A rank's, by the secret in @p file. */
fanin_status tls_end_of_rank(const char *file, const uint8_t world_id[16],
                             uint32_t rank, tls_end **out, fanin_error *error);

/** Says as TAP that a program's tests are skipped, and why; false: there is OpenSSL 3. */
bool openssl_is_missing(void);

/** By certificates of one job that the command openssl makes anew: out[0] is the end of rank @p
    rank, 0 or 3, out[1] a reader's. False: there is no such command, or no OpenSSL 3; fails the
    test if it goes wrong otherwise. */
bool certified_ends_of(uint32_t rank, tls_end *out[2]);

#endif
