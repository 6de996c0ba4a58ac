/* SPDX-License-Identifier: Apache-2.0 */
#include "net/client_state.h"

#include "adapter/adapter.h"
#include "adapter/spare_file.h"
#include "credentials.h"
#include "device/devices.h"
#include "digest.h"
#include "error_set.h"
#include "log_choice.h"
#include "lookup.h"
#include "net/connection.h"
#include "net/threads.h"
#include "pull/choose_path.h"
#include "pull/plan_cache.h"
#include "pull/pull_session.h"
#include "thread.h"
#include "stream/stream_link.h"
#include "text.h"
#include "versioned.h"
#include "wake.h"
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

/* What the process has open besides: standard ones, epoll, UCX's. */
#define SPARE_DESCRIPTORS 48

void fanin_client_config_init(fanin_client_config *config, size_t size)
{
    fanin_client_config defaults = {
        .connect_timeout_ms = 5000,
        .lost_ms = 5000,
        .max_inflight = (uint64_t)64 << 20,
        .max_catalog = (uint64_t)256 << 20,
    };
    versioned_init(config, size, &defaults, sizeof defaults);
}

/* -------------------------------------------------------------- life cycle */

static fanin_status check_client_config(const fanin_client_config *config,
                                        fanin_error *error)
{
    if (!fanin_path_name(config->path))
        return error_set(error, FANIN_ERR_ARGUMENT, NULL, "unknown path %d",
                         (int)config->path);
    if (config->streams_per_rank > STREAMS_MOST)
        return error_set(error, FANIN_ERR_ARGUMENT, NULL,
                         "%u data connections a rank are more than %d",
                         config->streams_per_rank, STREAMS_MOST);
    if (config->threads > READING_THREADS_MOST)
        return error_set(error, FANIN_ERR_ARGUMENT, NULL,
                         "%u reading threads are more than %d", config->threads,
                         READING_THREADS_MOST);
    if (config->connect_timeout_ms == 0 || config->lost_ms == 0)
        return error_set(error, FANIN_ERR_ARGUMENT, NULL,
                         "connect_timeout_ms and lost_ms must not be 0");
    return FANIN_OK;
}

static fanin_status take_client_credentials(fanin_client *client, fanin_error *error)
{
    fanin_client_config *c = &client->config;
    const credentials given = {.secret = c->secret_file,
                               .tls = {c->tls_cert, c->tls_key, c->tls_ca}};
    c->secret_file = c->tls_cert = c->tls_key = c->tls_ca = NULL; /* the caller's */
    return credentials_of_reader(&given, &client->log, &client->shared.tls, error);
}

static fanin_status init_client(fanin_client *client, const fanin_client_config *config,
                                fanin_error *error)
{
    client->pid = getpid();
    client->cancel.fd = -1;
    client->loop.epoll = -1;
    fanin_client_config_init(&client->config, sizeof client->config);
    if (!versioned_read(&client->config, sizeof client->config, config, 0))
        return error_set(error, FANIN_ERR_ARGUMENT, NULL,
                         "config is NULL, or its struct_size is not set");
    client->config.trust_containers |= text_switched_on("FANIN_TRUST_CONTAINERS");
    client->config.trust_other_users |= text_switched_on("FANIN_TRUST_OTHER_USERS");
    fanin_status status = check_client_config(&client->config, error);
    client->forced = path_of_number(client->config.path);
    if (status == FANIN_OK)
        status = log_choose(&client->config.log, &client->config.log_cookie, error);
    if (status != FANIN_OK)
        return status;
    client->log = log_of(client->config.log, client->config.log_cookie);
    host_id(&client->log, client->host);
    if (client->config.server_name) {
        client->server_name = strdup(client->config.server_name);
        if (!client->server_name)
            return error_set_memory(error);
        client->config.server_name = client->server_name;
    }
    status = loop_init(&client->loop, error);
    if (status != FANIN_OK)
        return status;
    status = client_watch_cancel(client, error);
    if (status != FANIN_OK)
        return status;
    client->shared = (connection_shared){
        .loop = &client->loop,
        .no_unix = client->config.no_unix,
        .no_checksums = client->config.no_checksums,
        .trust_containers = client->config.trust_containers,
        .trust_other_users = client->config.trust_other_users,
        .log = client->log,
        .told = &client->told_strangers,
        .place = &client->place,
        .connect_ms = client->config.connect_timeout_ms,
        .lost_ms = client->config.lost_ms,
    };
    status = take_client_credentials(client, error);
    if (status != FANIN_OK)
        return status;
    if (!random_bytes(client->shared.client_id, sizeof client->shared.client_id))
        return error_set(error, FANIN_ERR_IO, NULL, "the kernel gives no random bytes");
    digest id = digest_of(client->shared.client_id, sizeof client->shared.client_id);
    memcpy(&client->plan_seed, id.bytes, sizeof client->plan_seed);
    for (size_t i = 0; i < sizeof id.bytes; i++)
        snprintf(client->shared.trace_id + 2 * i, 3, "%02x", id.bytes[i]);
    status = devices_create(client, error);
    return status == FANIN_OK ? paths_create(client, error) : status;
}

