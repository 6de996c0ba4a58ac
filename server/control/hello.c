/* SPDX-License-Identifier: Apache-2.0 */
/* Who talks to whom, and which one-sided paths they may use. */
#include "control/session.h"
#include "error_set.h"

#include <stdio.h>
#include <string.h>
#include <sys/epoll.h>

/* ------------------------------------------------------------------- hello */

bool session_may_map(const session *s)
{
    return gpu_built() && s->trusted && s->is_unix;
}

/* Paths that open_path would grant this session, as bits. */
static uint32_t offered_paths(const session *s)
{
    const fanin_server *server = s->control->server;
    uint32_t paths = 1u << WIRE_PATH_STREAM;
    if (session_may_map(s))
        paths |= 1u << WIRE_PATH_CUDA_IPC;
    if (!server->ucx || !s->trusted ||
        !ucx_versions_match(ucx_version(server->ucx), s->ucx_version))
        return paths;
    if (s->is_unix)
        paths |= 1u << WIRE_PATH_CMA;
    return paths | 1u << WIRE_PATH_RDMA;
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
    if (s->is_local || s->trusted)
        memcpy(m.host_id, server->host, sizeof m.host_id);
    if (server->ucx_failed)
        snprintf(m.warnings, sizeof m.warnings, "%s", server->ucx_why);
    size_t answer = s->out.bytes.size;
    encode_hello_ok(&s->out.bytes, request, &m);
    if (hello->features & FEATURE_SEALS)
        framing_seal_hello_ok(&s->in, in, &s->out.bytes, answer);
}

/* Open sessions of one network peer, NULL: of all. */
static unsigned count_open(const struct control *c, const peer_count *of)
{
    unsigned n = 0;
    for (const session *s = c->sessions; s; s = s->next)
        n += s->reader && (!of || s->counted == of);
    return n;
}

/* A session without room for a data connection could look, and never pull: every other connection
   is kept for that. */
static bool has_room(const session *s)
{
    const fanin_server *server = s->control->server;
    unsigned all = server->max_sessions / 2, each = most_per_peer(server) / 2;
    return count_open(s->control, NULL) < all &&
           (!s->counted || count_open(s->control, s->counted) < each);
}

static void open_control(session *s, uint64_t request, const msg_hello *m,
                         const body *in)
{
    fanin_server *server = s->control->server;
    if (!has_room(s)) {
        pthread_mutex_lock(&server->lock);
        server->stats.sessions_refused++;
        pthread_mutex_unlock(&server->lock);
        session_fail(
            s, request, FANIN_ERR_LIMIT,
            "no more sessions: the other connections are for the bytes of those "
            "that are open; close idle clients, or raise max_sessions");
        return;
    }
    pthread_mutex_lock(&server->lock);
    s->reader = reader_make(server);
    pthread_mutex_unlock(&server->lock);
    if (!s->reader) {
        session_fail(s, request, FANIN_ERR_MEMORY, "the server is out of memory");
        return;
    }
    memcpy(s->ucx_version, m->ucx_version, sizeof s->ucx_version);
    s->features = m->features & FEATURES;
    s->phase = SESSION_OPEN;
    s->in.longest = LIMIT_REQUEST;
    s->idle = deadline_in_ms(server->idle_ms);
    log_write(&server->log, FANIN_LOG_INFO, "session-open", "%s: %s%s%s", s->peer,
              m->software, m->trace_id[0] ? ", trace " : "", m->trace_id);
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
        session_fail(s, request, r ? FANIN_ERR_LIMIT : FANIN_ERR_CLOSED,
                     r ? "a session may have 16 data connections"
                       : "the session of this data connection is gone");
        return;
    }
    reply_hello(s, request, m, in, m->id);
    session_hand_over(s, r);
}

void request_hello(session *s, const frame *f, body *in)
{
    msg_hello m;
    if (f->type != MSG_HELLO) {
        session_fail(s, f->request, FANIN_ERR_PROTOCOL,
                     "the first message of a connection must be hello");
        return;
    }
    fanin_status status = decode_hello(in, &m);
    if (status != FANIN_OK) {
        session_fail(s, f->request, status, in->why);
        return;
    }
    if (m.version_min > VERSION_MAX || m.version_max < VERSION_MIN) {
        char why[160];
        snprintf(why, sizeof why,
                 "this server speaks protocol versions %d to %d, the client %u to %u",
                 VERSION_MIN, VERSION_MAX, (unsigned)m.version_min,
                 (unsigned)m.version_max);
        session_fail(s, f->request, FANIN_ERR_VERSION, why);
    } else if (m.role == ROLE_DATA) {
        open_data(s, f->request, &m, in);
    } else {
        open_control(s, f->request, &m, in);
    }
}

