/* SPDX-License-Identifier: Apache-2.0 */
#include "net/trust.h"

#include "error_set.h"
#include "neighbour.h"
#include <errno.h>
#include <poll.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

/* ------------------------------- what the kernel tells of who listens */

bool trust_listener(connection *c)
{
    const connection_shared *shared = c->shared;
    unsigned differs = neighbour_differs(c->source.fd) & NEIGHBOUR_STRANGER;
    if (differs == 0 || (differs & NEIGHBOUR_UID))
        return differs == 0;
    if (shared->trust_containers)
        return true;
    c->stranger = neighbour_why(differs);
    if (differs & ~*shared->told) {
        *shared->told |= differs;
        log_write(&shared->log, FANIN_LOG_INFO, "unix-stranger",
                  "%s is asked over TCP: on its Unix socket %s; %s", c->text,
                  c->stranger,
                  error_remedy(neighbour_lacks(differs), NEIGHBOUR_REMEDY));
    }
    return false;
}

bool trust_name(const connection *c, const msg_hello_ok *peer)
{
    char asked[SOCKET_TEXT];
    socket_listen_text(&c->tcp, asked);
    return !c->is_unix || strcmp(asked, peer->address) == 0;
}

/* The kernel tells nothing of who has closed its end. */
static bool is_closed_there(int fd)
{
    struct pollfd end = {fd, POLLRDHUP, 0};
    return poll(&end, 1, 0) > 0;
}

/* To see whose process it is takes a descriptor. To lack one may pass, and is no reason to trust
   other users. */
static void explain_shortage(int code, secure_fault *why)
{
    char reason[128];
    *why = (secure_fault){.status = FANIN_ERR_UNREACHABLE};
    snprintf(why->what, sizeof why->what,
             "cannot be told from another user's process: %s",
             strerror_r(code, reason, sizeof reason));
    snprintf(why->remedy, sizeof why->remedy, "%s", error_remedy(code, ""));
}

bool trust_owner(const connection *c, int fd, secure_fault *why)
{
    uid_t uid;
    if (c->shared->trust_other_users || !socket_is_loopback(&c->tcp))
        return true;
    bool told = socket_owner(fd, &uid);
    int code = errno;
    if (told && (uid == geteuid() || uid == 0))
        return true;
    *why =
        (secure_fault){FANIN_ERR_AUTH,
                       "may be any user's process: the kernel does not say whose it is",
                       "run both as one user, or take it as it is: trust_other_users, "
                       "--trust-other-users, FANIN_TRUST_OTHER_USERS=1"};
    if (told)
        snprintf(
            why->what, sizeof why->what,
            "is a process of uid %u, and this one is of uid %u: any user can take a "
            "port of this host",
            (unsigned)uid, (unsigned)geteuid());
    else if (is_closed_there(fd))
        *why = (secure_fault){FANIN_ERR_CLOSED,
                              "closed the connection when it was made", STOPPED_REMEDY};
    else if (error_remedy(code, NULL))
        explain_shortage(code, why);
    return false;
}

/* A port and a name are free again while their rank ends, which still answers by the connections
   that it has. */
static bool is_same_process(const connection *c, int fd, secure_fault *why)
{
    uid_t uid;
    pid_t pid;
    if (socket_peer_credentials(fd, &uid, &pid) && uid == c->uid && pid == c->pid)
        return true;
    *why = (secure_fault){FANIN_ERR_CLOSED,
                          "has its Unix name no more: another process answers there",
                          "has the trainer just ended?"};
    return false;
}

bool connection_trusts(const connection *c, int fd, secure_fault *why)
{
    return c->is_unix ? is_same_process(c, fd, why) : trust_owner(c, fd, why);
}

bool connection_process(const connection *c, pid_t *pid_out)
{
    *pid_out = 0;
    return c->is_unix && c->source.fd >= 0 &&
           socket_peer_credentials(c->source.fd, NULL, pid_out);
}

/* --------------------------------------------------------------------- TLS */

static void say(secure_fault *out, fanin_status status, const char *remedy,
                const char *format, ...) __attribute__((format(printf, 4, 5)));
