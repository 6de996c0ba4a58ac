/* SPDX-License-Identifier: Apache-2.0 */
/* Connections, up to the end of their handshake: OpenSSL reads and writes through two buffers, by
   which nothing of its ever waits for the socket. */
#include "tls_internal.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

static void tls_give_up(tls *t);

/* ----------------------------------------------------------------------- tls data */

/* What goes after the handshake, by OpenSSL's records. Those of a send lie in the connection's
   buffer, so that OpenSSL never waits for room in the socket. A kernel that has the keys seals the
   caller's bytes itself. */

/* OpenSSL's numbers. */
#define ERROR_WANT_READ 2
#define ERROR_ZERO_RETURN 6
#define KEY_UPDATE_ALONE 0 /* the other need not change its keys */

/* Records under one key: long before what AES-GCM should encrypt, 2^24.5 full ones. */
#define RECORDS_MOST (UINT64_C(1) << 22)

/* Forgets errors of before, and lets OpenSSL know the thread, which takes a lock of its: what data
   takes of OpenSSL then does not, but for a change of keys. */
static const openssl *tls_data_enter(const tls *t)
{
    const openssl *o = t->end->o;
    openssl_enter(o);
    openssl_leave();
    return o;
}

static bool is_usable(const tls *t)
{
    return t->up && t->fault == TLS_FINE;
}

/* -1, with why in errno. */
static int broken(tls *t)
{
    tls_give_up(t);
    errno = t->fault == TLS_MEMORY ? ENOMEM : EBADMSG;
    return -1;
}

/* ----------------------------------------------------------------- receiving */

/* Bytes of one record at most; 0: the other closed; -1: errno. */
static ssize_t receive_some(tls *t, void *to, size_t room)
{
    size_t got = 0;
    if (t->closed && is_usable(t))
        return 0;
    errno = EBADMSG;
    if (!is_usable(t))
        return -1;
    const openssl *o = tls_data_enter(t);
    t->sys_errno = 0;
    int result = o->SSL_read_ex(t->ssl, to, room, &got);
    if (t->within)
        openssl_leave();
    t->within = false;
    if (result == 1) {
        t->idle = 0;
        return (ssize_t)got;
    }
    int why = o->SSL_get_error(t->ssl, result);
    t->closed |= why == ERROR_ZERO_RETURN;
    if (t->closed)
        return 0;
    if (why != ERROR_WANT_READ && (t->sys_errno == 0 || t->sys_errno == ENOMEM))
        return broken(t);
    errno = why == ERROR_WANT_READ ? EAGAIN : t->sys_errno;
    return -1;
}

/* Whether bytes have come that nobody has taken, a whole record or not. */
static bool tls_has_bytes(const tls *t)
{
    return tls_left(&t->in) > 0 || t->end->o->SSL_has_pending(t->ssl) == 1;
}

ssize_t tls_receive(tls *t, int fd, void *to, size_t room)
{
    if (!t)
        return recv(fd, to, room, MSG_DONTWAIT);
    size_t have = 0;
    ssize_t n = 0;
    while (have < room && (n = receive_some(t, (uint8_t *)to + have, room - have)) > 0)
        have += (size_t)n;
    int why = errno;
    t->more = have == room && t->up && tls_has_bytes(t);
    errno = why;
    return have > 0 ? (ssize_t)have : n;
}

ssize_t tls_receive_into(tls *t, int fd, struct iovec *iov, int n)
{
    if (!t)
        return readv(fd, iov, n);
    size_t have = 0;
    for (int i = 0; i < n; i++) {
        ssize_t got = tls_receive(t, fd, iov[i].iov_base, iov[i].iov_len);
        have += got > 0 ? (size_t)got : 0;
        if (got < 0 || (size_t)got < iov[i].iov_len)
            return have > 0 ? (ssize_t)have : got;
    }
    return (ssize_t)have;
}

bool tls_pending(const tls *t)
{
    /* There are bytes, or it is to be told that there will be none. */
    return t && t->up && (t->more || t->closed || t->fault != TLS_FINE);
}

/* ------------------------------------------------------------------- sending */

