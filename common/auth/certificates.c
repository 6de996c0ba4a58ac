/* SPDX-License-Identifier: Apache-2.0 */
#include "certificates.h"
#include "clock.h"
#include "error_set.h"
#include "own_file.h"
#include "pem.h"
#include "tls_internal.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#define LOOK_MS 1000

/* What tells that a file is another one than before. */
typedef struct stamp {
    dev_t device;
    ino_t number;
    off_t size;
    struct timespec changed, written;
} stamp;

struct certificates {
    const openssl *o;
    char *files[3]; /* certificate, key, authorities */
    identity is;
    const logger *log;
    pthread_mutex_t lock; /* of what follows */
    SSL_CTX *context;
    stamp stamps[3];
    bool is_told; /* that what is there now cannot be used */
    deadline look_at;
};

/* ------------------------------------------------------------------ the other */

static void name_found(tls *t, const X509 *cert)
{
    if (t->found || (t->found = malloc(TLS_NAMES)))
        pem_names(t->end->o, cert, t->found, TLS_NAMES);
}

/* Within the handshake: what OpenSSL thinks of the chain, and then who it is. */
static int verify(int good, X509_STORE_CTX *chain)
{
    enum {
        OTHER_NAME = 62
    }; /* X509_V_ERR_HOSTNAME_MISMATCH: the other hears bad_certificate */
    const openssl *o = openssl_of_callback();
    const SSL *ssl =
        o->X509_STORE_CTX_get_ex_data(chain, o->SSL_get_ex_data_X509_STORE_CTX_idx());
    tls *t = o->SSL_get_ex_data(ssl, TLS_DATA);
    const X509 *cert = o->X509_STORE_CTX_get0_cert(chain);
    identity wanted = *certificates_identity(t->end->certificates);
    wanted.role = t->end->is_rank ? AS_READER : AS_ANY_RANK;
    if (!good) {
        name_found(t, cert);
        t->fault = TLS_UNTRUSTED;
        t->why = o->X509_verify_cert_error_string(o->X509_STORE_CTX_get_error(chain));
    } else if (o->X509_STORE_CTX_get_error_depth(chain) == 0 &&
               !pem_is_for(o, cert, &wanted)) {
        name_found(t, cert);
        t->fault = TLS_OTHER_NAME;
        o->X509_STORE_CTX_set_error(chain, OTHER_NAME);
        good = 0;
    }
    return good;
}

bool certificates_peer_is(const openssl *o, const SSL *ssl, const identity *wanted)
{
    X509 *cert = o->SSL_get1_peer_certificate(ssl);
    bool good = cert && pem_is_for(o, cert, wanted);
    o->X509_free(cert);
    return good;
}

/* ------------------------------------------------------------------- contexts */

static fanin_status fill(const openssl *o, SSL_CTX *context,
                         const certificate_files *files, identity *is,
                         fanin_error *error)
{
    enum { MAX_CERT_LIST = 51, LIST_MOST = 32 << 10, VERIFY = 1 | 2, DEPTH = 6 };
    /* Keys of 112 bits at least, and no SHA-1: RSA from 2048 on, any curve that is used. */
    o->SSL_CTX_set_security_level(context, 2);
    o->SSL_CTX_ctrl(context, MAX_CERT_LIST, LIST_MOST, NULL);
    o->SSL_CTX_set_verify(context, VERIFY, verify);
    o->SSL_CTX_set_verify_depth(context, DEPTH);
    fanin_status status = pem_use_certificate(o, context, files->cert, is, error);
    if (status == FANIN_OK)
        status = pem_use_key(o, context, files->key, files->cert, error);
    if (status == FANIN_OK)
        status = pem_use_authorities(o, context, files->ca, error);
    o->ERR_clear_error();
    return status;
}