static void say(secure_fault *out, fanin_status status, const char *remedy,
                const char *format, ...)
{
    va_list list;
    va_start(list, format);
    vsnprintf(out->what, sizeof out->what, format, list);
    va_end(list);
    out->status = status;
    snprintf(out->remedy, sizeof out->remedy, "%s", remedy);
}

/* What a rank that speaks no TLS said: nobody proves that it was the rank. */
static void explain_plain(const tls *t, secure_fault *out)
{
    size_t size;
    frame f;
    msg_error m;
    const char *why;
    const uint8_t *came = tls_plain(t, &size);
    body b = {0};
    bool is_frame = size >= FRAME_SIZE && frame_decode(came, &f, &why) == FANIN_OK &&
                    f.type == MSG_ERROR && f.length <= size - FRAME_SIZE;
    if (is_frame)
        b = (body){.data = came + FRAME_SIZE, .size = f.length};
    bool is_error = is_frame && decode_error(&b, &m) == FANIN_OK && m.code < 0;
    if (is_error && m.code != FANIN_ERR_PROTOCOL && m.code != FANIN_ERR_VERSION) {
        say(out, m.code, m.remedy, "refuses, without TLS: %.300s", m.message);
        return;
    }
    bool has_secret = !tls_identity(t);
    say(out, FANIN_ERR_AUTH,
        has_secret ? "give the rank the launch's secret, or this process none"
                   : "give the rank a certificate, or this process none",
        "does not speak TLS, and this process has a %s (%.200s)",
        has_secret ? "secret" : "certificate", tls_file(t));
}

/* Neither what is between nor a lie: an end cannot go on. */
static bool explain_end(const tls *t, secure_fault *out)
{
    fanin_error lack = FANIN_ERROR_INIT;
    switch (tls_failed(t)) {
    case TLS_MEMORY:
        say(out, error_set_memory(&lack), lack.remedy,
            "cannot be secured by TLS: this process is out of memory");
        return true;
    case TLS_GAVE_UP:
        say(out, tls_is_up(t) ? FANIN_ERR_CLOSED : FANIN_ERR_UNREACHABLE,
            "is its host out of memory? if it is a rank, its log says why",
            "gave up the secured connection: it says that it cannot go on (%.200s)",
            tls_why(t));
        return true;
    default:
        return false;
    }
}

static void explain_broken(const tls *t, secure_fault *out)
{
    say(out, FANIN_ERR_AUTH,
        "is this port a fanin parameter server, and does nothing on the way alter what "
        "passes?",
        "cannot be secured by TLS: %.200s", tls_why(t));
}

static void explain_certificates(const tls *t, secure_fault *out)
{
    const char *file = tls_file(t);
    char own[IDENTITY_URI_MOST];
    identity_text(tls_identity(t), own);
    switch (tls_failed(t)) {
    case TLS_NO_SECRET:
        say(out, FANIN_ERR_AUTH,
            "give the rank a certificate (--tls-cert, FANIN_TLS_CERT), or this process "
            "none",
            "has no certificate, and this process has one (%.200s)", file);
        return;
    case TLS_UNTRUSTED:
        say(out, FANIN_ERR_AUTH,
            "is its authority in this process's tls_ca (FANIN_TLS_CA), are its dates "
            "good?",
            "shows a certificate for %.150s that is not believed: %.80s", tls_found(t),
            tls_why(t));
        return;
    case TLS_OTHER_NAME:
        say(out, FANIN_ERR_AUTH,
            tls_expects_relay(t)
                ? "give the engine's worker a certificate that names relay/NAME, too"
                : "is this port a rank of the job?",
            "shows a certificate for %.150s, and is to be a %s of \"%s\"", tls_found(t),
            tls_expects_relay(t) ? "relay" : "rank", tls_identity(t)->job);
        return;
    case TLS_DISBELIEVED:
        say(out, FANIN_ERR_AUTH,
            "is its authority in the rank's tls_ca, are its dates good, is it for "
            "clients too?",
            "does not believe the certificate %.150s (\"%s\"): %.80s", file, own,
            tls_why(t));
        return;
    case TLS_UNSHOWN:
        say(out, FANIN_ERR_AUTH,
            "it may have a launch's secret: give both ends certificates, or both the "
            "secret",
            "takes no certificates (this process's: %.200s)", file);
        return;
    default:
        explain_broken(t, out);
    }
}

