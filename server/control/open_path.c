/* SPDX-License-Identifier: Apache-2.0 */
#include "control/open_path.h"
#include "control/session.h"
#include "shards/registration.h"
#include "error_set.h"
#include "neighbour.h"

#include <stddef.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/prctl.h>

/* Differences that keep a peer from a path. cma: the kernel judges each read by itself, as it
   judges ptrace. By rdma and cuda_ipc a peer reads and writes without asking it, so who sees other
   files, as containers do, gets neither; who has another ipc namespace was not meant to map memory.
   */
#define NO_CMA (NEIGHBOUR_STRANGER)
#define NO_RDMA (NEIGHBOUR_STRANGER | NEIGHBOUR_MOUNT_SPACE)
#define NO_CUDA_IPC (NO_RDMA | NEIGHBOUR_IPC_SPACE)

/* A peer that is one of the server's own but for the differences, which it is told. */
static fanin_status refuse_stranger(const session *s, unsigned differs,
                                    fanin_error *error)
{
    error_place place = {.phase = "connect", .remedy = NEIGHBOUR_REMEDY};
    return error_set(error, FANIN_ERR_UNSUPPORTED, &place,
                     "this path is for the server's own user: %s",
                     neighbour_why(s->differs & differs));
}

/* The way to device memory of this process. */
static fanin_status may_open_ipc(const session *s, fanin_error *error)
{
    error_place place = {.phase = "connect"};
    bool built = gpu_built();
    if (built && s->is_unix)
        return s->differs & NO_CUDA_IPC ? refuse_stranger(s, NO_CUDA_IPC, error)
                                        : FANIN_OK;
    place.remedy = built ? "connect on the same host as the same user"
                         : "install a build with CUDA in the trainer";
    return error_set(
        error, FANIN_ERR_UNSUPPORTED, &place, "%s",
        built ? "cuda_ipc needs a session over the Unix socket of the same host, "
                "of the server's own user"
              : "the server was built without CUDA");
}

/* The kernel reads: what counts is who asks, and that its Unix socket says who is read. */
static fanin_status may_open_cma(const session *s, fanin_error *error)
{
    error_place place = {.phase = "connect",
                         .remedy = "connect on the same host as the same user"};
    if (s->is_unix)
        return s->differs & NO_CMA ? refuse_stranger(s, NO_CMA, error) : FANIN_OK;
    return error_set(
        error, FANIN_ERR_UNSUPPORTED, &place,
        "cma needs a session over the Unix socket of the same host, of the "
        "server's own user");
}

/* Over the network whoever has proven itself, if the trainer calls that network trusted: remote
   keys of verbs write, and who is on the way could put an address of its own into a plain message.
   */
static fanin_status may_use_rdma(const session *s, fanin_error *error)
{
    const fanin_server *server = s->control->server;
    error_place place = {.phase = "connect",
                         .remedy = "connect on the same host as the same user, or "
                                   "declare the network trusted in the trainer's "
                                   "configuration"};
    if (s->is_unix)
        return s->differs & NO_RDMA ? refuse_stranger(s, NO_RDMA, error) : FANIN_OK;
    if (!(server->flags & FANIN_SERVER_TRUSTED_NETWORK))
        return error_set(error, FANIN_ERR_UNSUPPORTED, &place,
                         "one-sided paths are for the server's own user");
    if (server->tls)
        return FANIN_OK;
    place.remedy = "give ranks and workers the launch's secret, or certificates";
    return error_set(error, FANIN_ERR_UNSUPPORTED, &place,
                     "remote keys are given to those alone who prove who they are");
}

static fanin_status may_open_rdma(const session *s, fanin_error *error)
{
    const fanin_server *server = s->control->server;
    error_place place = {.phase = "connect"};
    fanin_status status = may_use_rdma(s, error);
    if (status != FANIN_OK)
        return status;
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

/* The version was compared when it was opened. */
static fanin_status may_have_rdma_keys(const session *s, fanin_error *error)
{
    if (!s->control->server->registrar.ucx)
        return FANIN_ERR_UNSUPPORTED;
    return may_use_rdma(s, error);
}

/* The UCX end, made when it is first asked for. */
static fanin_status obtain_ucx(struct control *c, ucx_server **out, fanin_error *error)
{
    fanin_server *server = c->server;
    registrar *r = &server->registrar;
    if (!r->ucx) {
        ucx_server *made;
        fanin_status status =
            ucx_server_create(server->ucx, UCX_PATH_RDMA, &server->log, &made, error);
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
        r->ucx = made;
        pthread_mutex_unlock(&r->lock);
        c->ucx_again = true;
    }
    *out = r->ucx;
    return FANIN_OK;
}

/* With yama's ptrace_scope 1 a process is read by its parents only, unless it says otherwise; it
   may name one reader, or all of its own user. Without yama the kernel does not know the call. */
static void let_own_user_read(void)
{
    (void)prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY, 0, 0, 0);
}

