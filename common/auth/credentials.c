/* SPDX-License-Identifier: Apache-2.0 */
#include "credentials.h"
#include "error_set.h"

#include <stdlib.h>

static const char *given(const char *text)
{
    return text && text[0] ? text : NULL;
}

static bool names_files(const certificate_files *f)
{
    return given(f->cert) || given(f->key) || given(f->ca);
}

static const char *or_environment(const char *configured, const char *name)
{
    return given(configured ? configured : getenv(name));
}

static fanin_status credentials_refuse(fanin_error *error, const char *what,
                                       const char *remedy)
{
    const error_place place = {.phase = "certificate", .remedy = remedy};
    return error_set(error, FANIN_ERR_ARGUMENT, &place, "%s", what);
}

static fanin_status credentials_check(const credentials *c, fanin_error *error)
{
    if (!names_files(&c->tls))
        return FANIN_OK;
    if (c->secret)
        return credentials_refuse(
            error, "both a launch's secret and certificates are given",
            "give one of them: secret_file (FANIN_SECRET_FILE), or tls_cert, "
            "tls_key and tls_ca (FANIN_TLS_CERT, _KEY, _CA)");
    if (c->tls.cert && c->tls.key && c->tls.ca)
        return FANIN_OK;
    return credentials_refuse(
        error,
        !c->tls.cert  ? "a key or authorities, and no certificate (tls_cert)"
        : !c->tls.key ? "a certificate without its key (tls_key)"
                      : "a certificate without authorities that the other "
                        "end's is from (tls_ca)",
        "give all three: tls_cert, tls_key, tls_ca; --tls-cert, --tls-key, "
        "--tls-ca; FANIN_TLS_CERT, FANIN_TLS_KEY, FANIN_TLS_CA");
}

/* Afterwards nothing is empty, and all that is not NULL is to be used. */
static fanin_status credentials_resolve(const credentials *configured, credentials *out,
                                        fanin_error *error)
{
    bool has_secret = given(configured->secret);
    bool has_files = names_files(&configured->tls);
    *out = (credentials){0};
    if (has_secret || !has_files)
        out->secret = secret_file_of(configured->secret);
    if (has_files || !has_secret)
        out->tls =
            (certificate_files){.cert = or_environment(configured->tls.cert, CERT_ENV),
                                .key = or_environment(configured->tls.key, KEY_ENV),
                                .ca = or_environment(configured->tls.ca, CA_ENV)};
    return credentials_check(out, error);
}

/* @p named: whom the key of a secret is for, NULL: for readers. @p wanted: of a certificate. */
static fanin_status make_end(const credentials *configured, const char *named,
                             const identity *wanted, const logger *log, tls_end **out,
                             fanin_error *error)
{
    credentials c;
    *out = NULL;
    fanin_status status = credentials_resolve(configured, &c, error);
    if (status == FANIN_OK && c.secret)
        return tls_end_by_secret(c.secret, named, out, error);
    if (status == FANIN_OK && c.tls.cert)
        return tls_end_by_certificate(&c.tls, wanted, log, out, error);
    return status;
}

fanin_status credentials_of_rank(const credentials *configured,
                                 const uint8_t world_id[16], uint32_t rank,
                                 const logger *log, tls_end **out, fanin_error *error)
{
    char name[IDENTITY_MOST];
    const identity wanted = {.role = AS_RANK, .rank = rank};
    rank_identity(world_id, rank, name);
    return make_end(configured, name, &wanted, log, out, error);
}

fanin_status credentials_of_relay(const credentials *configured,
                                  const uint8_t world_id[16],
                                  const uint8_t incarnation[16], const logger *log,
                                  tls_end **out, fanin_error *error)
{
    char name[IDENTITY_MOST];
    const identity wanted = {.role = AS_RELAY};
    relay_identity(world_id, incarnation, name);
    return make_end(configured, name, &wanted, log, out, error);
}

fanin_status credentials_of_reader(const credentials *configured, const logger *log,
                                   tls_end **out, fanin_error *error)
{
    const identity wanted = {.role = AS_READER};
    return make_end(configured, NULL, &wanted, log, out, error);
}
