/* SPDX-License-Identifier: Apache-2.0 */
/** @file By what an end proves who it is over TCP: a launch's secret, certificates, or nothing. */
#ifndef CREDENTIALS_H
#define CREDENTIALS_H

#include "tls.h"

#define CERT_ENV "FANIN_TLS_CERT"
#define KEY_ENV "FANIN_TLS_KEY"
#define CA_ENV "FANIN_TLS_CA"

/** As configurations have it: of each, NULL: what the environment names, "": none. What they name
    goes before the environment's, of either kind. */
typedef struct credentials {
    const char *secret;
    certificate_files tls;
} credentials;

/** A rank's end, *@p out NULL without credentials. tls_end_by_secret()'s errors,
    certificates_new()'s, and FANIN_ERR_ARGUMENT: both kinds; a certificate without key or
    authorities. */
fanin_status credentials_of_rank(const credentials *configured,
                                 const uint8_t world_id[16], uint32_t rank,
                                 const logger *log, tls_end **out, fanin_error *error);
/** The same for a relay, by its incarnation. */
fanin_status credentials_of_relay(const credentials *configured,
                                  const uint8_t world_id[16],
                                  const uint8_t incarnation[16], const logger *log,
                                  tls_end **out, fanin_error *error);
/** The same for a reader. */
fanin_status credentials_of_reader(const credentials *configured, const logger *log,
                                   tls_end **out, fanin_error *error);

#endif
