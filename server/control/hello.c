/* SPDX-License-Identifier: Apache-2.0 */
#include "control/requests.h"
#include "control/evict.h"
#include "control/open_path.h"
#include "control/secure.h"
#include "guests/admission.h"
#include "guests/peer_log.h"
#include "error_set.h"

#include <stdio.h>
#include <string.h>

static void reply_hello(session *s, uint64_t request, const msg_hello *hello,
                        const body *in, const uint8_t id[16])
{
    const fanin_server *server = s->control->server;
    msg_hello_ok m = {.version = VERSION_MAX,
                      .features = FEATURES,
                      .rank = server->rank,
                      .world_size = server->world_size,
                      .paths = offered_paths(s),
                      .lease_ms = server->lease_ms};
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
    if (m.version_min > VERSION_MAX || m.version_max < VERSION_MIN) {
        char why[160];
        snprintf(why, sizeof why,
                 "this server speaks protocol versions %d to %d, the client %u to %u",
                 VERSION_MIN, VERSION_MAX, (unsigned)m.version_min,
                 (unsigned)m.version_max);
        session_reject(s, f->request, FANIN_ERR_VERSION, why);
    } else if (m.role == ROLE_DATA) {
        open_data(s, f->request, &m, in);
    } else {
        open_control(s, f->request, &m, in);
    }
}
