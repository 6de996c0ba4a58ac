/* SPDX-License-Identifier: Apache-2.0 */
/* A server's life: configuration, creation, the end. */
#include "control/control.h"
#include "guests/admission.h"
#include "guests/peer.h"
#include "wake.h"
#include "core/server_state.h"
#include "credentials.h"
#include "digest.h"
#include "error_set.h"
#include "host.h"
#include "log.h"
#include "log_choice.h"
#include "neighbour.h"
#include "publish/commit.h"
#include "publish/lease.h"
#include "shards/registration.h"
#include "stream/stream.h"
#include "text.h"
#include "thread.h"
#include "versioned.h"

#include <inttypes.h>
#include <arpa/inet.h>
#include <dirent.h>
#include <errno.h>
#include <fanin/server.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

/* --------------------------------------------------------------- descriptors */

/* Connections unless the configuration says how many: 512 workers have 5 each, also where all of
    them come from one address, which gets half. */
#define SESSIONS_DEFAULT 5120

#define DESCRIPTORS 48 /* of the server itself: listeners, epoll, UCX */
#define SESSIONS_LEAST 2

static rlim_t open_descriptors(void)
{
    DIR *d = opendir("/proc/self/fd");
    rlim_t count = 0;
    while (d && readdir(d))
        count++;
    if (d)
        closedir(d);
    return count;
}

static void choose_defaults(fanin_server_config *c, rlim_t most, rlim_t besides,
                            const logger *log, bool *limited_out)
{
    rlim_t room = most == RLIM_INFINITY ? SESSIONS_DEFAULT
                  : most > besides      ? most - besides
                                        : 0;
    *limited_out = room < SESSIONS_DEFAULT;
    c->max_sessions = !*limited_out           ? SESSIONS_DEFAULT
                      : room > SESSIONS_LEAST ? (uint32_t)room
                                              : SESSIONS_LEAST;
    if (*limited_out)
        log_write(log, FANIN_LOG_INFO, "descriptor-limit",
                  "%u connections at most, half of them from one peer; a worker "
                  "takes up to 5: `ulimit -Hn %" PRIu64
                  "` (LimitNOFILE, --ulimit nofile) before the trainer starts makes "
                  "room for %u",
                  (unsigned)c->max_sessions, (uint64_t)(SESSIONS_DEFAULT + besides),
                  SESSIONS_DEFAULT);
}

/*
 * Sets c->max_sessions, if it is 0, to as many as the hard limit of open files has room for, at
 * most SESSIONS_DEFAULT; then raises the soft limit, if need be, to what that takes. *limited_out:
 * there
 * was less room than that. FANIN_ERR_LIMIT: there is not room for c->max_sessions, or for 2.
 */
static fanin_status descriptors_allow(fanin_server_config *c, const logger *log,
                                      bool *limited_out, fanin_error *error)
{
    struct rlimit limit;
    rlim_t besides = open_descriptors() + REFUSED_PEERS + DESCRIPTORS;
    *limited_out = false;
    if (getrlimit(RLIMIT_NOFILE, &limit) != 0)
        limit.rlim_cur = limit.rlim_max = RLIM_INFINITY;
    if (c->max_sessions == 0)
        choose_defaults(c, limit.rlim_max, besides, log, limited_out);
    rlim_t need = besides + c->max_sessions;
    if (limit.rlim_cur == RLIM_INFINITY || limit.rlim_cur >= need)
        return FANIN_OK;
    rlim_t before = limit.rlim_cur;
    bool enough = limit.rlim_max == RLIM_INFINITY || limit.rlim_max >= need;
    limit.rlim_cur = need;
    if (enough && setrlimit(RLIMIT_NOFILE, &limit) == 0) {
        log_write(log, FANIN_LOG_INFO, "descriptor-limit",
                  "raised the soft limit of open files from %" PRIu64 " to %" PRIu64,
                  (uint64_t)before, (uint64_t)need);
        return FANIN_OK;
    }
    char remedy[160];
    snprintf(
        remedy, sizeof remedy,
        "raise it with `ulimit -n %" PRIu64 "` (hard limit), or %s", (uint64_t)need,
        c->flags & FANIN_SERVER_RELAY ? "pull without a relay"
                                      : "lower max_sessions of fanin_server_config");
    error_place place = {.phase = "create", .remedy = remedy};
    return error_set(error, FANIN_ERR_LIMIT, &place,
                     "%" PRIu64 " open files are allowed, %u sessions need %" PRIu64,
                     (uint64_t)limit.rlim_max, (unsigned)c->max_sessions,
                     (uint64_t)need);
}

