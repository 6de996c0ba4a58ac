/* SPDX-License-Identifier: Apache-2.0 */
#include "certificates.h"
#include "clock.h"
#include "error_set.h"
#include "load_lock.h"
#include "pem.h"
#include "thread.h"
#include "tls_internal.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#define LOOK_MS 1000
/* After so long the log says that files do not answer. */
#define SLOW_MS 1000
/* How long the end of it all waits for a look: one at a file system that answers is over by then.
   */
#define LEAVE_MS 500

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
    pthread_t thread; /* which alone uses these two: */
    stamp stamps[3];
    bool is_told;         /* that what is there now cannot be used */
    pthread_mutex_t lock; /* of what follows */
    pthread_cond_t turn;  /* it has ended, or the thread has */
    SSL_CTX *context;
    const logger *log;
    uint64_t looks_ns; /* since when the thread is with the files; 0: it is not */
    bool slow_told;    /* that this takes long */
    bool ended, left;  /* the owner's word, and the thread's */
    bool tells;        /* the thread is in the log, which is the owner's */
    bool is_alone;     /* the thread is the last who knows of it */
};

/* ------------------------------------------------------------------ the other */

static void name_found(tls *t, const X509 *cert)
{
    if (t->found || (t->found = malloc(TLS_NAMES)))
        pem_names(t->end->o, cert, t->found, TLS_NAMES);
}

/* Why not. */
static void certs_refuse(tls *t, X509_STORE_CTX *chain, bool is_believed)
{
    /* X509_V_ERR_HOSTNAME_MISMATCH: the other hears bad_certificate; X509_V_ERR_OUT_OF_MEM */
    enum { OTHER_NAME = 62, OUT_OF_MEMORY = 17 };
    const openssl *o = t->end->o;
    int code = o->X509_STORE_CTX_get_error(chain);
    /* A signature that is not the authority's leaves errors that explain nothing: the code does. */
    if (openssl_lacks_memory(o) || code == OUT_OF_MEMORY) {
        (void)tls_lack_memory(t);
        return;
    }
    name_found(t, o->X509_STORE_CTX_get0_cert(chain));
    t->fault = is_believed ? TLS_OTHER_NAME : TLS_UNTRUSTED;
    if (is_believed)
        o->X509_STORE_CTX_set_error(chain, OTHER_NAME);
    else
        t->why = o->X509_verify_cert_error_string(code);
}

/* Within the handshake: what OpenSSL thinks of the chain, and then who it is. */
static int certs_verify(int good, X509_STORE_CTX *chain)
{
    const openssl *o = openssl_of_callback();
    const SSL *ssl =
        o->X509_STORE_CTX_get_ex_data(chain, o->SSL_get_ex_data_X509_STORE_CTX_idx());
    tls *t = o->SSL_get_ex_data(ssl, TLS_DATA);
    identity wanted = *certificates_identity(t->end->certificates);
    wanted.role = t->end->is_rank ? AS_READER : t->to_relay ? AS_RELAY : AS_ANY_RANK;
    if (good && (o->X509_STORE_CTX_get_error_depth(chain) > 0 ||
                 pem_is_for(o, o->X509_STORE_CTX_get0_cert(chain), &wanted)))
        return 1;
    certs_refuse(t, chain, good);
    return 0;
}

bool certificates_peer_is(const openssl *o, const SSL *ssl, const identity *wanted)
{
    X509 *cert = o->SSL_get1_peer_certificate(ssl);
    bool good = cert && pem_is_for(o, cert, wanted);
    o->X509_free(cert);
    return good;
}

/* ------------------------------------------------------------------- contexts */

static fanin_status certs_fill(const openssl *o, SSL_CTX *context,
                               const certificate_files *files, identity *is,
                               fanin_error *error)
{
    enum { VERIFY = 1 | 2, DEPTH = 6 };
    /* Keys of 112 bits at least, and no SHA-1: RSA from 2048 on, any curve that is used. */
    o->SSL_CTX_set_security_level(context, 2);
    o->SSL_CTX_set_verify(context, VERIFY, certs_verify);
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
    openssl_enter(o);
    SSL_CTX *context = tls_context_new(o);
    fanin_status status =
        context ? certs_fill(o, context, files, is, error) : tls_no_context(o, error);
    if (status == FANIN_OK)
        *out = context;
    else
        o->SSL_CTX_free(context);
    openssl_leave();
    return status;
}

/* ------------------------------------------------------------------- rotation */

/* What cannot be looked at has a stamp of its own. */
static void certs_look(const certificates *c, stamp out[3])
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

/* Keeps what was read, if it was. The files may be exchanged one after the other: what does not fit
   together yet is read again. True: the log is to be told, which it is once a change. With the
   lock. */
static bool certs_settle(certificates *c, const stamp now[3], SSL_CTX *context)
{
    bool was_told = c->is_told;
    c->is_told = !context;
    if (!context)
        return !was_told;
    tls_context_free(c->o, c->context); /* connections hold on to it */
    c->context = context;
    memcpy(c->stamps, now, sizeof c->stamps);
    return true;
}

/* Without the lock, for which connections would wait as long as the log does; the end waits for it.
   */
static void certs_tell(certificates *c, bool is_read, const fanin_error *why)
{
    c->tells = true;
    pthread_mutex_unlock(&c->lock);
    if (is_read)
        log_write(c->log, FANIN_LOG_INFO, "certificates", "%s: read anew", c->files[0]);
    else
        log_write(c->log, FANIN_LOG_WARNING, "certificates",
                  "new ones cannot be used, those read before stay: %s (%s)",
                  why->message, why->remedy);
    pthread_mutex_lock(&c->lock);
    c->tells = false;
}

