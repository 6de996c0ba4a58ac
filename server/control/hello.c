/* SPDX-License-Identifier: Apache-2.0 */
#include "control/requests.h"
#include "control/session.h"
#include "control/open_path.h"
#include "guests/admission.h"
#include "guests/peer.h"
#include "error_set.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

/* The hello_ok's proof of which rank this is, in out; empty without TLS, and with certificates.
   No memory: the output has failed, for whoever gets a hello_ok without it takes this rank for an
   impostor. */
static void session_prove(session *s, uint8_t out[TLS_PROOF_SIZE], msg_hello_ok *m)
{
    if (!s->tls || tls_identity(s->tls))
        return;
    if (tls_prove_rank(s->tls, out))
        m->proof = (bytes_view){out, TLS_PROOF_SIZE};
    else
        s->out.bytes.failed = true;
}

static void reply_hello(session *s, uint64_t request, const msg_hello *hello,
                        const body *in, const uint8_t id[16])
{
    const fanin_server *server = s->control->server;
    msg_hello_ok m = {.version = VERSION_MAX,
                      .features = FEATURES,
                      .rank = server->rank,
                      .world_size = server->world_size,
                      .paths = offered_paths(s),
                      .lease_ms = server->lease_ms,
                      .relay = server->flags & FANIN_SERVER_RELAY};
    memcpy(m.world_id, server->world_id, sizeof m.world_id);
    memcpy(m.incarnation, server->incarnation, sizeof m.incarnation);
    memcpy(m.session, id, sizeof m.session);
    snprintf(m.server_name, sizeof m.server_name, "%s_%u", server->name,
             (unsigned)server->rank);
    snprintf(m.software, sizeof m.software, "fanin %s", fanin_version());
    socket_listen_text(&server->address, m.address);
    if (server->ucx)
        snprintf(m.ucx_version, sizeof m.ucx_version, "%s", ucx_version(server->ucx));
    if (s->is_local || s->is_unix || (server->flags & FANIN_SERVER_TRUSTED_NETWORK))
        memcpy(m.host_id, server->host, sizeof m.host_id);
    if (server->ucx_failed)
        snprintf(m.warnings, sizeof m.warnings, "%s", server->ucx_why);
    uint8_t proof[TLS_PROOF_SIZE];
    session_prove(s, proof, &m);
    size_t answer = s->out.bytes.size;
    encode_hello_ok(&s->out.bytes, request, &m);
    if (hello->features & FEATURE_SEALS)
        framing_seal_hello_ok(&s->in, in, &s->out.bytes, answer);
}

static admission_room look_for_room(const session *s)
{
    fanin_server *server = s->control->server;
    pthread_mutex_lock(&server->lock);
    admission_room room = sessions_left(server, s->from);
    pthread_mutex_unlock(&server->lock);
    return room;
}

/* Who has been idle for long goes first. */
static bool has_room(const session *s)
{
    admission_room room = look_for_room(s);
    return room == ROOM_LEFT ||
           (evict_idle(s->control, s->from, room) && look_for_room(s) == ROOM_LEFT);
}

static void open_control(session *s, uint64_t request, const msg_hello *m,
                         const body *in)
{
    fanin_server *server = s->control->server;
    if (!has_room(s)) {
        pthread_mutex_lock(&server->lock);
        server->stats.sessions_refused++;
        pthread_mutex_unlock(&server->lock);
        char why[256];
        snprintf(why, sizeof why,
                 "no more sessions: the other connections are for the bytes of those "
                 "that are open; %s",
                 sessions_remedy(server));
        session_reject(s, request, FANIN_ERR_LIMIT, why);
        return;
    }
    pthread_mutex_lock(&server->lock);
    s->reader = reader_make(server, s->from);
    if (s->reader)
        count_session(server, s->from, 1);
    pthread_mutex_unlock(&server->lock);
    if (!s->reader) {
        session_reject(s, request, FANIN_ERR_MEMORY, "the server is out of memory");
        return;
    }
    memcpy(s->ucx_version, m->ucx_version, sizeof s->ucx_version);
    s->features = m->features & FEATURES;
    s->phase = SESSION_OPEN;
    s->in.longest = LIMIT_REQUEST;
    s->idle = deadline_in_ms(server->idle_ms);
    if (m->trace_id[0])
        snprintf(s->trace, sizeof s->trace, ", trace %s", m->trace_id);
    peer_log(server, s->from, FANIN_LOG_INFO, "session-open", "%s: %s%s", s->peer,
             m->software, s->trace);
    reply_hello(s, request, m, in, s->reader->id);
}

static void open_data(session *s, uint64_t request, const msg_hello *m, const body *in)
{
    fanin_server *server = s->control->server;
    pthread_mutex_lock(&server->lock);
    reader *r = reader_find(server, m->id);
    bool full = r && r->n_data >= SESSION_DATA;
    if (r && !full) {
        r->n_data++;
        r->references++;
    }
    pthread_mutex_unlock(&server->lock);
    if (!r || full) {
        session_reject(s, request, r ? FANIN_ERR_LIMIT : FANIN_ERR_CLOSED,
                       r ? "a session may have 16 data connections"
                         : "the session of this data connection is gone");
        return;
    }
    reply_hello(s, request, m, in, m->id);
    session_hand_over(s, r);
}

void handle_hello(session *s, const frame *f, body *in)
{
    msg_hello m;
    if (f->type != MSG_HELLO) {
        session_reject(s, f->request, FANIN_ERR_PROTOCOL,
                       "the first message of a connection must be hello");
        return;
    }
    fanin_status status = decode_hello(in, &m);
    if (status != FANIN_OK) {
        session_reject(s, f->request, status, in->why);
        return;
    }
    bool is_relay = s->control->server->flags & FANIN_SERVER_RELAY;
    if (m.version_min > VERSION_MAX || m.version_max < VERSION_MIN) {
        char why[160];
        snprintf(why, sizeof why,
                 "this server speaks protocol versions %d to %d, the client %u to %u",
                 VERSION_MIN, VERSION_MAX, (unsigned)m.version_min,
                 (unsigned)m.version_max);
        session_reject(s, f->request, FANIN_ERR_VERSION, why);
    } else if (is_relay && m.role == ROLE_CONTROL && !(m.features & FEATURE_RELAYS)) {
        session_reject(s, f->request, FANIN_ERR_UNSUPPORTED,
                       "this is a relay and no rank: take the addresses of the "
                       "trainer's ranks, or a newer fanin");
    } else if (m.role == ROLE_DATA) {
        open_data(s, f->request, &m, in);
    } else {
        open_control(s, f->request, &m, in);
    }
}

/* ----------------------------------------------------------------------- TLS */

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