fanin_status fanin_client_create(const fanin_client_config *config,
                                 fanin_client **client_out, fanin_error *error)
{
    if (!client_out)
        return error_set(error, FANIN_ERR_ARGUMENT, NULL, "client_out is NULL");
    standard_descriptors_hold();
    fanin_client *client = calloc(1, sizeof *client);
    if (!client)
        return error_set_memory(error);
    fanin_status status = init_client(client, config, error);
    if (status != FANIN_OK) {
        fanin_client_destroy(&client);
        return status;
    }
    trace_of_environment(&client->log);
    *client_out = client;
    return FANIN_OK;
}

void fanin_client_disconnect(fanin_client *client)
{
    if (client_check(client, NULL) != FANIN_OK)
        return;
    pull_session_orphan(client);
    spare_file_drop(&client->spare);
    adapter_layout_free(&client->layout);
    kept_free(client);
    paths_disconnect(client);
    reading_threads_destroy(&client->readers);
    devices_disconnect(client);
    for (size_t i = 0; i < client->n_peers; i++)
        connection_destroy(&client->peers[i].control);
    free(client->peers);
    client->peers = NULL;
    client->n_peers = 0;
    client->connected = false;
}

void fanin_client_destroy(fanin_client **client)
{
    if (!client || !*client)
        return;
    fanin_client *c = *client;
    *client = NULL;
    if (c->pid != getpid())
        return;
    fanin_client_disconnect(c);
    trace_flush();
    devices_free(c);
    paths_destroy(c);
    if (c->cancel.fd >= 0)
        close(c->cancel.fd);
    loop_finish(&c->loop);
    tls_end_free(&c->shared.tls);
    free(c->server_name);
    free(c->contents);
    free(c);
}

void fanin_client_cancel(fanin_client *client)
{
    if (!client || client->pid != getpid())
        return;
    int saved = errno;
    atomic_store(&client->cancelled, true);
    wake_up(client->cancel.fd);
    errno = saved;
}

/* -------------------------------------------------------------------- names */

/* A name that is asked for. */
typedef struct question {
    loop_source source; /* first: the loop hands it back */
    lookup *lookup;
    loop *loop;
    size_t *left;
    char host[SOCKET_HOST];
} question;

/* An address whose name is not known yet. */
typedef struct unknown {
    question *question; /* NULL: it is known */
    uint16_t port;
} unknown;

static void on_name(loop_source *source, uint32_t events)
{
    question *q = (question *)source;
    (void)events;
    loop_remove(q->loop, source);
    --*q->left;
}

static question *find_question(question *questions, size_t n, const char *host)
{
    for (size_t i = 0; i < n; i++)
        if (strcmp(questions[i].host, host) == 0)
            return &questions[i];
    return NULL;
}