#define BACKLOG 4096 /* a fleet connects at once; the kernel may allow less */
#define NAME_MOST 100
#define DATA_THREADS_MOST 16
#define WORLD_MOST 65536
#define DEFAULT_NAME "lora_param_server"
#define DEFAULT_BIND "127.0.0.1"
#define ALL_FLAGS                                                                      \
    (FANIN_SERVER_OPEN | FANIN_SERVER_TRUSTED_NETWORK | FANIN_SERVER_NO_UCX |          \
     FANIN_SERVER_TRUST_CONTAINERS | FANIN_SERVER_INSECURE | FANIN_SERVER_RELAY |      \
     FANIN_SERVER_NO_RELAYS)

/* ----------------------------------------------------------- configuration */

void fanin_server_config_init(fanin_server_config *config, size_t size)
{
    fanin_server_config defaults = {.name = DEFAULT_NAME,
                                    .bind = DEFAULT_BIND,
                                    .world_size = 1,
                                    .lease_ms = 1000,
                                    .max_memory = (uint64_t)256 << 20,
                                    .idle_ms = 300000,
                                    .peer_cpu = 50,
                                    .stranger_share_ms = 2000,
                                    .own_share_ms = SHARE_WINDOW_MS};
    versioned_init(config, size, &defaults, sizeof defaults);
}

static fanin_status bad(fanin_error *error, const char *why, const char *remedy)
{
    error_place place = {.phase = "create", .remedy = remedy};
    return error_set(error, FANIN_ERR_ARGUMENT, &place, "%s", why);
}

static fanin_status check_world(const fanin_server_config *c, fanin_error *error)
{
    static const uint8_t zero[FANIN_WORLD_ID_SIZE];
    error_place place = {.phase = "create"};
    if (c->world_size < 1 || c->world_size > WORLD_MOST)
        return error_set(error, FANIN_ERR_ARGUMENT, &place,
                         "the world size %u is not 1 to %d", (unsigned)c->world_size,
                         WORLD_MOST);
    if (c->rank >= c->world_size)
        return error_set(error, FANIN_ERR_ARGUMENT, &place,
                         "rank %u is not below the world size %u", (unsigned)c->rank,
                         (unsigned)c->world_size);
    if (memcmp(c->world_id, zero, sizeof zero) == 0)
        return bad(error, "the world id is not set",
                   "draw 16 random bytes on one rank and give them to all");
    if (c->base_port > 0 && c->base_port + c->rank > UINT16_MAX)
        return error_set(error, FANIN_ERR_ARGUMENT, &place,
                         "base port %u and rank %u are no port number",
                         (unsigned)c->base_port, (unsigned)c->rank);
    return FANIN_OK;
}

