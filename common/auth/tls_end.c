/* SPDX-License-Identifier: Apache-2.0 */
/* Keys of one side: those of a secret, for one identity, or certificates. */
#include "error_set.h"
#include "tls_internal.h"

#include <stdlib.h>
#include <string.h>

/* -------------------------------------------------------------------- tls context */

/* TLS 1.3 alone, two ciphers, no tickets, resumption or early data. */

/* OpenSSL's numbers. */
#define TLS1_3 0x0304
#define CTRL_MODE 33
#define CTRL_SESSION_CACHE 44
#define CTRL_MOST_CERTIFICATES 51
#define CTRL_MIN_VERSION 123
#define CTRL_MAX_VERSION 124
#define MODE_RELEASE_BUFFERS 0x10L
#define OP_KTLS (UINT64_C(1) << 3)
#define OP_NO_TICKET (UINT64_C(1) << 14)
#define OP_OWN_ORDER (UINT64_C(1) << 22) /* of ciphers, not the client's */

#define CERTIFICATES_MOST 32768 /* bytes of the other's chain: several long ones */
#define CIPHERS "TLS_AES_128_GCM_SHA256:TLS_CHACHA20_POLY1305_SHA256"

/* OpenSSL has read a message, which it takes next, or sent one. After the handshake these are
   changes of keys, which may take locks of OpenSSL's. */
static void on_message(int is_sent, int version, int type, const void *data,
                       size_t size, SSL *ssl, void *cookie)
{
    (void)version, (void)data, (void)size, (void)cookie;
    tls *t = openssl_of_callback()->SSL_get_ex_data(ssl, TLS_DATA);
    if (is_sent || type != RECORD_HANDSHAKE || !t->up || t->within)
        return;
    openssl_enter(t->end->o);
    t->within = t->asked = true;
}

SSL_CTX *tls_context_new(const openssl *o)
{
    SSL_CTX *c = o->SSL_CTX_new(o->TLS_method());
    if (!c)
        return NULL;
    if (o->SSL_CTX_ctrl(c, CTRL_MIN_VERSION, TLS1_3, NULL) != 1 ||
        o->SSL_CTX_ctrl(c, CTRL_MAX_VERSION, TLS1_3, NULL) != 1 ||
        o->SSL_CTX_set_ciphersuites(c, CIPHERS) != 1 ||
        o->SSL_CTX_set_num_tickets(c, 0) != 1) {
        o->SSL_CTX_free(c);
        return NULL;
    }
    o->SSL_CTX_set_options(c, OP_KTLS | OP_NO_TICKET | OP_OWN_ORDER);
    o->SSL_CTX_set_msg_callback(c, on_message);
    o->SSL_CTX_ctrl(c, CTRL_SESSION_CACHE, 0, NULL);
    o->SSL_CTX_ctrl(c, CTRL_MOST_CERTIFICATES, CERTIFICATES_MOST, NULL);
    o->SSL_CTX_ctrl(c, CTRL_MODE, MODE_RELEASE_BUFFERS, NULL);
    return c;
}

void tls_context_free(const openssl *o, SSL_CTX *context)
{
    openssl_enter(o);
    o->SSL_CTX_free(context);
    openssl_leave();
}

fanin_status tls_no_context(const openssl *o, fanin_error *error)
{
    const error_place place = {.phase = "load",
                               .remedy = "does OPENSSL_CONF, or openssl.cnf, activate "
                                         "a provider with AES-GCM and SHA-256?"};
    unsigned long code = openssl_fault(o);
    const char *why = o->ERR_reason_error_string(code);
    if (code == OPENSSL_NO_MEMORY)
        return error_set_memory(error);
    return error_set(error, FANIN_ERR_UNSUPPORTED, &place,
                     "%s cannot be set up for TLS 1.3: %s", o->OpenSSL_version(0),
                     why ? why : "it does not say why");
}

/* ------------------------------------------------------------------------ tls end */

#define VERIFY_PEER 1 /* OpenSSL's number */

/* A session that never was, made of the key: so OpenSSL takes a key that both ends have. */
static SSL_SESSION *session_of_key(const tls_end *end, SSL *ssl)
{
    static const unsigned char aes_128_gcm[] = {0x13, 0x01};
    const openssl *o = end->o;
    SSL_SESSION *session = o->SSL_SESSION_new();
    const SSL_CIPHER *cipher = o->SSL_CIPHER_find(ssl, aes_128_gcm);
    if (session && cipher &&
        o->SSL_SESSION_set1_master_key(session, end->reader_key, KEY_SIZE) &&
        o->SSL_SESSION_set_cipher(session, cipher) &&
        o->SSL_SESSION_set_protocol_version(session, TLS1_3))
        return session;
    o->SSL_SESSION_free(session);
    return NULL;
}