static void explain_keys(const tls *t, secure_fault *out)
{
    const char *file = tls_file(t);
    switch (tls_failed(t)) {
    case TLS_NO_SECRET:
        say(out, FANIN_ERR_AUTH,
            "give the rank the launch's secret (--secret-file, FANIN_SECRET_FILE), or "
            "this process none",
            "has no secret, and this process has one (%.200s)", file);
        return;
    case TLS_OTHER_SECRET:
        say(out, FANIN_ERR_AUTH, "give both the secret file of one launch",
            "has another secret than %.200s (identity \"%s\")", file, IDENTITY_READER);
        return;
    case TLS_OTHER_IDENTITY:
        say(out, FANIN_ERR_AUTH, "use the same fanin release on both ends",
            "does not know the identity \"%s\" (secret %.200s)", IDENTITY_READER, file);
        return;
    case TLS_UNPROVEN:
        say(out, FANIN_ERR_AUTH,
            "is this port a rank of the launch, and has it a secret, not a "
            "certificate?",
            "did not use the secret of %.200s", file);
        return;
    default:
        explain_broken(t, out);
    }
}

void secure_explain(const tls *t, secure_fault *out)
{
    out->remedy[0] = '\0';
    if (explain_end(t, out))
        return;
    if (tls_failed(t) == TLS_PLAIN)
        explain_plain(t, out);
    else if (tls_failed(t) == TLS_CLOSED)
        say(out, FANIN_ERR_UNREACHABLE, CLOSED_REMEDY,
            "closed the connection before it was secured");
    else if (tls_identity(t))
        explain_certificates(t, out);
    else
        explain_keys(t, out);
}

bool secure_refused(const tls *t, secure_fault *out)
{
    if (!t || tls_failed(t) != TLS_DISBELIEVED)
        return false;
    secure_explain(t, out);
    return true;
}

bool secure_broken(const tls *t, secure_fault *out)
{
    const char *why = tls_broken(t);
    if (!why)
        return false;
    if (explain_end(t, out))
        return true;
    say(out, FANIN_ERR_TRANSPORT, WAY_REMEDY,
        "and this process cannot go on by TLS: %.200s", why);
    return true;
}

bool secure_proven(tls *t, const msg_hello_ok *peer)
{
    const bytes_view proof = peer->proof;
    if (!t || !peer->relay)
        return !t ||
               tls_check_rank(t, peer->world_id, peer->rank, proof.data, proof.size);
    return tls_check_relay(t, peer->world_id, peer->incarnation, proof.data,
                           proof.size);
}

void secure_explain_unproven(const tls *t, const msg_hello_ok *peer, secure_fault *out)
{
    char name[IDENTITY_MOST];
    if (explain_end(t, out))
        return;
    if (tls_identity(t)) {
        say(out, FANIN_ERR_AUTH,
            "give each rank its own certificate, or all one for any rank (rank/*)",
            "says that it is rank %u, and its certificate is not "
            "\"fanin://%s/rank/%u\"",
            (unsigned)peer->rank, tls_identity(t)->job, (unsigned)peer->rank);
        return;
    }
    if (peer->relay)
        relay_identity(peer->world_id, peer->incarnation, name);
    else
        rank_identity(peer->world_id, peer->rank, name);
    say(out, FANIN_ERR_AUTH,
        peer->relay
            ? "somebody plays a relay: make a new secret, and find out who has this one"
            : "somebody plays a rank: make a new secret, and find out who has this "
              "one",
        "does not prove to be \"%s\": it holds a reader's key of the secret %.200s, "
        "and not that %s's",
        name, tls_file(t), peer->relay ? "relay" : "rank");
}