static fanin_status check_config(const fanin_server_config *c, fanin_error *error)
{
    fanin_status status = check_world(c, error);
    if (status != FANIN_OK)
        return status;
    if (c->flags & ~(uint32_t)ALL_FLAGS)
        return bad(error, "an unknown flag is set", NULL);
    if ((c->flags & FANIN_SERVER_RELAY) && c->world_size != 1)
        return bad(error, "a relay is rank 0 of 1", NULL);
    size_t length = c->name ? strlen(c->name) : 0;
    if (length == 0 || length > NAME_MOST || !utf8_valid(c->name, length))
        return bad(error, "the server's name is not 1 to 100 bytes of UTF-8", NULL);
    if (c->max_sessions == 1)
        return bad(error, "max_sessions is 1",
                   "a client needs a control and a data connection");
    if (c->data_threads > DATA_THREADS_MOST)
        return bad(error, "data_threads is not 1 to 16",
                   "leave it out, or 0: by the CPUs");
    if (c->max_memory < (c->data_threads ? c->data_threads : 1) * DATA_THREAD_MEMORY)
        return bad(error, "max_memory is below 8 MiB for each data thread", NULL);
    if (c->peer_cpu > 1000)
        return bad(error, "peer_cpu is not 0 to 1000 thousandths of a CPU", NULL);
    if (c->stranger_cpu > DATA_THREADS_MOST * 1000)
        return bad(error, "stranger_cpu is not 0 to 16000 thousandths of a CPU", NULL);
    if (c->max_bytes_per_second > 0 && c->max_bytes_per_second < LIMIT_LEAST)
        return bad(error, "max_bytes_per_second is below 1000000",
                   "give bytes, not gigabytes; 0: no limit");
    if (c->idle_ms == 0)
        return bad(error, "idle_ms is 0", NULL);
    if (c->stranger_share_ms > SHARE_WINDOW_MS || c->own_share_ms > SHARE_WINDOW_MS)
        return bad(error, "a share is not 0 to 60000 ms of a minute", NULL);
    if (c->nice < -20 || c->nice > 19)
        return bad(error, "nice is not -20 to 19",
                   "give 0 to 19: a larger one yields more");
    return FANIN_OK;
}

/* The address to listen on, and whether the flags allow it. */
static fanin_status check_bind(const fanin_server_config *c, socket_address *out,
                               fanin_error *error)
{
    char text[80];
    struct in6_addr any;
    snprintf(text, sizeof text, "%s", c->bind ? c->bind : "");
    text[strcspn(text, "%")] = '\0'; /* of a link-local address the interface */
    bool is_v6 = c->bind && inet_pton(AF_INET6, text, &any) == 1;
    if (!is_v6 && (!c->bind || inet_pton(AF_INET, c->bind, &any) != 1))
        return bad(error, "the address to bind to is not numeric",
                   "give an IPv4 or IPv6 address in numbers");
    snprintf(text, sizeof text, is_v6 ? "[%s]:%u" : "%s:%u", c->bind,
             c->base_port ? (unsigned)c->base_port + c->rank : 0);
    fanin_status status = socket_resolve(text, out, error);
    if (status != FANIN_OK)
        return status;
    bool open = c->flags & FANIN_SERVER_OPEN;
    if (socket_is_wildcard(out))
        return bad(error, "a wildcard address would listen on every interface",
                   "bind to the address of one interface");
    if (!open && !socket_is_loopback(out))
        return bad(
            error, "the address to bind to is not a loopback address",
            "to serve a network be open, with an allow-list: FANIN_SERVER_OPEN and "
            "allow, open=True and allow=, --open and --allow");
    if (open && (!c->allow || !*c->allow))
        return bad(error, "an open server needs an allow-list of networks",
                   "set allow, for example to \"10.0.0.0/8\"");
    return FANIN_OK;
}

/* ---------------------------------------------------------------- openness */

#define INSECURE                                                                       \
    "say that it may be so: FANIN_SERVER_INSECURE, insecure=True, --insecure, "        \
    "FANIN_INSECURE=1"

#define READ_BY_ALL                                                                    \
    "everybody in the networks allowed can read the weights, and anyone on the way "   \
    "can alter them"

/* The widest private networks are 10.0.0.0/8 and fc00::/7. */
static bool is_wider_than_private(const network *n)
{
    return n->prefix < (n->family == AF_INET ? 8 : 7);
}

/* The first of those allowed; NULL: none is. */
static const network *too_wide(const fanin_server *s)
{
    const network *n = s->allow, *end = s->allow + s->n_allow;
    while (n < end && !is_wider_than_private(n))
        n++;
    return n < end ? n : NULL;
}

static bool is_open(const fanin_server *s)
{
    return (s->flags & FANIN_SERVER_OPEN) && !socket_is_loopback(&s->address);
}

