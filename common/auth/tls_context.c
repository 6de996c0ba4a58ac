/* SPDX-License-Identifier: Apache-2.0 */
/* TLS 1.3 alone, two ciphers, no tickets, resumption or early data. */
#include "error_set.h"
#include "tls_internal.h"

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
