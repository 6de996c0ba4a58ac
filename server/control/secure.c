/* SPDX-License-Identifier: Apache-2.0 */
#include "control/secure.h"
#include "control/reply.h"
#include "guests/peer_log.h"
#include "error_set.h"

#include <errno.h>
#include <stdio.h>

/* The session says no more than what is in its output, which is plain. */
static void refuse(session *s, const char *why)
{
    fanin_server *server = s->control->server;
    pthread_mutex_lock(&server->lock);
    server->stats.sessions_refused++;
    pthread_mutex_unlock(&server->lock);
    peer_log(server, s->from, FANIN_LOG_WARNING, "session-refused", "%s: %s", s->peer,
             why);
    tls_free(&s->tls);
    s->phase = SESSION_CLOSING;
    s->due = deadline_in_ms(LINGER_MS);
    session_send(s);
}

static void refuse_plain(session *s)
{
    fanin_error error = FANIN_ERROR_INIT;
    bool has_secret = !tls_end_identity(s->control->server->tls);
    const error_place place = {
        .phase = "connect",
        .remedy = has_secret
                      ? "give the launch's secret: --secret-file, or FANIN_SECRET_FILE"
                      : "give a certificate: --tls-cert, --tls-key and --tls-ca, or "
                        "FANIN_TLS_CERT, FANIN_TLS_KEY and FANIN_TLS_CA"};
    error_set(&error, FANIN_ERR_AUTH, &place, "this rank demands %s",
              has_secret ? "the launch's secret" : "a certificate");
    reply_error(s, 0, &error);
    refuse(s, has_secret ? "it connects without the launch's secret"
                         : "it connects without a certificate");
}

static void refuse_tls(session *s)
{
    buffer_append(&s->out.bytes, TLS_NO_SECRET_ALERT, TLS_ALERT_SIZE);
    refuse(s, "it demands a secret or a certificate, and this rank was given none");
}

static void handshake_failed(session *s)
{
    char why[512];
    const char *file = tls_end_file(s->control->server->tls);
    switch (tls_failed(s->tls)) {
    case TLS_OTHER_SECRET:
        snprintf(why, sizeof why,
                 "its secret is another than that of %.300s: is it of this launch?",
                 file);
        break;
    case TLS_OTHER_IDENTITY:
        snprintf(why, sizeof why, "it names itself otherwise than \"%s\"",
                 IDENTITY_READER);
        break;
    case TLS_UNPROVEN:
        snprintf(why, sizeof why, "it did without the launch's secret");
        break;
    case TLS_UNSHOWN:
        snprintf(why, sizeof why, "it shows no certificate");
        break;
    case TLS_UNTRUSTED:
        snprintf(why, sizeof why,
                 "its certificate, for %.200s, is not believed: %.100s",
                 tls_found(s->tls), tls_why(s->tls));
        break;
    case TLS_OTHER_NAME:
        snprintf(why, sizeof why,
                 "its certificate is for %.200s, and not for \"fanin://%s/reader\"",
                 tls_found(s->tls), tls_identity(s->tls)->job);
        break;
    case TLS_DISBELIEVED:
        snprintf(why, sizeof why, "it does not believe the certificate %.300s: %.100s",
                 file, tls_why(s->tls));
        break;
    case TLS_CLOSED:
        session_close(s, "the connection broke in the TLS handshake");
        return;
    case TLS_MEMORY:
        session_close(s, "out of memory");
        return;
    case TLS_GAVE_UP:
        session_close(s, "it says that it cannot go on with the TLS handshake");
        return;
    default:
        snprintf(why, sizeof why, "no TLS handshake: %.300s", tls_why(s->tls));
    }
    size_t size;
    const uint8_t *alert = tls_last_words(s->tls, &size);
    buffer_append(&s->out.bytes, alert, size);
    refuse(s, why);
}

/* The first byte tells what the client speaks. False: nothing has come, or it was refused. */
static bool choose(session *s)
{
    const tls_end *end = s->control->server->tls;
    uint8_t first;
    ssize_t n = recv(s->fd, &first, 1, MSG_PEEK | MSG_DONTWAIT);
    if (n < 0 && (errno == EAGAIN || errno == EINTR))
        return false;
    if (n <= 0) {
        session_close(s, NULL);
        return false;
    }
    bool is_tls = first == TLS_FIRST_BYTE;
    if (is_tls && !end)
        refuse_tls(s);
    else if (!is_tls && end)
        refuse_plain(s);
    else if (is_tls && !(s->tls = tls_new(end, s->fd)))
        session_close(s, "out of memory");
    else
        s->secured = !is_tls;
    return s->secured || s->tls;
}

bool session_secure(session *s)
{
    if (s->secured || s->phase != SESSION_HELLO)
        return true;
    if (!s->tls && !choose(s))
        return false;
    if (s->secured)
        return true;
    tls_step step = tls_handshake(s->tls);
    s->secured = step == TLS_UP;
    if (step == TLS_FAILED)
        handshake_failed(s);
    else if (step == TLS_WAIT)
        session_send(s);
    return s->secured;
}

void session_prove(session *s, uint8_t out[TLS_PROOF_SIZE], msg_hello_ok *m)
{
    if (!s->tls || tls_identity(s->tls))
        return;
    if (tls_prove_rank(s->tls, out))
        m->proof = (bytes_view){out, TLS_PROOF_SIZE};
    else
        s->out.bytes.failed = true;
}