static fanin_status ask_name(fanin_client *client, question *q, const char *host,
                             uint16_t port, size_t *left, fanin_error *error)
{
    fanin_status status = lookup_start(host, port, &q->lookup, error);
    if (status != FANIN_OK)
        return status;
    memcpy(q->host, host, strlen(host) + 1);
    q->loop = &client->loop;
    q->left = left;
    q->source =
        (loop_source){.fd = lookup_fd(q->lookup), .events = EPOLLIN, .ready = on_name};
    status = loop_add(&client->loop, &q->source, error);
    *left += status == FANIN_OK;
    return status;
}

/* What needs no lookup is final; the rest is asked for. */
static fanin_status begin_lookup(fanin_client *client, const char *const *addresses,
                                 size_t count, socket_address *out, unknown *unknowns,
                                 question *questions, size_t *n, size_t *left,
                                 fanin_error *error)
{
    for (size_t i = 0; i < count; i++) {
        char host[SOCKET_HOST];
        fanin_status status = socket_resolve(addresses[i], &out[i], error);
        if (status == FANIN_OK)
            continue;
        if (status != FANIN_ERR_NOT_FOUND ||
            !socket_split(addresses[i], host, &unknowns[i].port))
            return status;
        question *q = find_question(questions, *n, host);
        unknowns[i].question = q ? q : &questions[(*n)++];
        if (!q)
            status = ask_name(client, unknowns[i].question, host, unknowns[i].port,
                              left, error);
        if (!q && status != FANIN_OK)
            return status;
    }
    return FANIN_OK;
}

static fanin_status take_answers(const unknown *unknowns, size_t count,
                                 socket_address *out, fanin_error *error)
{
    for (size_t i = 0; i < count; i++) {
        if (!unknowns[i].question)
            continue;
        fanin_status status =
            lookup_result(unknowns[i].question->lookup, &out[i], error);
        if (status != FANIN_OK)
            return status;
        socket_set_port(&out[i], unknowns[i].port);
    }
    return FANIN_OK;
}

/* "host:port", "[v6]:port"; names are looked up side by side, each once. Fills @p out, as many.
   FANIN_ERR_ARGUMENT (an address of another form), FANIN_ERR_UNREACHABLE (no such name),
   FANIN_ERR_TIMEOUT, FANIN_ERR_CANCELLED, FANIN_ERR_LIMIT, FANIN_ERR_MEMORY. */
static fanin_status resolve_all(fanin_client *client, const char *const *addresses,
                                size_t count, deadline at, socket_address *out,
                                fanin_error *error)
{
    size_t n = 0, left = 0;
    unknown *unknowns = calloc(count, sizeof *unknowns);
    question *questions = calloc(count, sizeof *questions);
    fanin_status status = unknowns && questions
                              ? begin_lookup(client, addresses, count, out, unknowns,
                                             questions, &n, &left, error)
                              : error_set_memory(error);
    if (status == FANIN_OK)
        status = client_run(client, &left, at, "connect", error);
    if (status == FANIN_OK || status == FANIN_ERR_TIMEOUT)
        status = take_answers(unknowns, count, out, error);
    for (size_t i = 0; i < n; i++) {
        if (questions[i].source.fd >= 0 && questions[i].lookup)
            loop_remove(&client->loop, &questions[i].source);
        lookup_drop(&questions[i].lookup);
    }
    free(unknowns);
    free(questions);
    return status;
}

/* ----------------------------------------------------------------- connect */

static fanin_status check_addresses(const char *const *addresses, size_t count,
                                    fanin_error *error)
{
    if (!addresses || count == 0 || count > 65536)
        return error_set(error, FANIN_ERR_ARGUMENT, NULL,
                         "give between 1 and 65536 addresses");
    for (size_t i = 0; i < count; i++) {
        if (!addresses[i])
            return error_set(error, FANIN_ERR_ARGUMENT, NULL, "address %zu is NULL", i);
    }
    return FANIN_OK;
}

static int compare_text(const void *a, const void *b)
{
    return strcmp(*(const char *const *)a, *(const char *const *)b);
}