/* Whether the server, whose secret is known, may listen where it is to, for the networks that it
   allows. Weights that anybody may read or alter are published by intent only. */
static fanin_status check_openness(const fanin_server *s, fanin_error *error)
{
    error_place place = {.phase = "create"};
    if (!is_open(s) || (s->flags & FANIN_SERVER_INSECURE))
        return FANIN_OK;
    if (!s->tls) {
        place.remedy =
            "give all ranks and workers one secret (nixl-fetch secret; "
            "secret_file, --secret-file, FANIN_SECRET_FILE) or "
            "certificates (tls_cert, --tls-cert, FANIN_TLS_CERT), or " INSECURE;
        return error_set(
            error, FANIN_ERR_ARGUMENT, &place,
            "an open server without the launch's secret or certificates: " READ_BY_ALL);
    }
    const network *wide = too_wide(s);
    place.remedy = "allow the networks that the workers are in, or " INSECURE;
    return wide
               ? error_set(error, FANIN_ERR_ARGUMENT, &place,
                           "the allow-list has a network of prefix /%u, which is wider "
                           "than any private one",
                           wide->prefix)
               : FANIN_OK;
}

/* Tells the log what check_openness() would not have let pass without FANIN_SERVER_INSECURE. */
static void tell_openness(const fanin_server *s)
{
    const network *wide = too_wide(s);
    if (!is_open(s))
        return;
    if (!s->tls)
        log_write(&s->log, FANIN_LOG_WARNING, "insecure",
                  "rank %u is open on %s without the launch's secret or "
                  "certificates: " READ_BY_ALL,
                  (unsigned)s->rank, s->address.text);
    if (wide)
        log_write(&s->log, FANIN_LOG_WARNING, "insecure",
                  "rank %u is open on %s to a network of prefix /%u, which is wider "
                  "than any private one",
                  (unsigned)s->rank, s->address.text, wide->prefix);
}

/* ---------------------------------------------------------------- creation */

static void load_ucx(fanin_server *s)
{
    fanin_error error = FANIN_ERROR_INIT;
    if (s->flags & FANIN_SERVER_NO_UCX) {
        snprintf(s->ucx_why, sizeof s->ucx_why, "the trainer was told not to use UCX");
    } else if (s->max_bytes_per_second > 0) {
        snprintf(s->ucx_why, sizeof s->ucx_why,
                 "the server limits its bytes a second, which it cannot by rdma");
    } else if ((s->flags & FANIN_SERVER_OPEN) &&
               !(s->flags & FANIN_SERVER_TRUSTED_NETWORK)) {
        snprintf(s->ucx_why, sizeof s->ucx_why,
                 "an open server offers networks the stream path only");
    } else if ((s->flags & FANIN_SERVER_OPEN) && !s->tls) {
        snprintf(s->ucx_why, sizeof s->ucx_why,
                 "without the launch's secret or certificates an open server offers "
                 "networks the stream path only");
        log_write(&s->log, FANIN_LOG_WARNING, "ucx-missing", "no path rdma: %s",
                  s->ucx_why);
    } else if (ucx_load(&s->log, &s->ucx, &error) != FANIN_OK) {
        s->ucx = NULL;
        s->ucx_failed = true;
        snprintf(s->ucx_why, sizeof s->ucx_why, "%s", error.message);
        log_write(&s->log, FANIN_LOG_WARNING, "ucx-missing", "no path rdma: %s",
                  error.message);
    }
}

static fanin_status take_credentials(fanin_server *s, const fanin_server_config *c,
                                     fanin_error *error)
{
    const credentials given = {.secret = c->secret_file,
                               .tls = {c->tls_cert, c->tls_key, c->tls_ca}};
    if (s->flags & FANIN_SERVER_RELAY)
        return credentials_of_relay(&given, s->world_id, s->incarnation, &s->log,
                                    &s->tls, error);
    return credentials_of_rank(&given, s->world_id, s->rank, &s->log, &s->tls, error);
}

/* A tenth of all. */
static uint32_t stranger_cpu_for(unsigned cpus)
{
    return cpus < DATA_THREADS_MOST * 10 ? cpus * 100 : DATA_THREADS_MOST * 1000;
}

