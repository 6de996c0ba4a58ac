/* SPDX-License-Identifier: Apache-2.0 */
#include "net/secure.h"

#include <stdio.h>
#include <string.h>

static void say(secure_fault *out, fanin_status status, const char *remedy)
{
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
        snprintf(out->what, sizeof out->what, "refuses, without TLS: %.300s",
                 m.message);
        say(out, m.code, m.remedy);
        return;
    }
    snprintf(out->what, sizeof out->what,
             "does not speak TLS, and this process has a secret (%.200s)", tls_file(t));
    say(out, FANIN_ERR_AUTH, "give the rank the launch's secret, or this process none");
}

void secure_explain(const tls *t, secure_fault *out)
{
    const char *file = tls_file(t);
    out->remedy[0] = '\0';
    switch (tls_failed(t)) {
    case TLS_PLAIN:
        explain_plain(t, out);
        return;
    case TLS_CLOSED:
        snprintf(out->what, sizeof out->what,
                 "closed the connection before it was secured");
        say(out, FANIN_ERR_UNREACHABLE, "is the trainer process still alive?");
        return;
    case TLS_NO_SECRET:
        snprintf(out->what, sizeof out->what,
                 "has no secret, and this process has one (%.200s)", file);
        say(out, FANIN_ERR_AUTH,
            "give the rank the launch's secret (--secret-file, FANIN_SECRET_FILE), or "
            "this process none");
        return;
    case TLS_OTHER_SECRET:
        snprintf(out->what, sizeof out->what,
                 "has another secret than %.200s (identity \"%s\")", file,
                 IDENTITY_READER);
        say(out, FANIN_ERR_AUTH, "give both the secret file of one launch");
        return;
    case TLS_OTHER_IDENTITY:
        snprintf(out->what, sizeof out->what,
                 "does not know the identity \"%s\" (secret %.200s)", IDENTITY_READER,
                 file);
        say(out, FANIN_ERR_AUTH, "use the same fanin release on both ends");
        return;
    case TLS_UNPROVEN:
        snprintf(out->what, sizeof out->what, "did not use the secret of %.200s", file);
        say(out, FANIN_ERR_AUTH, "is this port a rank of the launch?");
        return;
    default:
        snprintf(out->what, sizeof out->what, "cannot be secured by TLS: %.200s",
                 tls_why(t));
        say(out, FANIN_ERR_AUTH, "is this port a fanin parameter server?");
    }
}

bool secure_proven(const tls *t, const msg_hello_ok *peer)
{
    return !t || tls_check_rank(t, peer->world_id, peer->rank, peer->proof.data,
                                peer->proof.size);
}

void secure_explain_unproven(const tls *t, const msg_hello_ok *peer, secure_fault *out)
{
    char identity[IDENTITY_MOST];
    rank_identity(peer->world_id, peer->rank, identity);
    snprintf(
        out->what, sizeof out->what,
        "does not prove to be \"%s\": it holds a reader's key of the secret %.200s, "
        "and not that rank's",
        identity, tls_file(t));
    say(out, FANIN_ERR_AUTH,
        "somebody plays a rank: make a new secret, and find out who has this one");
}