/* False, with errno: nothing may be sent any more. */
static bool seal(tls *t, const void *data, size_t size)
{
    size_t written;
    const openssl *o = t->end->o;
    t->sys_errno = 0;
    t->records += size / TLS_RECORD + 1;
    bool is_worn = t->records > RECORDS_MOST, changes_keys = is_worn || t->asked;
    openssl_enter(o);
    if (!changes_keys) /* it takes no locks then */
        openssl_leave();
    bool sealed = (!is_worn || o->SSL_key_update(t->ssl, KEY_UPDATE_ALONE) == 1) &&
                  o->SSL_write_ex(t->ssl, data, size, &written) == 1;
    if (changes_keys)
        openssl_leave();
    t->records = is_worn ? 0 : t->records;
    t->asked = false;
    if (!sealed)
        (void)broken(t);
    return sealed;
}

ssize_t tls_send(tls *t, int fd, const struct iovec *iov, int n)
{
    int failed = t && !is_usable(t) ? EBADMSG : tls_flush(t);
    if (failed || tls_unsent(t) > 0) {
        errno = failed ? failed : EAGAIN;
        return -1;
    }
    if (!t || t->by_kernel) {
        struct msghdr message = {.msg_iov = (struct iovec *)(uintptr_t)iov,
                                 .msg_iovlen = (size_t)n};
        return sendmsg(fd, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    }
    size_t taken = 0;
    for (int i = 0; i < n && taken < TLS_SEND_MOST; i++) {
        size_t most = TLS_SEND_MOST - taken;
        size_t size = iov[i].iov_len < most ? iov[i].iov_len : most;
        if (size > 0 && !seal(t, iov[i].iov_base, size))
            return -1;
        taken += size;
    }
    failed = tls_flush(t);
    errno = failed;
    return failed ? -1 : (ssize_t)taken;
}

/* ---------------------------------------------------------------------------- tls */

/* OpenSSL's numbers. */
#define REASON_BINDER 253
#define REASON_VERIFY 134
#define REASON_UNSHOWN 199
#define REASON_ALERT 1000        /* of an alert, less the alert's */
#define LIBRARY_SSL (20ul << 23) /* of numbers of errors */
#define ALERT_INTERNAL 80        /* who says it cannot go on */
#define ALERT_HANDSHAKE 40
#define ALERT_CERTIFICATE 42 /* from here on, and to ALERT_DENIED, of certificates */
#define ALERT_DENIED 49
#define ALERT_PARAMETER 47 /* of OpenSSL 3.0; others say: */
#define ALERT_DECRYPT 51
#define ALERT_NO_IDENTITY 115

#define PROOF_LABEL "EXPORTER-fanin-1-rank"

/* --------------------------------------------------------------------- life */

/* False: no memory. */
static bool make_ssl(tls *t)
{
    const tls_end *end = t->end;
    const openssl *o = end->o;
    t->ssl = end->certificates ? certificates_ssl(end->certificates)
                               : o->SSL_new(end->context);
    if (!t->ssl || o->SSL_set_ex_data(t->ssl, TLS_DATA, t) != 1)
        return false;
    BIO *bio = o->BIO_new(end->method);
    if (!bio)
        return false;
    o->BIO_set_data(bio, t);
    o->BIO_set_init(bio, 1);
    o->SSL_set_bio(t->ssl, bio, bio); /* frees it with the SSL */
    if (end->is_rank)
        o->SSL_set_accept_state(t->ssl);
    else
        o->SSL_set_connect_state(t->ssl);
    return true;
}

tls *tls_new(const tls_end *end, int fd)
{
    tls *t = calloc(1, sizeof *t);
    if (!t)
        return NULL;
    t->end = end;
    t->fd = fd;
    openssl_enter(end->o);
    bool made = make_ssl(t);
    openssl_leave();
    if (!made)
        tls_free(&t);
    return t;
}

void tls_free(tls **t)
{
    tls *old = t ? *t : NULL;
    if (!old)
        return;
    *t = NULL;
    openssl_enter(old->end->o);
    if (old->ssl)
        old->end->o->SSL_free(old->ssl);
    openssl_leave();
    free(old->in.data);
    free(old->out.data);
    free(old->found);
    free(old);
}

/* ----------------------------------------------------------------- handshake */

/* Between ends that have a secret. */
static tls_fault fault_of_keys(const tls *t, unsigned long reason)
{
    if (t->end->is_rank && t->unknown)
        return TLS_OTHER_IDENTITY;
    if (reason == REASON_BINDER || reason == REASON_ALERT + ALERT_DECRYPT ||
        reason == REASON_ALERT + ALERT_PARAMETER)
        return TLS_OTHER_SECRET;
    if (reason == REASON_ALERT + ALERT_NO_IDENTITY)
        return TLS_NO_SECRET;
    if (reason == REASON_VERIFY) /* it has certificates instead */
        return TLS_UNPROVEN;
    return reason == REASON_ALERT + ALERT_HANDSHAKE ? TLS_OTHER_IDENTITY : TLS_BROKEN;
}

static tls_fault fault_of_certificates(unsigned long reason)
{
    if (reason == REASON_UNSHOWN || reason == REASON_ALERT + ALERT_HANDSHAKE)
        return TLS_UNSHOWN;
    if (reason == REASON_ALERT + ALERT_NO_IDENTITY)
        return TLS_NO_SECRET;
    bool is_about_it = reason >= REASON_ALERT + ALERT_CERTIFICATE &&
                       reason <= REASON_ALERT + ALERT_DENIED &&
                       reason != REASON_ALERT + ALERT_PARAMETER;
    return is_about_it || reason == REASON_ALERT + ALERT_DECRYPT ? TLS_DISBELIEVED
                                                                 : TLS_BROKEN;
}

/* Why it failed, by OpenSSL's number of it; what is known already stays, but for a lack of memory:
   what else went wrong may follow from that. */
static void tls_fail(tls *t, unsigned long code)
{
    unsigned long reason = code ^ LIBRARY_SSL; /* of other libraries': no reason here */
    if (code == OPENSSL_NO_MEMORY || t->sys_errno == ENOMEM)
        (void)tls_lack_memory(t);
    if (!t->why)
        t->why = t->end->o->ERR_reason_error_string(code);
    if (t->fault != TLS_FINE) /* it is known */
        return;
    bool broken = t->closed || t->sys_errno != 0;
    t->fault = broken                                    ? TLS_CLOSED
               : reason == REASON_ALERT + ALERT_INTERNAL ? TLS_GAVE_UP
               : t->end->certificates                    ? fault_of_certificates(reason)
                                                         : fault_of_keys(t, reason);
}

/* By what OpenSSL says of its failure just now. The other hears its alert. */
static void tls_give_up(tls *t)
{
    tls_fail(t, openssl_fault(t->end->o));
    if (t->fault == TLS_MEMORY) /* the alert may accuse the other */
        t->out.used = t->out.size;
    (void)tls_flush(t);
}

/* Within OpenSSL. */
static tls_step shake(tls *t)
{
    const openssl *o = t->end->o;
    t->sys_errno = 0;
    int result = o->SSL_do_handshake(t->ssl);
    bool waits = result != 1 && o->SSL_get_error(t->ssl, result) == ERROR_WANT_READ;
    if (result != 1 && !waits) {
        tls_give_up(t);
        return TLS_FAILED;
    }
    /* With a secret whoever has any certificate can shake hands; the key is what counts. */
    if (result == 1 && !t->end->certificates && o->SSL_session_reused(t->ssl) != 1) {
        t->fault = TLS_UNPROVEN;
        return TLS_FAILED;
    }
    if (tls_flush(t) != 0) {
        t->fault = TLS_CLOSED;
        return TLS_FAILED;
    }
    if (result != 1)
        return TLS_WAIT;
    t->up = true;
    t->more = tls_has_bytes(t);
    return TLS_UP;
}

tls_step tls_handshake(tls *t)
{
    openssl_enter(t->end->o);
    tls_step step = shake(t);
    openssl_leave();
    return step;
}

bool tls_is_up(const tls *t)
{
    return t && t->up;
}

const char *tls_broken(const tls *t)
{
    if (!tls_is_up(t) || t->fault == TLS_FINE || t->fault == TLS_CLOSED ||
        t->fault == TLS_DISBELIEVED)
        return NULL;
    return tls_why(t);
}

tls_fault tls_failed(const tls *t)
{
    return t->fault;
}

const char *tls_file(const tls *t)
{
    return t->end->file;
}

const identity *tls_end_identity(const tls_end *end)
{
    return end->certificates ? certificates_identity(end->certificates) : NULL;
}

const identity *tls_identity(const tls *t)
{
    return tls_end_identity(t->end);
}

const char *tls_found(const tls *t)
{
    return t->found ? t->found : "nobody";
}

const char *tls_why(const tls *t)
{
    return t->why ? t->why : "it is no TLS 1.3";
}

const uint8_t *tls_plain(const tls *t, size_t *size_out)
{
    *size_out = tls_left(&t->in);
    return t->in.data + t->in.used;
}

const uint8_t *tls_last_words(const tls *t, size_t *size_out)
{
    *size_out = tls_left(&t->out);
    return t->out.data + t->out.used;
}

/* --------------------------------------------------------------------- proof */

static bool proof_of(const tls *t, const uint8_t key[KEY_SIZE],
                     uint8_t out[TLS_PROOF_SIZE])
{
    const openssl *o = t->end->o;
    uint8_t bound[KEY_SIZE];
    bool good =
        o->SSL_export_keying_material(t->ssl, bound, sizeof bound, PROOF_LABEL,
                                      sizeof PROOF_LABEL - 1, NULL, 0, 0) == 1 &&
        hmac_sha256(o, key, KEY_SIZE, bound, sizeof bound, out);
    explicit_bzero(bound, sizeof bound);
    return good;
}

bool tls_prove_rank(const tls *t, uint8_t out[TLS_PROOF_SIZE])
{
    if (!tls_is_up(t) || t->end->certificates)
        return false;
    openssl_enter(t->end->o);
    bool made = proof_of(t, t->end->key, out);
    openssl_leave();
    return made;
}

/* In a time that does not depend on where they differ. */
static bool tls_is_same(const uint8_t *a, const uint8_t *b, size_t size)
{
    unsigned differ = 0;
    for (size_t i = 0; i < size; i++)
        differ |= a[i] ^ b[i];
    return differ == 0;
}

static bool is_of_job(tls *t, identity wanted)
{
    const openssl *o = t->end->o;
    memcpy(wanted.job, tls_identity(t)->job, sizeof wanted.job);
    bool good = certificates_peer_is(o, t->ssl, &wanted);
    if (!good && openssl_fault(o) == OPENSSL_NO_MEMORY)
        (void)tls_lack_memory(t);
    return good;
}

static bool has_key(tls *t, const char *identity, const uint8_t proof[TLS_PROOF_SIZE])
{
    uint8_t key[KEY_SIZE], expected[TLS_PROOF_SIZE];
    bool made =
        launch_key(t->end->o, t->end->key, identity, key) && proof_of(t, key, expected);
    explicit_bzero(key, sizeof key);
    if (!made) /* by ciphers that have just worked */
        (void)tls_lack_memory(t);
    return made && tls_is_same(expected, proof, TLS_PROOF_SIZE);
}

/* By the certificate, or by the proof that its key is that of @p identity. */
static bool is_proven(tls *t, identity wanted, const char *identity,
                      const uint8_t *proof, size_t size)
{
    if (!tls_is_up(t))
        return false;
    openssl_enter(t->end->o);
    bool good = t->end->certificates
                    ? is_of_job(t, wanted)
                    : size == TLS_PROOF_SIZE && has_key(t, identity, proof);
    openssl_leave();
    return good;
}

bool tls_check_rank(tls *t, const uint8_t world_id[16], uint32_t rank,
                    const uint8_t *proof, size_t size)
{
    char name[IDENTITY_MOST];
    rank_identity(world_id, rank, name);
    return is_proven(t, (identity){.role = AS_RANK, .rank = rank}, name, proof, size);
}

void tls_expect_relay(tls *t)
{
    t->to_relay = true;
}

bool tls_expects_relay(const tls *t)
{
    return t->to_relay;
}

bool tls_check_relay(tls *t, const uint8_t world_id[16], const uint8_t incarnation[16],
                     const uint8_t *proof, size_t size)
{
    char name[IDENTITY_MOST];
    relay_identity(world_id, incarnation, name);
    return is_proven(t, (identity){.role = AS_RELAY}, name, proof, size);
}