/* Takes as long as the files' file system and the log do, without the lock, with which it is called
   and returns. */
static void certs_look_again(certificates *c)
{
    stamp now[3];
    SSL_CTX *context = NULL;
    fanin_error why = FANIN_ERROR_INIT;
    identity is = c->is;
    const certificate_files files = {c->files[0], c->files[1], c->files[2]};
    c->looks_ns = clock_ns();
    pthread_mutex_unlock(&c->lock);
    certs_look(c, now);
    bool is_other = memcmp(now, c->stamps, sizeof now) != 0;
    if (is_other)
        (void)read_context(c->o, &files, &is, &context, &why);
    pthread_mutex_lock(&c->lock);
    c->looks_ns = 0;
    c->slow_told = false;
    if (!is_other || c->ended)
        tls_context_free(c->o, context);
    else if (certs_settle(c, now, context))
        certs_tell(c, context != NULL, &why);
}

static void wipe(certificates *c)
{
    if (c->context)
        tls_context_free(c->o, c->context);
    for (int i = 0; i < 3; i++)
        free(c->files[i]);
    pthread_cond_destroy(&c->turn);
    pthread_mutex_destroy(&c->lock);
    free(c);
}

/* A thread of its own, for a file system that has gone away answers nobody, and cannot be waited
   for with a deadline. It may so outlive the end, and uses nothing then that is not its own. */
static void *certs_watch(void *cookie)
{
    certificates *c = cookie;
    pthread_setname_np(pthread_self(), "fanin-certs");
    pthread_mutex_lock(&c->lock);
    while (!c->ended) {
        const deadline next = deadline_in_ms(LOOK_MS);
        while (!c->ended && condition_wait(&c->turn, &c->lock, next))
            ;
        if (!c->ended)
            certs_look_again(c);
    }
    c->left = true;
    bool is_alone = c->is_alone;
    pthread_cond_signal(&c->turn);
    pthread_mutex_unlock(&c->lock);
    if (is_alone)
        wipe(c);
    return NULL;
}

/* False: the thread is with the files for long, and ends it all when it comes back. One that is in
   the log is waited for, as every thread that logs is: the owner's function must not run after the
   end. */
static bool end_thread(certificates *c)
{
    const pthread_t thread = c->thread; /* it may be the thread's to free below */
    pthread_mutex_lock(&c->lock);
    const deadline until = deadline_in_ms(LEAVE_MS);
    c->ended = true;
    pthread_cond_signal(&c->turn);
    while (!c->left && condition_wait(&c->turn, &c->lock, until))
        ;
    while (!c->left && c->tells)
        pthread_cond_wait(&c->turn, &c->lock);
    bool left = c->left;
    c->is_alone = !left;
    pthread_mutex_unlock(&c->lock);
    if (left)
        pthread_join(thread, NULL);
    else
        pthread_detach(thread);
    return left;
}

SSL *certificates_ssl(certificates *c)
{
    pthread_mutex_lock(&c->lock);
    SSL *ssl = c->o->SSL_new(c->context);
    bool is_slow = c->looks_ns > 0 && !c->slow_told &&
                   clock_ns() - c->looks_ns > SLOW_MS * UINT64_C(1000000);
    c->slow_told |= is_slow;
    pthread_mutex_unlock(&c->lock);
    if (is_slow)
        log_write(c->log, FANIN_LOG_WARNING, "certificates",
                  "the file system of %s, its key or authorities does not answer: the "
                  "files read before stay in use until it does",
                  c->files[0]);
    return ssl;
}

const identity *certificates_identity(const certificates *c)
{
    return &c->is;
}

/* ----------------------------------------------------------------------- life */

/* Without what the files hold. */
static fanin_status certs_begin(certificates *c, const openssl *o,
                                const certificate_files *files, const logger *log,
                                fanin_error *error)
{
    const char *paths[3] = {files->cert, files->key, files->ca};
    pthread_mutex_init(&c->lock, NULL);
    condition_init(&c->turn);
    c->o = o;
    c->log = log;
    for (int i = 0; i < 3; i++)
        if (!(c->files[i] = strdup(paths[i])))
            return error_set_memory(error);
    return FANIN_OK;
}

static fanin_status begin_watch(certificates *c, fanin_error *error)
{
    const error_place place = {.remedy = THREAD_REMEDY};
    pin_own_library(); /* the thread may still run when the library is unloaded */
    if (worker_thread_start(&c->thread, certs_watch, c))
        return FANIN_OK;
    return error_set(error, FANIN_ERR_LIMIT, &place,
                     "cannot start the thread that looks at the file %s", c->files[0]);
}

fanin_status certificates_new(const openssl *o, const certificate_files *files,
                              const identity *wanted, const logger *log,
                              certificates **out, fanin_error *error)
{
    certificates *c = calloc(1, sizeof *c);
    *out = NULL;
    if (!c)
        return error_set_memory(error);
    fanin_status status = certs_begin(c, o, files, log, error);
    if (status == FANIN_OK) {
        c->is = *wanted;
        certs_look(c, c->stamps);
        status = read_context(o, files, &c->is, &c->context, error);
    }
    if (status == FANIN_OK)
        status = begin_watch(c, error);
    if (status == FANIN_OK)
        *out = c;
    else
        wipe(c);
    return status;
}

void certificates_free(certificates **c)
{
    certificates *old = *c;
    *c = NULL;
    if (old && end_thread(old))
        wipe(old);
}
