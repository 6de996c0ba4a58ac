/* SPDX-License-Identifier: Apache-2.0 */
/* Connections. OpenSSL reads from and writes to two buffers, which move to and from the socket here: many
   records by one system call, no signal, and nothing of OpenSSL's ever waits for a half-sent record. */
#include "error_set.h"
#include "tls_internal.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

#define RECORD ((size_t)16 << 10) /* plain bytes of one at most */
#define RECORD_COAT 64            /* more than a record adds */
#define IN_FIRST                                                                       \
    ((size_t)4 << 10) /* received at once at first; grows while that is full */
#define IN_MOST ((size_t)256 << 10)
/* Long before what AES-GCM should encrypt under one key: 2^24.5 full records. */
#define KEY_BYTES (UINT64_C(1) << 36)

/* OpenSSL's numbers. */
#define ERROR_WANT_READ 2
#define ERROR_ZERO_RETURN 6
#define REASON_OF(code) ((code)&0x7fffff)
#define REASON_ALERT 1000
#define REASON_BINDER 253
#define REASON_VERIFY 134
#define REASON_UNSHOWN 199
#define ALERT_RECORD_MAC 20
#define ALERT_HANDSHAKE 40
#define ALERT_CERTIFICATE 42 /* from here on, and to ALERT_DENIED, of certificates */
#define ALERT_DENIED 49
#define ALERT_PARAMETER 47 /* of OpenSSL 3.0; others say: */
#define ALERT_DECRYPT 51
#define ALERT_NO_IDENTITY 115
#define BIO_FLUSH 11
#define BIO_READ_AGAIN 0x09
#define BIO_RETRY_FLAGS 0x0f
#define BIO_SOURCE_SINK 0x0400
#define KEY_UPDATE_ALONE 0

#define PROOF_LABEL "EXPORTER-fanin-1-rank"

/* ----------------------------------------------------------------- buffers */

static bool reserve(tls_bytes *b, size_t more)
{
    if (b->used == b->size)
        b->used = b->size = 0;
    if (b->capacity - b->size >= more)
        return true;
    size_t capacity = b->capacity ? b->capacity : IN_FIRST;
    while (capacity - b->size < more)
        capacity *= 2;
    uint8_t *data = realloc(b->data, capacity);
    if (!data)
        return false;
    b->data = data;
    b->capacity = capacity;
    return true;
}

static size_t left(const tls_bytes *b)
{
    return b->size - b->used;
}

/* Receives once: more than 0, 0 at the end, -1 with t->sys_errno. */
static ssize_t refill(tls *t)
{
    tls_bytes *in = &t->in;
    bool was_full = in->capacity > 0 && in->size == in->capacity;
    size_t want = was_full && in->capacity < IN_MOST ? 2 * in->capacity : in->capacity;
    in->used = in->size = 0;
    if (!reserve(in, want ? want : IN_FIRST)) {
        t->sys_errno = ENOMEM;
        return -1;
    }
    ssize_t n;
    do
        n = recv(t->fd, in->data, in->capacity, MSG_DONTWAIT);
    while (n < 0 && errno == EINTR);
    t->sys_errno = n < 0 ? errno : 0;
    in->size = n > 0 ? (size_t)n : 0;
    t->closed = n == 0;
    return n;
}

/* Whether what comes first is TLS: a rank without a secret, or none that is this far, says why in a frame. */
static bool is_tls(tls *t)
{
    uint8_t first = t->in.data[t->in.used];
    if (t->heard || first == TLS_FIRST_BYTE || first == TLS_NO_SECRET_ALERT[0])
        t->heard = true;
    else
        t->fault = TLS_PLAIN;
    return t->heard;
}

static int bio_read(BIO *bio, char *to, int room)
{
    const openssl *o = openssl_of_callback();
    tls *t = o->BIO_get_data(bio);
    o->BIO_clear_flags(bio, BIO_RETRY_FLAGS);
    if (left(&t->in) == 0) {
        ssize_t n = t->fault == TLS_PLAIN ? -1 : refill(t);
        if (n < 0 && t->sys_errno == EAGAIN)
            o->BIO_set_flags(bio, BIO_READ_AGAIN);
        if (n <= 0)
            return (int)n;
    }
    if (!is_tls(t))
        return -1;
    size_t step = left(&t->in) < (size_t)room ? left(&t->in) : (size_t)room;
    memcpy(to, t->in.data + t->in.used, step);
    t->in.used += step;
    return (int)step;
}

static int bio_write(BIO *bio, const char *data, int size)
{
    const openssl *o = openssl_of_callback();
    tls *t = o->BIO_get_data(bio);
    o->BIO_clear_flags(bio, BIO_RETRY_FLAGS);
    if (!reserve(&t->out, (size_t)size)) {
        t->sys_errno = ENOMEM;
        return -1;
    }
    memcpy(t->out.data + t->out.size, data, (size_t)size);
    t->out.size += (size_t)size;
    return size;
}

