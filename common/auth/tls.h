/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file
 * TLS 1.3, by a key that both ends hold already or by certificates, on a non-blocking socket that
 * stays its owner's. A connection's code reads and writes by tls_receive() and tls_send(), which do
 * for a NULL tls what the socket does: so it is the same code with a secret and without one.
 *
 * A tls belongs to one thread at a time; an end is shared, and does not change once it is made.
 */
#ifndef TLS_H
#define TLS_H

#include "certificates.h"
#include "secret_file.h"
#include <sys/types.h>
#include <sys/uio.h>

/** Plain bytes that one tls_send() takes at most: what begin_update may have to wait for is
    encrypted and sent in well under 1 ms. */
#define TLS_SEND_MOST ((size_t)256 << 10)
/** First byte of a ClientHello; no frame begins with it. */
#define TLS_FIRST_BYTE 0x16
/** What a rank without a secret says to a ClientHello: a fatal alert, unknown_psk_identity. */
#define TLS_NO_SECRET_ALERT "\x15\x03\x03\x00\x02\x02\x73"
#define TLS_ALERT_SIZE 7

/** A server's keys, or a client's. */
typedef struct tls_end tls_end;
/** One connection. */
typedef struct tls tls;

/** An end by the launch's secret in @p file, which is also what messages call it. @p named: whom
    the rank or relay is to be (rank_identity(), relay_identity()); it keeps the keys of readers and
    its own alone. NULL: a reader's, which keeps what every rank's proof is checked with.
    FANIN_ERR_UNSUPPORTED: no OpenSSL, or none that does TLS 1.3; openssl_load()'s;
    secret_file_read()'s; FANIN_ERR_MEMORY. */
fanin_status tls_end_by_secret(const char *file, const char *named, tls_end **out,
                               fanin_error *error);
/** An end of certificates, a rank's or a reader's as @p wanted says. certificates_new()'s errors.
    */
fanin_status tls_end_by_certificate(const certificate_files *files,
                                    const identity *wanted, const logger *log,
                                    tls_end **out, fanin_error *error);
/** Wipes the keys. No tls of it is left. */
void tls_end_free(tls_end **end);
/** The secret's, or the certificate's. */
const char *tls_end_file(const tls_end *end);
/** Who it is by its certificate; NULL: it has a secret. */
const identity *tls_end_identity(const tls_end *end);

/** A connection of @p end on @p fd, to be shaken hands. NULL: no memory. */
tls *tls_new(const tls_end *end, int fd);
/** A reader's: the other end has to be a relay, and no rank. Before its handshake. */
void tls_expect_relay(tls *t);
bool tls_expects_relay(const tls *t);
/** Wipes it; leaves the socket. NULL and *t == NULL are fine. */
void tls_free(tls **t);

typedef enum tls_step {
    TLS_UP, /**< bytes may go */
    TLS_WAIT /**< for the socket: readable, or writable too if tls_unsent() */,
    TLS_FAILED,
} tls_step;

/** Goes on with the handshake as far as the socket lets it. */
tls_step tls_handshake(tls *t);
bool tls_is_up(const tls *t); /**< of NULL too */

/** Why a handshake has failed; TLS_MEMORY and TLS_GAVE_UP also what came after it. */
typedef enum tls_fault {
    TLS_FINE,
    TLS_MEMORY,       /**< this end lacks memory: nobody else is at fault */
    TLS_GAVE_UP,      /**< the other says that it cannot go on, mostly for the same */
    TLS_CLOSED,       /**< the other closed, or the connection broke */
    TLS_PLAIN,        /**< the other speaks, but not TLS: tls_plain() is what it said */
    TLS_NO_SECRET,    /**< the other says that it has none */
    TLS_OTHER_SECRET, /**< the keys differ */
    TLS_OTHER_IDENTITY, /**< the identity is not one that the rank knows */
    TLS_UNPROVEN,       /**< the other did without the key */
    TLS_BROKEN,         /**< tls_why() */
    /* Of ends with certificates. */
    TLS_UNSHOWN, /**< the other shows no certificate, or takes none */
    TLS_UNTRUSTED, /**< the other's certificate, tls_found(), is not believed: tls_why() */
    TLS_OTHER_NAME, /**< it is believed, and for somebody else: tls_found() */
    TLS_DISBELIEVED, /**< the other says that it does not believe this end's: tls_why(). A reader
                          may be told once it is up: tls_receive() fails with EBADMSG */
} tls_fault;
tls_fault tls_failed(const tls *t);
const char *tls_file(const tls *t);         /**< tls_end_file() of its end */
const identity *tls_identity(const tls *t); /**< tls_end_identity() of its end */
/** Once it was up: why nothing goes by it any more although neither end closed it, mostly because
    what came is not what was sent. NULL, and of NULL: that is not so. Static. */
const char *tls_broken(const tls *t);
/** Whom the other's certificate is for, for people. Valid until the tls is freed. */
const char *tls_found(const tls *t);
/** OpenSSL's words, static. */
const char *tls_why(const tls *t);
/** What has come instead of TLS. Valid until the tls is freed. */
const uint8_t *tls_plain(const tls *t, size_t *size_out);
/** What is still to be told to the other, encrypted or not: an alert. Valid until the tls is freed.
    */
const uint8_t *tls_last_words(const tls *t, size_t *size_out);

/** Like recv(MSG_DONTWAIT): bytes; 0: the other closed; -1 with EAGAIN, EINTR or why the connection
    is of no use any more. EBADMSG: what came is not what was sent. */
ssize_t tls_receive(tls *t, int fd, void *to, size_t room);
/** The same into several places, like readv(). */
ssize_t tls_receive_into(tls *t, int fd, struct iovec *iov, int n);
/** Like sendmsg(MSG_DONTWAIT | MSG_NOSIGNAL): bytes that were taken, at most TLS_SEND_MOST unless
    the kernel seals them. What is taken may still be here: tls_unsent(). -1: EAGAIN (there is no
    room, or something is unsent), EINTR, or why the connection is of no use any more. */
ssize_t tls_send(tls *t, int fd, const struct iovec *iov, int n);
/** Sends what is left of what was taken. 0, or the errno of a broken connection. */
int tls_flush(tls *t);

/** Bytes of what was taken that are still here: while there are any, the socket is to be waited for
    until it is writable, to call tls_flush(). Of NULL: 0. */
size_t tls_unsent(const tls *t);
/** Whether tls_receive() has bytes of which the socket will not tell. Of NULL: no. */
bool tls_pending(const tls *t);
/** Bytes of memory, about. Of NULL: 0. */
size_t tls_memory(const tls *t);

#define TLS_PROOF_SIZE 32
/** A rank's, or a relay's: that it has its own key, for this connection alone. False: no memory;
    and of NULL, and with certificates. */
bool tls_prove_rank(const tls *t, uint8_t out[TLS_PROOF_SIZE]);
/** A reader's: whether the proof is that of this rank of this world. With certificates there is no
    proof, and the rank's own says which rank of the job it is, of whatever world. False with
    TLS_MEMORY: that is not known. */
bool tls_check_rank(tls *t, const uint8_t world_id[16], uint32_t rank,
                    const uint8_t *proof, size_t size);
/** The same of a relay, after tls_expect_relay(). With certificates it is one of the job. */
bool tls_check_relay(tls *t, const uint8_t world_id[16], const uint8_t incarnation[16],
                     const uint8_t *proof, size_t size);

#endif
