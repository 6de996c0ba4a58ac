/* SPDX-License-Identifier: Apache-2.0 */
/** @file Certificates and keys out of PEM files into an SSL_CTX, and whose they are. */
#ifndef PEM_H
#define PEM_H

#include "openssl.h"
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/*
 * Who a certificate is for: a URI among its subject's alternative names, "fanin://JOB/reader",
 * "fanin://JOB/rank/N", or with a star for N, any rank of the job, or "fanin://JOB/relay/NAME"
 * (PROTOCOL.md, "Secured connections"). JOB and NAME: 1 to 64 of A-Z a-z 0-9 . _ -
 */

#define JOB_MOST 64
/** The longest, with its NUL. */
#define IDENTITY_URI_MOST (sizeof "fanin:///rank/4294967295" + JOB_MOST)

typedef enum identity_role {
    AS_READER,
    AS_RANK,
    AS_ANY_RANK,
    AS_RELAY, /**< whatever its name */
} identity_role;

typedef struct identity {
    char job[JOB_MOST + 1];
    identity_role role;
    uint32_t rank; /**< of AS_RANK */
} identity;

/** False: it is none; *@p out holds nothing then. */
bool identity_parse(const char *text, size_t size, identity *out);
void identity_text(const identity *id, char out[IDENTITY_URI_MOST]);

/** Whether who has @p has may act as @p wanted: the same, or any rank for a rank. AS_ANY_RANK
    wanted: whatever rank it is. Relays are alike. */
bool identity_suffices(const identity *has, const identity *wanted);

/** The certificate and what follows it in the file. @p is: the role that it must name, of this job,
    or, if that is empty, of one job, which is put there. Errors: as certificates_new() has them. */
fanin_status pem_use_certificate(const openssl *o, SSL_CTX *context, const char *path,
                                 identity *is, fanin_error *error);
/** The key of the certificate @p cert, which was used before. */
fanin_status pem_use_key(const openssl *o, SSL_CTX *context, const char *path,
                         const char *cert, fanin_error *error);
fanin_status pem_use_authorities(const openssl *o, SSL_CTX *context, const char *path,
                                 fanin_error *error);

/** Whether one of its names suffices for @p wanted. */
bool pem_is_for(const openssl *o, const X509 *cert, const identity *wanted);
/** Its URIs for people: quoted, cut to what fits; "nobody" if it has none. Of what is no fanin URI:
    what
    may be printed. */
void pem_names(const openssl *o, const X509 *cert, char *out, size_t room);

#endif