static long bio_control(BIO *bio, int command, long number, void *pointer)
{
    (void)bio;
    (void)number;
    (void)pointer;
    return command == BIO_FLUSH; /* tls_flush() does */
}

BIO_METHOD *tls_method_new(const openssl *o)
{
    BIO_METHOD *m = o->BIO_meth_new(o->BIO_get_new_index() | BIO_SOURCE_SINK, "fanin");
    if (m && o->BIO_meth_set_read(m, bio_read) && o->BIO_meth_set_write(m, bio_write) &&
        o->BIO_meth_set_ctrl(m, bio_control))
        return m;
    if (m)
        o->BIO_meth_free(m);
    return NULL;
}

/* --------------------------------------------------------------------- life */

tls *tls_new(const tls_end *end, int fd)
{
    const openssl *o = end->o;
    tls *t = calloc(1, sizeof *t);
    if (!t)
        return NULL;
    t->end = end;
    t->fd = fd;
    t->ssl = end->certificates ? certificates_ssl(end->certificates)
                               : o->SSL_new(end->context);
    BIO *bio = t->ssl ? o->BIO_new(end->method) : NULL;
    if (!bio || o->SSL_set_ex_data(t->ssl, TLS_DATA, t) != 1) {
        tls_free(&t);
        return NULL;
    }
    o->BIO_set_data(bio, t);
    o->BIO_set_init(bio, 1);
    o->SSL_set_bio(t->ssl, bio, bio); /* frees it with the SSL */
    if (end->is_rank)
        o->SSL_set_accept_state(t->ssl);
    else
        o->SSL_set_connect_state(t->ssl);
    return t;
}