static fanin_status check_distinct(const char *const *addresses, size_t count,
                                   fanin_error *error)
{
    const char **sorted = malloc(count * sizeof *sorted);
    if (!sorted)
        return error_set_memory(error);
    memcpy(sorted, addresses, count * sizeof *sorted);
    qsort(sorted, count, sizeof *sorted, compare_text);
    fanin_status status = FANIN_OK;
    for (size_t i = 1; i < count && status == FANIN_OK; i++) {
        error_place place = {.phase = "connect",
                             .address = sorted[i],
                             .remedy = "give the address of every rank, each once"};
        if (strcmp(sorted[i - 1], sorted[i]) == 0)
            status = error_set(error, FANIN_ERR_ARGUMENT, &place,
                               "the address %s was given twice", sorted[i]);
    }
    free(sorted);
    return status;
}

/* A rank needs its control connection and its data connections. */
static fanin_status check_descriptors(const fanin_client *client, size_t ranks,
                                      fanin_error *error)
{
    struct rlimit limit;
    size_t streams =
        client->config.streams_per_rank ? client->config.streams_per_rank : 1;
    size_t need = ranks * (1 + streams) + SPARE_DESCRIPTORS;
    if (getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur >= need)
        return FANIN_OK;
    char remedy[160];
    snprintf(remedy, sizeof remedy,
             "raise the limit to %zu or more: `ulimit -n %zu`, or LimitNOFILE= of the "
             "service",
             need, need);
    error_place place = {.phase = "connect", .remedy = remedy};
    return error_set(
        error, FANIN_ERR_LIMIT, &place,
        "%zu ranks need about %zu descriptors, the limit of this process is "
        "%" PRIu64,
        ranks, need, (uint64_t)limit.rlim_cur);
}

static fanin_status connect_to(fanin_client *client, const char *const *addresses,
                               size_t count, bool any, uint32_t timeout_ms,
                               fanin_error *error)
{
    fanin_status status = client_check(client, error);
    if (status == FANIN_OK && client->session)
        status = client_check_connected(client, error);
    if (status == FANIN_OK)
        status = check_addresses(addresses, count, error);
    if (status == FANIN_OK)
        status = check_distinct(addresses, count, error);
    if (status == FANIN_OK)
        status = check_descriptors(client, count, error);
    if (status != FANIN_OK)
        return status;
    deadline at = deadline_in_ms(timeout_ms);
    fanin_client_disconnect(client);
    client->peers = calloc(count, sizeof *client->peers);
    if (!client->peers)
        return error_set_memory(error);
    uint64_t began = clock_ns();
    socket_address *resolved = calloc(count, sizeof *resolved);
    status = resolved ? resolve_all(client, addresses, count, at, resolved, error)
                      : error_set_memory(error);
    span_of_call(client, TRACE_RESOLVE, began, status, NULL);
    began = clock_ns();
    for (size_t i = 0; i < count && status == FANIN_OK; i++) {
        status = connection_create(&client->shared, addresses[i], &resolved[i],
                                   &client->peers[i].control, error);
        client->n_peers += status == FANIN_OK;
    }
    free(resolved);
    if (status == FANIN_OK)
        status = any ? client_connect_first(client, at, error)
                     : client_ensure_connected(client, false, at, error);
    span_of_call(client, TRACE_CONNECT, began, status, NULL);
    trace_settle(status);
    if (status != FANIN_OK) {
        fanin_client_disconnect(client);
        return status;
    }
    client->connected = true;
    return FANIN_OK;
}

fanin_status fanin_client_connect(fanin_client *client, const char *const *addresses,
                                  size_t count, uint32_t timeout_ms, fanin_error *error)
{
    return connect_to(client, addresses, count, false, timeout_ms, error);
}

fanin_status fanin_client_connect_any(fanin_client *client,
                                      const char *const *addresses, size_t count,
                                      uint32_t timeout_ms, fanin_error *error)
{
    return connect_to(client, addresses, count, true, timeout_ms, error);
}