static fanin_status fill(fanin_server *s, const fanin_server_config *c,
                         fanin_error *error)
{
    condition_init(&s->freed);
    pthread_mutex_init(&s->lock, NULL);
    pthread_mutex_init(&s->collecting, NULL);
    pthread_mutex_init(&s->registrar.lock, NULL);
    s->registrar.page_size = sysconf(_SC_PAGESIZE);
    s->registrar.log = &s->log;
    s->pid = getpid();
    s->wake = -1;
    atomic_store(&s->tell_at, UINT64_MAX);
    snprintf(s->name, sizeof s->name, "%s", c->name);
    memcpy(s->world_id, c->world_id, sizeof s->world_id);
    s->rank = c->rank;
    s->world_size = c->world_size;
    s->flags = c->flags;
    if (text_switched_on("FANIN_TRUST_CONTAINERS"))
        s->flags |= FANIN_SERVER_TRUST_CONTAINERS;
    if (text_switched_on("FANIN_INSECURE"))
        s->flags |= FANIN_SERVER_INSECURE;
    s->lease_ms = c->lease_ms;
    s->max_sessions = c->max_sessions;
    s->idle_ms = c->idle_ms;
    s->peer_cpu = c->peer_cpu;
    s->stranger_cpu =
        c->stranger_cpu ? c->stranger_cpu : stranger_cpu_for(usable_cpus());
    s->stranger_share_ms = c->stranger_share_ms;
    s->own_share_ms = c->own_share_ms;
    s->is_nice = c->nice != 0;
    s->nice = yielding_value(c->nice);
    s->max_memory = c->max_memory;
    s->max_bytes_per_second = c->max_bytes_per_second;
    s->data_threads = c->data_threads
                          ? c->data_threads
                          : stream_threads_for(usable_cpus(), c->max_memory);
    s->log = log_of(c->log, c->log_cookie);
    host_id(&s->log, s->host);
    if (!random_bytes(s->incarnation, sizeof s->incarnation))
        return error_set(error, FANIN_ERR_IO, NULL, "the kernel gives no random bytes");
    s->witness = witness_make(s->incarnation);
    fanin_status status = take_credentials(s, c, error);
    if (status == FANIN_OK && c->allow && *c->allow)
        status = networks_parse(c->allow, &s->allow, &s->n_allow, error);
    return status == FANIN_OK ? check_openness(s, error) : status;
}

/* A Unix socket beside the TCP port, for clients of the same user on this host. */
static int listen_unix(fanin_server *s)
{
    socket_address address;
    fanin_error error = FANIN_ERROR_INIT;
    int fd = -1;
    if (!socket_is_loopback(&s->address))
        return -1;
    socket_unix_address(geteuid(), &s->address, &address);
    neighbour_prepare();
    s->has_unix = socket_listen(&address, BACKLOG, &fd, &error) == FANIN_OK;
    if (!s->has_unix)
        log_write(&s->log, FANIN_LOG_WARNING, "unix-socket",
                  "no Unix socket beside port %u, TCP only: %s", (unsigned)s->port,
                  error.message);
    return fd;
}

static fanin_status start(fanin_server *s, fanin_error *error)
{
    int tcp = -1, unix_fd;
    fanin_status status = socket_listen(&s->address, BACKLOG, &tcp, error);
    if (status != FANIN_OK)
        return status;
    s->port = socket_port(tcp);
    socket_set_port(&s->address, s->port);
    unix_fd = listen_unix(s);
    load_ucx(s);
    s->wake = wake_open();
    if (s->wake < 0)
        status = error_set_errno(error, FANIN_ERR_IO, errno, NULL,
                                 "cannot set up the control thread");
    else
        status = commit_hub_make(s->wake, &s->hub, error);
    if (status == FANIN_OK)
        status = stream_create(s, error);
    if (status == FANIN_OK)
        status = control_create(s, tcp, unix_fd, error);
    if (status != FANIN_OK) {
        close(tcp);
        if (unix_fd >= 0)
            close(unix_fd);
        return status;
    }
    log_write(&s->log, FANIN_LOG_INFO, "server-start",
              "%s_%u, rank %u of %u, listens on port %u", s->name, (unsigned)s->rank,
              (unsigned)s->rank, (unsigned)s->world_size, (unsigned)s->port);
    tell_openness(s);
    return FANIN_OK;
}