void tls_free(tls **t)
{
    tls *old = t ? *t : NULL;
    if (!old)
        return;
    *t = NULL;
    if (old->ssl)
        old->end->o->SSL_free(old->ssl);
    free(old->in.data);
    free(old->out.data);
    free(old->small);
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

static void fail(tls *t)
{
    unsigned long code = t->end->o->ERR_peek_error();
    if (!t->why)
        t->why = t->end->o->ERR_reason_error_string(code);
    if (t->fault != TLS_FINE) /* it is known */
        return;
    bool broken = t->closed || t->sys_errno != 0;
    t->fault = broken                 ? TLS_CLOSED
               : t->end->certificates ? fault_of_certificates(REASON_OF(code))
                                      : fault_of_keys(t, REASON_OF(code));
}

tls_step tls_handshake(tls *t)
{
    const openssl *o = t->end->o;
    o->ERR_clear_error();
    t->sys_errno = 0;
    int result = o->SSL_do_handshake(t->ssl);
    bool waits = result != 1 && o->SSL_get_error(t->ssl, result) == ERROR_WANT_READ;
    if (result != 1 && !waits) {
        fail(t);
        (void)tls_flush(t);
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
    t->up = result == 1;
    return t->up ? TLS_UP : TLS_WAIT;
}

bool tls_is_up(const tls *t)
{
    return t && t->up;
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
    *size_out = left(&t->in);
    return t->in.data + t->in.used;
}

const uint8_t *tls_last_words(const tls *t, size_t *size_out)
{
    *size_out = left(&t->out);
    return t->out.data + t->out.used;
}

/* ----------------------------------------------------------------- receiving */

/* Nothing came, and why: as recv() says it. */
static ssize_t nothing(tls *t, int result)
{
    int kind = t->end->o->SSL_get_error(t->ssl, result);
    if (kind == ERROR_ZERO_RETURN || t->closed)
        return 0;
    int code = t->sys_errno ? t->sys_errno : EBADMSG;
    if (kind == ERROR_WANT_READ)
        code = EAGAIN;
    else
        fail(t); /* why */
    errno = code;
    return -1;
}

ssize_t tls_receive(tls *t, int fd, void *to, size_t room)
{
    if (!t)
        return recv(fd, to, room, MSG_DONTWAIT);
    const openssl *o = t->end->o;
    size_t have = 0, step;
    int result = 1;
    o->ERR_clear_error();
    t->sys_errno = 0;
    while (have < room && result == 1) {
        result = o->SSL_read_ex(t->ssl, (uint8_t *)to + have, room - have, &step);
        have += result == 1 ? step : 0;
    }
    if (left(&t->out) > 0)
        (void)tls_flush(t); /* what the other asked for: keys of its own */
    return have > 0 || room == 0 ? (ssize_t)have : nothing(t, result);
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
    return t && t->up && (left(&t->in) > 0 || t->end->o->SSL_pending(t->ssl) > 0);
}

/* ------------------------------------------------------------------- sending */

int tls_flush(tls *t)
{
    if (!t)
        return 0;
    while (left(&t->out) > 0) {
        ssize_t n = send(t->fd, t->out.data + t->out.used, left(&t->out),
                         MSG_NOSIGNAL | MSG_DONTWAIT);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            return errno == EAGAIN ? 0 : errno;
        t->out.used += (size_t)n;
    }
    return 0;
}

size_t tls_unsent(const tls *t)
{
    return t ? left(&t->out) : 0;
}

/* Of what is not taken yet: where it is. */
typedef struct place {
    const struct iovec *iov;
    int n;
    size_t at; /* in the first */
} place;

/* The next bytes, at most a record's: where they lie, or copied together if they are in short runs. */
static const void *next_bytes(tls *t, place *from, size_t most, size_t *size_out)
{
    most = most < RECORD ? most : RECORD;
    const uint8_t *at = (const uint8_t *)from->iov->iov_base + from->at;
    size_t whole = from->iov->iov_len - from->at;
    if (whole >= most || from->n == 1) {
        *size_out = whole < most ? whole : most;
        from->at += *size_out;
        return at;
    }
    if (!t->small && !(t->small = malloc(RECORD)))
        return NULL;
    size_t have = 0;
    while (from->n > 0 && have < most) {
        whole = from->iov->iov_len - from->at;
        size_t step = whole < most - have ? whole : most - have;
        memcpy(t->small + have, (const uint8_t *)from->iov->iov_base + from->at, step);
        have += step;
        from->at += step;
        if (from->at < from->iov->iov_len)
            break;
        from->iov++;
        from->n--;
        from->at = 0;
    }
    *size_out = have;
    return t->small;
}

/* False: errno. */
static bool encrypt(tls *t, const void *data, size_t size)
{
    const openssl *o = t->end->o;
    size_t written;
    if (t->written >= KEY_BYTES) {
        t->written = 0;
        o->SSL_key_update(t->ssl, KEY_UPDATE_ALONE);
    }
    t->written += size;
    if (data && o->SSL_write_ex(t->ssl, data, size, &written) == 1)
        return true; /* all of it: what it is written to is never full */
    errno = data && !t->sys_errno ? EIO : ENOMEM;
    return false;
}

static void skip_empty(place *p)
{
    while (p->n > 0 && p->at == p->iov->iov_len) {
        p->iov++;
        p->n--;
        p->at = 0;
    }
}

ssize_t tls_send(tls *t, int fd, const struct iovec *iov, int n)
{
    if (!t) {
        struct msghdr message = {.msg_iov = (struct iovec *)(uintptr_t)iov,
                                 .msg_iovlen = (size_t)n};
        return sendmsg(fd, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    }
    t->end->o->ERR_clear_error();
    t->sys_errno = 0;
    int failed = tls_flush(t);
    if (failed || left(&t->out) > 0) {
        errno = failed ? failed : EAGAIN;
        return -1;
    }
    place from = {iov, n, 0};
    size_t taken = 0, size = 0;
    for (skip_empty(&from); from.n > 0 && taken < TLS_SEND_MOST; skip_empty(&from)) {
        if (taken == 0 && !reserve(&t->out, RECORD + RECORD_COAT)) {
            errno = ENOMEM;
            return -1;
        }
        const void *data = next_bytes(t, &from, TLS_SEND_MOST - taken, &size);
        if (!encrypt(t, data, size))
            return -1;
        taken += size;
    }
    failed = tls_flush(t);
    errno = failed;
    return failed ? -1 : (ssize_t)taken;
}

size_t tls_memory(const tls *t)
{
    /* OpenSSL's own: an SSL, and records' buffers while they are in use. */
    return t ? sizeof *t + t->in.capacity + t->out.capacity + 4 * RECORD : 0;
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
    return tls_is_up(t) && !t->end->certificates && proof_of(t, t->end->key, out);
}

/* In a time that does not depend on where they differ. */
static bool is_same(const uint8_t *a, const uint8_t *b, size_t size)
{
    unsigned differ = 0;
    for (size_t i = 0; i < size; i++)
        differ |= a[i] ^ b[i];
    return differ == 0;
}

static bool is_rank_of_job(const tls *t, uint32_t rank)
{
    identity wanted = *tls_identity(t);
    wanted.role = AS_RANK;
    wanted.rank = rank;
    return tls_is_up(t) && certificates_peer_is(t->end->o, t->ssl, &wanted);
}

bool tls_check_rank(const tls *t, const uint8_t world_id[16], uint32_t rank,
                    const uint8_t *proof, size_t size)
{
    char identity[IDENTITY_MOST];
    uint8_t key[KEY_SIZE], expected[TLS_PROOF_SIZE];
    if (t->end->certificates)
        return is_rank_of_job(t, rank);
    rank_identity(world_id, rank, identity);
    bool good = size == TLS_PROOF_SIZE && tls_is_up(t) &&
                launch_key(t->end->o, t->end->key, identity, key) &&
                proof_of(t, key, expected) && is_same(expected, proof, size);
    explicit_bzero(key, sizeof key);
    return good;
}