/* @p is: who this end has to be; its job too, once one is known. */
static fanin_status read_context(const openssl *o, const certificate_files *files,
                                 identity *is, SSL_CTX **out, fanin_error *error)
{
    SSL_CTX *context = tls_context_new(o);
    if (!context)
        return tls_no_context(o, error);
    fanin_status status = fill(o, context, files, is, error);
    if (status == FANIN_OK)
        *out = context;
    else
        o->SSL_CTX_free(context);
    return status;
}

/* ------------------------------------------------------------------- rotation */

/* What cannot be looked at has a stamp of its own. */
static void look(const certificates *c, stamp out[3])
{
    struct stat s;
    memset(out, 0, 3 * sizeof *out);
    for (int i = 0; i < 3; i++)
        if (stat(c->files[i], &s) == 0) {
            out[i].device = s.st_dev;
            out[i].number = s.st_ino;
            out[i].size = s.st_size;
            out[i].changed = s.st_ctim;
            out[i].written = s.st_mtim;
        }
}

/* Whether they were read, or why not, which is to be told: both at most once a change. The files may be
   exchanged one after the other: what does not fit together yet is read again. */
static bool renew(certificates *c, fanin_error *told)
{
    stamp now[3];
    SSL_CTX *context = NULL;
    identity is = c->is;
    const certificate_files files = {c->files[0], c->files[1], c->files[2]};
    look(c, now);
    bool same = memcmp(now, c->stamps, sizeof now) == 0;
    c->look_at = deadline_in_ms(LOOK_MS);
    if (same)
        return false;
    fanin_status status = read_context(c->o, &files, &is, &context, told);
    if (status == FANIN_OK) {
        c->o->SSL_CTX_free(c->context); /* connections hold on to it */
        c->context = context;
        memcpy(c->stamps, now, sizeof now);
        c->is_told = false;
        return true;
    }
    bool again = c->is_told;
    c->is_told = true;
    return !again;
}

SSL *certificates_ssl(certificates *c)
{
    fanin_error why = FANIN_ERROR_INIT;
    pthread_mutex_lock(&c->lock);
    bool tell = deadline_passed(c->look_at) && renew(c, &why);
    SSL *ssl = c->o->SSL_new(c->context);
    pthread_mutex_unlock(&c->lock);
    if (tell && why.status == FANIN_OK)
        log_write(c->log, FANIN_LOG_INFO, "certificates", "%s: read anew", c->files[0]);
    else if (tell)
        log_write(c->log, FANIN_LOG_WARNING, "certificates",
                  "new ones cannot be used, those read before stay: %s (%s)",
                  why.message, why.remedy);
    return ssl;
}

const identity *certificates_identity(const certificates *c)
{
    return &c->is;
}

/* ----------------------------------------------------------------------- life */

fanin_status certificates_new(const openssl *o, const certificate_files *files,
                              const identity *wanted, const logger *log,
                              certificates **out, fanin_error *error)
{
    const char *paths[3] = {files->cert, files->key, files->ca};
    *out = NULL;
    certificates *c = calloc(1, sizeof *c);
    if (!c)
        return error_set_memory(error);
    pthread_mutex_init(&c->lock, NULL);
    c->o = o;
    c->is = *wanted;
    c->log = log;
    fanin_status status = FANIN_OK;
    for (int i = 0; i < 3 && status == FANIN_OK; i++)
        if (!(c->files[i] = strdup(paths[i])))
            status = error_set_memory(error);
    if (status == FANIN_OK)
        look(c, c->stamps);
    c->look_at = deadline_in_ms(LOOK_MS);
    if (status == FANIN_OK)
        status = read_context(o, files, &c->is, &c->context, error);
    if (status == FANIN_OK)
        *out = c;
    else
        certificates_free(&c);
    return status;
}

void certificates_free(certificates **c)
{
    certificates *old = *c;
    *c = NULL;
    if (!old)
        return;
    if (old->context)
        old->o->SSL_CTX_free(old->context);
    for (int i = 0; i < 3; i++)
        free(old->files[i]);
    pthread_mutex_destroy(&old->lock);
    free(old);
}
