/* SPDX-License-Identifier: Apache-2.0 */
#include "fetch/cache.h"
#include "fetch/failure.h"
#include "fetch/interrupt.h"
#include "fetch/output.h"

#include "socket.h"
#include <netdb.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* --------------------------------------- this host's address on the way to others */

enum { ROUTE_ADDRESS = 64 };

/* The local end of a socket that is connected there. */
static bool find_local(const struct addrinfo *there, socket_address *own)
{
    socket_address peer;
    int probe = socket(there->ai_family, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    bool good = probe >= 0 && connect(probe, there->ai_addr, there->ai_addrlen) == 0 &&
                socket_ends(probe, own, &peer) && !socket_is_loopback(own);
    if (probe >= 0)
        close(probe);
    return good;
}

static bool find_on_way(const char *address, socket_address *own)
{
    const struct addrinfo hints = {.ai_socktype = SOCK_DGRAM};
    struct addrinfo *all = NULL;
    char host[SOCKET_HOST];
    uint16_t port;
    bool found = false;
    if (socket_split(address, host, &port) &&
        getaddrinfo(host, "9", &hints, &all) == 0) {
        for (const struct addrinfo *a = all; a != NULL && !found; a = a->ai_next)
            found = find_local(a, own);
        freeaddrinfo(all);
    }
    return found;
}

/* The address by which this host reaches the first of the target's ranks that is on no loopback
   address. Sends nothing; a name is looked up, which may block. FANIN_ERR_ARGUMENT: it lies in none
   of @p networks ("10.0.0.0/8,fd00::/8"), or there is none. */
static fanin_status route_within(const target *t, const char *networks,
                                 char out[ROUTE_ADDRESS], fanin_error *error)
{
    socket_address own;
    network *list;
    size_t count;
    bool found = false;
    fanin_status status = networks_parse(networks, &list, &count, error);
    if (status != FANIN_OK)
        return status;
    for (uint32_t i = 0; i < t->count && !found; i++)
        found = find_on_way(t->addresses[i], &own);
    bool within = found && networks_contain(list, count, &own);
    free(list);
    if (!found || getnameinfo((struct sockaddr *)&own.storage, own.length, out,
                              ROUTE_ADDRESS, NULL, 0, NI_NUMERICHOST) != 0)
        return failure_set(error, FANIN_ERR_ARGUMENT,
                           "leave out --network, or give the trainer's address in a "
                           "network",
                           "the trainer is reached by this host's loopback, where no "
                           "other host reaches this one");
    out[strcspn(out, "%")] = '\0'; /* without a zone */
    return within ? FANIN_OK
                  : failure_set(error, FANIN_ERR_ARGUMENT,
                                "name the network of the fleet's hosts",
                                "this host's address on the way to the trainer is %s, "
                                "which is not in --network %s",
                                out, networks);
}

enum {
    ALIGNMENT = 64, /* of tensors */
    ASK_MS = 5000,  /* for what ranks know */
    PULL_MS =
        3600000, /* a model takes its time; ranks that are lost are found out before */
};

/* ------------------------------------------------------------------------- launches */

static void forget_copies(cache *c)
{
    for (size_t i = 0; i < c->n; i++) {
        fanin_relay_destroy(&c->copies[i].relay);
        c->copies[i].held = false;
    }
}

/* How others reach the copies. */
static fanin_status describe_server(const cache *c, char bind[ROUTE_ADDRESS],
                                    fanin_server_config *out, fanin_error *error)
{
    const fanin_client_config *client = &c->session->config;
    fanin_server_config_init(out, sizeof *out);
    fanin_status status = route_within(&c->session->target, c->networks, bind, error);
    out->bind = bind;
    out->allow = c->networks;
    out->max_bytes_per_second = c->rate;
    out->flags = FANIN_SERVER_OPEN | (client->no_ucx ? FANIN_SERVER_NO_UCX : 0) |
                 (c->trust_containers ? FANIN_SERVER_TRUST_CONTAINERS : 0);
    out->log = client->log;
    out->log_cookie = client->log_cookie;
    CREDENTIALS_GIVE(out, client);
    return status;
}

static fanin_status make_relays(cache *c, fanin_error *error)
{
    const target *t = &c->session->target;
    char bind[ROUTE_ADDRESS];
    fanin_server_config server;
    fanin_relay_config config;
    fanin_status status = FANIN_OK;
    fanin_relay_config_init(&config, sizeof config);
    config.client = &c->session->config;
    config.place = c->place;
    if (c->networks != NULL) {
        status = describe_server(c, bind, &server, error);
        config.server = &server;
    }
    for (size_t i = 0; i < c->n && status == FANIN_OK; i++)
        status = fanin_relay_create(&config, (const char *const *)t->addresses,
                                    t->count, &c->copies[i].relay, error);
    if (status != FANIN_OK)
        forget_copies(c); /* the next look begins anew */
    return status;
}

typedef struct launch {
    const cache *cache;
    uint8_t world_id[FANIN_WORLD_ID_SIZE];
    uint8_t (*incarnations)[16];
    bool same;
} launch;

static bool compare_launch(void *cookie, const fanin_rank_info *info)
{
    static const uint8_t unknown[16];
    launch *l = cookie;
    const cache *c = l->cache;
    size_t rank = (size_t)info->rank;
    if (info->status != FANIN_OK || rank >= c->session->target.count)
        return true;
    const uint8_t *before = rank < c->n_ranks ? c->incarnations[rank] : unknown;
    l->same = l->same && memcmp(info->world_id, c->world_id, sizeof c->world_id) == 0 &&
              (memcmp(before, unknown, sizeof unknown) == 0 ||
               memcmp(before, info->incarnation, sizeof unknown) == 0);
    memcpy(l->world_id, info->world_id, sizeof l->world_id);
    memcpy(l->incarnations[rank], info->incarnation, sizeof unknown);
    return true;
}

fanin_status cache_follow_launch(cache *c, size_t *dropped_out, fanin_error *error)
{
    size_t n = c->session->target.count;
    launch l = {.cache = c, .same = c->copies[0].relay != NULL && n == c->n_ranks};
    l.incarnations = output_require(calloc(n, sizeof *l.incarnations));
    *dropped_out = 0;
    fanin_status status =
        fanin_client_ranks(c->session->client, compare_launch, &l, error);
    if (status == FANIN_OK && l.same) {
        free(l.incarnations);
        return FANIN_OK;
    }
    for (size_t i = 0; i < c->n; i++)
        *dropped_out += c->copies[i].held;
    forget_copies(c);
    free(c->incarnations);
    c->incarnations = l.incarnations;
    c->n_ranks = n;
    memcpy(c->world_id, l.world_id, sizeof c->world_id);
    c->any = false;
    return status == FANIN_OK ? make_relays(c, error) : status;
}

bool cache_is_forbidden(const cache *c, fanin_error *error)
{
    for (size_t i = 0; i < c->n; i++) {
        fanin_relay_stats now = {.struct_size = sizeof now};
        fanin_relay_get_stats(c->copies[i].relay, &now);
        if (now.forbidden != 0) {
            failure_set(error, FANIN_ERR_UNSUPPORTED,
                        "let the trainer allow it (leave out relays=False)",
                        "the trainer forbids readers to hand on its weights");
            return true;
        }
    }
    return false;
}

/* ---------------------------------------------------------------------------- steps */

static fanin_pull_options rule_of(const cache *c, uint64_t step, uint32_t timeout_ms)
{
    fanin_pull_options options;
    fanin_pull_options_init(&options, sizeof options);
    options.publication = c->session->publication;
    options.rule = c->any || step > 0 ? FANIN_STEP_AT_LEAST : FANIN_STEP_NEWEST;
    options.step = step;
    options.timeout_ms = timeout_ms;
    return options;
}

fanin_status cache_await(cache *c, uint32_t timeout_ms, uint64_t *step_out,
                         fanin_error *error)
{
    fanin_pull_options options = rule_of(c, c->any ? c->last + 1 : 0, timeout_ms);
    return fanin_client_wait(c->session->client, &options, step_out, error);
}

static bool look_at_publication(void *cookie, const fanin_publication_info *info)
{
    cache *c = cookie;
    for (size_t i = 0; i < c->n; i++) {
        cache_copy *copy = &c->copies[i];
        if (copy->held && info->taken_back == copy->step + 1 &&
            strcmp(info->name, c->session->publication) == 0) {
            fanin_relay_release(copy->relay);
            copy->held = false;
            c->next = i;
            c->any = copy->step > 0;
            c->last = c->any ? copy->step - 1 : 0; /* it may be committed again */
            return false;
        }
    }
    return true;
}

bool cache_drop_withdrawn(cache *c, uint64_t *step_out)
{
    size_t held = 0, left = 0;
    for (size_t i = 0; i < c->n; i++)
        held += c->copies[i].held;
    (void)!fanin_client_list(c->session->client, ASK_MS, look_at_publication, c, NULL);
    for (size_t i = 0; i < c->n; i++)
        left += c->copies[i].held;
    *step_out = c->copies[c->next].step;
    return left < held;
}

/* -------------------------------------------------------------------------- tensors */

static bool cache_add_tensor(void *cookie, const fanin_entry *e)
{
    cache *c = cookie;
    (void)whole_tensors_add(&c->tensors, e->name, e->dtype, e->n_dims, e->shape,
                            e->bytes);
    c->tensors.bytes += -c->tensors.bytes % ALIGNMENT;
    return true;
}

/* Names and shapes may change from step to step. */
static fanin_status take_catalog(cache *c, fanin_error *error)
{
    whole_tensors_free(&c->tensors);
    return fanin_client_catalog(c->session->client, c->session->publication, NULL,
                                ASK_MS, cache_add_tensor, c, error);
}

static bool same_tensors(const whole_tensors *one, const whole_tensors *other)
{
    bool same = one->count == other->count;
    for (size_t i = 0; same && i < one->count; i++) {
        const whole_tensor *a = &one->list[i], *b = &other->list[i];
        same = strcmp(a->name, b->name) == 0 && a->dtype == b->dtype &&
               a->n_dims == b->n_dims &&
               memcmp(a->shape, b->shape, sizeof b->shape) == 0;
    }
    return same;
}

/* Whether a pull of other tensors than the trainer has may fail so. */
static bool is_of_tensors(fanin_status why)
{
    return why == FANIN_ERR_ARGUMENT || why == FANIN_ERR_NOT_FOUND ||
           why == FANIN_ERR_INCOMPLETE || why == FANIN_ERR_MISMATCH;
}

/* What was wrong with tensors that the trainer has changed since is over. */
static fanin_status blame_changed_tensors(cache *c, fanin_status why,
                                          fanin_error *error)
{
    whole_tensors before = c->tensors;
    if (!is_of_tensors(why))
        return why;
    c->tensors = (whole_tensors){.list = NULL};
    if (take_catalog(c, NULL) == FANIN_OK && !same_tensors(&before, &c->tensors))
        why = failure_set(error, FANIN_ERR_STALE, "pull again",
                          "the trainer changed its tensors before they were pulled");
    whole_tensors_free(&before);
    return why;
}

/* Of the copies that hold nothing, so that a first step finds out whether there is room for all of
   them, and of the one that is next. */
static fanin_status take_memory(cache *c, fanin_error *error)
{
    cache_memory **list = output_require(calloc(c->n, sizeof list[0]));
    size_t count = 0;
    fanin_status status = FANIN_OK;
    for (size_t i = 0; i < c->n; i++) {
        cache_copy *copy = &c->copies[i];
        if (copy->memory.size < c->tensors.bytes && (i == c->next || !copy->held)) {
            fanin_relay_release(copy->relay);
            copy->held = false;
            list[count++] = &copy->memory;
        }
    }
    if (count > 0)
        status = cache_memory_take(c->directory, list, count, c->tensors.bytes, error);
    free(list);
    return status;
}

/* ----------------------------------------------------------------------------- pull */

static fanin_status pull_into_copy(cache *c, cache_copy *copy, uint64_t step,
                                   fanin_result **result, fanin_error *error)
{
    fanin_pull_options options = rule_of(c, step, PULL_MS);
    options.verify = c->verify;
    const size_t n = c->tensors.count;
    fanin_tensor *tensors = output_require(calloc(n + 1, sizeof tensors[0]));
    fanin_box *boxes = output_require(calloc(n + 1, sizeof boxes[0]));
    for (size_t i = 0; i < n; i++) {
        const whole_tensor *t = &c->tensors.list[i];
        whole_tensor_describe(t, copy->memory.bytes + t->offset, &boxes[i],
                              &tensors[i]);
    }
    interrupt_relay(copy->relay);
    fanin_status status =
        interrupt_requested()
            ? FANIN_ERR_CANCELLED
            : fanin_relay_pull_into(copy->relay, &options, tensors, n, result, error);
    interrupt_relay(NULL);
    free(tensors);
    free(boxes);
    return status;
}

static cache_step describe_step(const cache_copy *copy, const fanin_result *result,
                                const fanin_relay_stats *before)
{
    cache_step s = {.step = copy->step};
    fanin_result_info info = {.struct_size = sizeof info};
    fanin_relay_stats now = {.struct_size = sizeof now};
    fanin_result_get(result, &info);
    fanin_relay_get_stats(copy->relay, &now);
    s.step = info.step;
    s.bytes = info.bytes;
    s.total_ns = info.total_ns;
    s.from_origin = now.bytes_from_origin - before->bytes_from_origin;
    s.from_relays = now.bytes_from_relays - before->bytes_from_relays;
    memcpy(s.world_id, info.world_id, sizeof s.world_id);
    snprintf(s.how, sizeof s.how, "%s", info.path_reason);
    return s;
}

fanin_status cache_pull(cache *c, uint64_t step, cache_step *out, fanin_error *error)
{
    cache_copy *copy = &c->copies[c->next];
    fanin_result *result = NULL;
    fanin_relay_stats before = {.struct_size = sizeof before};
    fanin_status status = take_catalog(c, error);
    status = status != FANIN_OK ? status : take_memory(c, error);
    if (status != FANIN_OK)
        return status;
    copy->held = false;
    fanin_relay_get_stats(copy->relay, &before);
    status = pull_into_copy(c, copy, step, &result, error);
    if (status == FANIN_OK) {
        *out = describe_step(copy, result, &before);
        copy->held = c->any = true;
        copy->step = c->last = out->step;
        c->next = (c->next + 1) % c->n;
    } else {
        status = blame_changed_tensors(c, status, error);
    }
    fanin_result_free(&result);
    return status;
}

void cache_free(cache *c)
{
    forget_copies(c);
    for (size_t i = 0; i < c->n; i++)
        cache_memory_free(&c->copies[i].memory);
    whole_tensors_free(&c->tensors);
    free(c->copies);
    free(c->incarnations);
    *c = (cache){.session = NULL};
}