static tls *tls_of(SSL *ssl)
{
    return openssl_of_callback()->SSL_get_ex_data(ssl, TLS_DATA);
}

/* Without a session the handshake goes on as one with a certificate, which no rank has. */
static int find_session(SSL *ssl, const unsigned char *identity, size_t size,
                        SSL_SESSION **out)
{
    tls *t = tls_of(ssl);
    *out = NULL;
    t->unknown =
        size != strlen(IDENTITY_READER) || memcmp(identity, IDENTITY_READER, size) != 0;
    if (t->unknown)
        return 1;
    *out = session_of_key(t->end, ssl);
    return *out != NULL;
}

static int use_session(SSL *ssl, const EVP_MD *md, const unsigned char **identity,
                       size_t *size, SSL_SESSION **out)
{
    const tls *t = tls_of(ssl);
    *identity = (const unsigned char *)IDENTITY_READER;
    *size = strlen(IDENTITY_READER);
    (void)md; /* all ciphers that are offered have the same */
    *out = session_of_key(t->end, ssl);
    return *out != NULL;
}

/* By the key alone. */
static bool tls_end_settle(tls_end *end)
{
    const openssl *o = end->o;
    SSL_CTX *c = end->context = tls_context_new(o);
    if (!c)
        return false;
    if (end->is_rank) {
        o->SSL_CTX_set_psk_find_session_callback(c, find_session);
    } else {
        /* Nobody is trusted by a certificate: none would be good. */
        o->SSL_CTX_set_verify(c, VERIFY_PEER, NULL);
        o->SSL_CTX_set_psk_use_session_callback(c, use_session);
    }
    return true;
}

/* @p identity: of the key that is kept; NULL: the root. */
static fanin_status tls_end_derive(tls_end *end, const char *identity,
                                   fanin_error *error)
{
    uint8_t secret[SECRET_SIZE], root[KEY_SIZE];
    fanin_status status = secret_file_read(end->file, secret, error);
    if (status != FANIN_OK)
        return status;
    openssl_enter(end->o);
    bool good = launch_root(end->o, secret, root) &&
                launch_key(end->o, root, IDENTITY_READER, end->reader_key);
    explicit_bzero(secret, sizeof secret);
    if (good && identity)
        good = launch_key(end->o, root, identity, end->key);
    else
        memcpy(end->key, root, sizeof root);
    explicit_bzero(root, sizeof root);
    if (!good || !tls_end_settle(end))
        status = tls_no_context(end->o, error);
    openssl_leave();
    return status;
}

/* Without keys yet. */
static fanin_status tls_end_begin(const char *file, bool is_rank, tls_end **out,
                                  fanin_error *error)
{
    tls_end *end = *out = calloc(1, sizeof *end);
    if (!end || !(end->file = strdup(file)))
        return error_set_memory(error);
    end->is_rank = is_rank;
    fanin_status status = openssl_load(&end->o, error);
    if (status == FANIN_OK && !(end->method = tls_method_new(end->o)))
        status = error_set_memory(error);
    return status;
}

fanin_status tls_end_by_secret(const char *file, const char *named, tls_end **out,
                               fanin_error *error)
{
    fanin_status status = tls_end_begin(file, named != NULL, out, error);
    if (status == FANIN_OK)
        status = tls_end_derive(*out, named, error);
    if (status != FANIN_OK)
        tls_end_free(out);
    return status;
}

fanin_status tls_end_by_certificate(const certificate_files *files,
                                    const identity *wanted, const logger *log,
                                    tls_end **out, fanin_error *error)
{
    fanin_status status =
        tls_end_begin(files->cert, wanted->role != AS_READER, out, error);
    if (status == FANIN_OK)
        status = certificates_new((*out)->o, files, wanted, log, &(*out)->certificates,
                                  error);
    if (status != FANIN_OK)
        tls_end_free(out);
    return status;
}

void tls_end_free(tls_end **end)
{
    tls_end *e = *end;
    *end = NULL;
    if (!e)
        return;
    certificates_free(&e->certificates);
    if (e->context)
        tls_context_free(e->o, e->context);
    if (e->method)
        e->o->BIO_meth_free(e->method);
    free(e->file);
    explicit_bzero(e, sizeof *e);
    free(e);
}

const char *tls_end_file(const tls_end *end)
{
    return end->file;
}