/* --------------------------------------------------------------- open_path */

static fanin_status may_open_ipc(const session *s, fanin_error *error)
{
    error_place place = {.phase = "connect"};
    if (session_may_map(s))
        return FANIN_OK;
    if (gpu_built()) {
        place.remedy = "connect on the same host as the same user";
        return error_set(
            error, FANIN_ERR_UNSUPPORTED, &place,
            "cuda_ipc needs a session over the Unix socket of the same host, "
            "of the server's own user");
    }
    place.remedy = "install a build with CUDA in the trainer";
    return error_set(error, FANIN_ERR_UNSUPPORTED, &place,
                     "the server was built without CUDA");
}

static fanin_status may_open(const session *s, int32_t path, fanin_error *error)
{
    const fanin_server *server = s->control->server;
    error_place place = {.phase = "connect"};
    if (!s->trusted) {
        place.remedy = "connect on the same host as the same user, or declare the "
                       "network trusted in the trainer's configuration";
        return error_set(error, FANIN_ERR_UNSUPPORTED, &place,
                         "one-sided paths are for the server's own user");
    }
    if (path == WIRE_PATH_CMA && !s->is_unix)
        return error_set(error, FANIN_ERR_UNSUPPORTED, &place,
                         "cma needs a session over the Unix socket of the same host");
    if (!server->ucx)
        return error_set(error, FANIN_ERR_UNSUPPORTED, &place, "%s", server->ucx_why);
    if (!ucx_versions_match(ucx_version(server->ucx), s->ucx_version)) {
        place.remedy = "install the same major.minor version of UCX on both ends";
        return error_set(error, FANIN_ERR_UNSUPPORTED, &place,
                         "the server has UCX %s, the client %s",
                         ucx_version(server->ucx),
                         s->ucx_version[0] ? s->ucx_version : "none");
    }
    return FANIN_OK;
}

/* The UCX end of a domain, made when it is first asked for. */
static fanin_status obtain_ucx(struct control *c, domain in, ucx_server **out,
                               fanin_error *error)
{
    fanin_server *server = c->server;
    registrar *r = &server->registrar;
    if (!r->ucx[in]) {
        ucx_server *made;
        fanin_status status = ucx_server_create(server->ucx, in == DOMAIN_HOST,
                                                &server->log, &made, error);
        if (status != FANIN_OK)
            return status;
        struct epoll_event event = {.events = EPOLLIN, .data.ptr = &c->ucx_again};
        int fd = ucx_server_fd(made);
        if (fd >= 0 && epoll_ctl(c->epoll, EPOLL_CTL_ADD, fd, &event) != 0) {
            ucx_server_destroy(&made);
            return error_set(error, FANIN_ERR_IO, NULL,
                             "epoll refuses UCX's descriptor");
        }
        pthread_mutex_lock(&r->lock);
        r->ucx[in] = made;
        pthread_mutex_unlock(&r->lock);
        c->ucx_again = true;
    }
    *out = r->ucx[in];
    return FANIN_OK;
}

/* Makes the path usable and fills in the server's address. */
static fanin_status open_one_sided(session *s, const msg_open_path *m,
                                   msg_open_path *reply, fanin_error *error)
{
    domain in = m->path == WIRE_PATH_RDMA ? DOMAIN_RDMA : DOMAIN_HOST;
    ucx_server *end = NULL;
    if (m->path == WIRE_PATH_CUDA_IPC)
        return may_open_ipc(s, error);
    fanin_status status = may_open(s, m->path, error);
    if (status == FANIN_OK)
        status = obtain_ucx(s->control, in, &end, error);
    if (status == FANIN_OK)
        reply->address.data = ucx_server_address(end, &reply->address.size);
    return status;
}

fanin_status request_open_path(session *s, uint64_t request, body *in)
{
    fanin_error error = FANIN_ERROR_INIT;
    msg_open_path m;
    fanin_status status = decode_open_path(in, &m);
    if (status != FANIN_OK)
        return status;
    msg_open_path reply = {.path = m.path, .address = {(const uint8_t *)"", 0}};
    if (m.path != WIRE_PATH_STREAM)
        status = open_one_sided(s, &m, &reply, &error);
    if (status == FANIN_OK)
        encode_open_path(&s->out.bytes, request, MSG_OPEN_PATH_OK, &reply);
    else
        session_reply_error(s, request, &error);
    return FANIN_OK;
}

bool control_progress_ucx(struct control *c)
{
    registrar *r = &c->server->registrar;
    bool again = false;
    for (int i = 0; i < DOMAINS; i++)
        if (r->ucx[i] && !ucx_server_progress(r->ucx[i]))
            again = true;
    return again;
}
