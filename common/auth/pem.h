/* SPDX-License-Identifier: Apache-2.0 */
/** @file Certificates and keys out of PEM files into an SSL_CTX, and whose they are. */
#ifndef PEM_H
#define PEM_H

#include "identity.h"
#include "openssl.h"

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