/* Threads first (the control thread hands connections to the others), then what they used;
   regions before the UCX ends they belong to. */
static void finish(fanin_server *s)
{
    control_destroy(s);
    stream_destroy(s);
    commit_destroy(s);
    /* Who reads this process's memory finds no rank in it any more. */
    witness_free(&s->witness);
    explicit_bzero(s->incarnation, sizeof s->incarnation);
    publications_free(s);
    peer_log_tell(s);
    peers_free(s);
    if (s->registrar.ucx)
        ucx_server_destroy(&s->registrar.ucx);
    if (s->ucx)
        ucx_unload(&s->ucx);
    if (s->wake >= 0)
        close(s->wake);
    tls_end_free(&s->tls);
    free(s->allow);
    pthread_cond_destroy(&s->freed);
    pthread_mutex_destroy(&s->lock);
    pthread_mutex_destroy(&s->collecting);
    pthread_mutex_destroy(&s->registrar.lock);
    free(s);
}

fanin_status fanin_server_create(const fanin_server_config *config,
                                 fanin_server **server_out, fanin_error *error)
{
    fanin_server_config c;
    fanin_server_config_init(&c, sizeof c);
    if (!server_out || !versioned_read(&c, sizeof c, config, 0))
        return bad(error, "no configuration, or its struct_size is not set",
                   "call fanin_server_config_init() first");
    *server_out = NULL;
    standard_descriptors_hold();
    c.name = c.name ? c.name : DEFAULT_NAME;
    c.bind = c.bind ? c.bind : DEFAULT_BIND;
    socket_address address;
    bool limited = false;
    fanin_status status = log_choose(&c.log, &c.log_cookie, error);
    logger log = log_of(c.log, c.log_cookie);
    if (status == FANIN_OK)
        status = check_config(&c, error);
    if (status == FANIN_OK)
        status = check_bind(&c, &address, error);
    if (status == FANIN_OK)
        status = descriptors_allow(&c, &log, &limited, error);
    if (status != FANIN_OK)
        return status;
    fanin_server *s = calloc(1, sizeof *s);
    if (!s)
        return error_set_memory(error);
    s->address = address;
    s->sessions_limited = limited;
    status = fill(s, &c, error);
    if (status == FANIN_OK)
        status = start(s, error);
    if (status != FANIN_OK) {
        finish(s);
        return status;
    }
    trace_of_environment(&s->log);
    *server_out = s;
    return FANIN_OK;
}

uint16_t fanin_server_port(const fanin_server *server)
{
    return server && server->pid == getpid() ? server->port : 0;
}

/* ----------------------------------------------------------------- the end */

/* No begins from now on; waits for the leases that there are. */
static void end_leases(fanin_server *s, uint32_t drain_ms)
{
    deadline at = deadline_in_ms(drain_ms);
    pthread_mutex_lock(&s->lock);
    s->stopping = true;
    while (s->n_leases > 0 && condition_wait(&s->freed, &s->lock, at))
        ;
    pthread_mutex_unlock(&s->lock);
}

void fanin_server_destroy(fanin_server **server, uint32_t drain_ms)
{
    if (!server || !*server)
        return;
    fanin_server *s = *server;
    *server = NULL;
    if (s->pid != getpid())
        return;
    end_leases(s, 0); /* refuses begins before the listeners go */
    control_stop_listening(s);
    end_leases(s, drain_ms);
    log_write(&s->log, FANIN_LOG_INFO, "server-stop", "%s_%u stops", s->name,
              (unsigned)s->rank);
    commit_stop(s);
    mappers_lose_all(&s->registrar);
    mappers_tell(&s->registrar, s->name, "the trainer's own again");
    finish(s);
    trace_flush();
}