static fanin_status open_cma(session *s, msg_open_path *reply, fanin_error *error)
{
    (void)error;
    let_own_user_read();
    reply->witness = (uintptr_t)s->control->server->witness;
    return FANIN_OK;
}

static fanin_status open_rdma(session *s, msg_open_path *reply, fanin_error *error)
{
    ucx_server *end = NULL;
    fanin_status status = obtain_ucx(s->control, &end, error);
    if (status == FANIN_OK)
        reply->address.data = ucx_server_address(end, &reply->address.size);
    return status;
}

/* -------------------------------------------------------------------- paths */

/* A path besides stream, which every session has. */
typedef struct served_path {
    fanin_status (*may_open)(const session *s, fanin_error *error);
    /* NULL: whoever may open it */
    fanin_status (*may_have_keys)(const session *s, fanin_error *error);
    /* Makes it usable and fills in what the client needs to know of this process; may be NULL. */
    fanin_status (*open)(session *s, msg_open_path *reply, fanin_error *error);
    const key_kind *keys;
    size_t told_at, counted_at; /* in a msg_end and in the statistics */
} served_path;

static const served_path paths[] = {
    [WIRE_PATH_CMA] = {.may_open = may_open_cma,
                       .open = open_cma,
                       .keys = &base_keys,
                       .told_at = offsetof(msg_end, bytes_cma),
                       .counted_at = offsetof(fanin_server_stats, bytes_cma)},
    [WIRE_PATH_RDMA] = {.may_open = may_open_rdma,
                        .may_have_keys = may_have_rdma_keys,
                        .open = open_rdma,
                        .keys = &ucx_keys,
                        .told_at = offsetof(msg_end, bytes_rdma),
                        .counted_at = offsetof(fanin_server_stats, bytes_rdma)},
    [WIRE_PATH_CUDA_IPC] = {.may_open = may_open_ipc,
                            .keys = &ipc_keys,
                            .told_at = offsetof(msg_end, bytes_cuda_ipc),
                            .counted_at = offsetof(fanin_server_stats, bytes_cuda_ipc)},
};

#define PATHS_END ((int32_t)(sizeof paths / sizeof *paths))

uint32_t offered_paths(const session *s)
{
    uint32_t offered = 1u << WIRE_PATH_STREAM;
    for (int32_t i = 0; i < PATHS_END; i++)
        if (paths[i].may_open && paths[i].may_open(s, NULL) == FANIN_OK)
            offered |= 1u << i;
    return offered;
}

/* Whether the session may have remote keys of that path. */
static bool has_keys(const session *s, const served_path *p)
{
    return (p->may_have_keys ? p->may_have_keys : p->may_open)(s, NULL) == FANIN_OK;
}

fanin_status encode_regions(session *s, shard_catalog *catalog,
                            const msg_blob_request *m, buffer *out, fanin_error *error)
{
    const served_path *p = &paths[m->path];
    if (!p->keys)
        return region_set_encode(&catalog->regions, out, error);
    if (!has_keys(s, p))
        return error_set(error, FANIN_ERR_UNSUPPORTED, NULL,
                         "this session has not opened the path");
    key_reader to = {s->reader, s->peer, m->publication};
    s->control->ucx_again = true; /* it may register */
    return region_set_encode_keys(&s->control->server->registrar, &catalog->regions,
                                  p->keys, &to, out, error);
}

void count_one_sided(session *s, const lease *l, const msg_end *m)
{
    for (const served_path *p = paths; p < paths + PATHS_END; p++) {
        uint64_t told, counted, most = l->catalog->bytes;
        char *counter = (char *)&s->control->server->stats + p->counted_at;
        memcpy(&told, (const char *)m + p->told_at, sizeof told);
        if (!p->keys || told == 0 || !has_keys(s, p))
            continue;
        memcpy(&counted, counter, sizeof counted);
        told = told < most ? told : most;
        l->of->bytes_left += told;
        counted += told;
        memcpy(counter, &counted, sizeof counted);
    }
}

fanin_status handle_open_path(session *s, uint64_t request, body *in)
{
    fanin_error error = FANIN_ERROR_INIT;
    msg_open_path m;
    fanin_status status = decode_open_path(in, &m);
    if (status != FANIN_OK)
        return status;
    const served_path *p = &paths[m.path];
    msg_open_path reply = {.path = m.path, .address = {(const uint8_t *)"", 0}};
    if (p->may_open)
        status = p->may_open(s, &error);
    if (status == FANIN_OK && p->open)
        status = p->open(s, &reply, &error);
    if (status == FANIN_OK)
        encode_open_path(&s->out.bytes, request, MSG_OPEN_PATH_OK, &reply);
    else
        reply_error(s, request, &error);
    return FANIN_OK;
}

bool progress_ucx(struct control *c)
{
    const registrar *r = &c->server->registrar;
    return r->ucx && !ucx_server_progress(r->ucx);
}
