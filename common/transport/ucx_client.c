/* SPDX-License-Identifier: Apache-2.0 */
#include "text.h"
#include "ucx_address.h"
#include "ucx_internal.h"
#include <poll.h>
#include <stdlib.h>
#include <string.h>

#define DESTROY_MS 5000
#define MAX_TRANSPORTS 16

/* A get in flight, or a spare one. Also where UCX's callbacks find the endpoint: as long as
   an endpoint is not drained, all of it stays. */
typedef struct get {
    struct get *next;
    ucx_endpoint *endpoint;
    ucx_done_fn done;
    void *cookie;
    uint64_t tag;
} get;

struct ucx_rkey {
    ucx_endpoint *endpoint;
    ucx_rkey *next, **link; /* link: what points to this one */
    ucp_rkey_h handle;
};

struct ucx_client {
    ucx_worker w;
    ucx_path path;
    ucx_endpoint *endpoints;
    get *spare;
};

struct ucx_endpoint {
    ucx_client *client;
    ucx_endpoint *next, **link;
    ucp_ep_h ep;
    ucx_rkey *rkeys;
    uint64_t outstanding;
    ucs_status_t failed;
    bool close_asked, closed;
    char transport[256];
};

struct ucx_local {
    ucx_client *client;
    ucx_mapping mapping;
};

fanin_status ucx_client_create(ucx *u, ucx_path path, const char *gpu,
                               const logger *log, ucx_client **out, fanin_error *error)
{
    const ucx_role role =
        path == UCX_PATH_HOST ? UCX_ROLE_CLIENT_HOST : UCX_ROLE_CLIENT_RDMA;
    ucx_client *c = calloc(1, sizeof *c);
    if (!c)
        return error_set_memory(error);
    const fanin_status status = ucx_worker_open(
        &c->w, u, role, UCP_FEATURE_RMA | UCP_FEATURE_WAKEUP, gpu, log, error);
    if (status != FANIN_OK) {
        free(c);
        return status;
    }
    c->path = path;
    *out = c;
    return FANIN_OK;
}

static void endpoint_free(ucx_endpoint *e)
{
    while (e->rkeys) {
        ucx_rkey *rkey = e->rkeys;
        ucx_rkey_destroy(&rkey);
    }
    *e->link = e->next;
    if (e->next)
        e->next->link = e->link;
    free(e);
}

/* Destroying a worker while UCX still discards an endpoint aborts the process. */
static bool client_settle(ucx_client *c, deadline at)
{
    while (ucx_client_progress(c) || !ucx_client_arm(c))
        if (deadline_passed(at))
            return false;
    return true;
}

bool ucx_client_destroy(ucx_client **client)
{
    ucx_client *c = client ? *client : NULL;
    if (!c)
        return true;
    *client = NULL;
    const deadline at = deadline_in_ms(DESTROY_MS);
    bool drained = true;
    for (ucx_endpoint *e = c->endpoints, *next; e; e = next) {
        next = e->next;
        drained &= ucx_endpoint_close(&e, at);
    }
    if (!client_settle(c, at) || !drained) {
        log_write(&c->w.log, FANIN_LOG_ERROR, "ucx-drain",
                  "UCX did not finish its reads in %d ms; they are left to themselves",
                  DESTROY_MS);
        return false;
    }
    ucx_worker_close(&c->w);
    while (c->spare) {
        get *g = c->spare;
        c->spare = g->next;
        free(g);
    }
    free(c);
    return true;
}

const uint8_t *ucx_client_address(const ucx_client *c, size_t *size_out)
{
    *size_out = c->w.address_size;
    return (const uint8_t *)c->w.address;
}

int ucx_client_fd(const ucx_client *c)
{
    return c->w.fd;
}

bool ucx_client_progress(ucx_client *c)
{
    const ucx_scope scope = ucx_scope_enter(&c->w.log, false);
    const unsigned count = c->w.u->ucp_worker_progress(c->w.worker);
    ucx_scope_leave(&scope);
    return count > 0;
}

bool ucx_client_arm(ucx_client *c)
{
    const ucx_scope scope = ucx_scope_enter(&c->w.log, false);
    const ucs_status_t ucs = c->w.u->ucp_worker_arm(c->w.worker);
    ucx_scope_leave(&scope);
    return ucs == UCS_OK;
}

static void on_endpoint_error(void *cookie, ucp_ep_h ep, ucs_status_t status)
{
    ucx_endpoint *e = cookie;
    (void)ep;
    if (e->failed == UCS_OK)
        e->failed = status;
}

fanin_status ucx_endpoint_create(ucx_client *c, const uint8_t *address, size_t size,
                                 ucx_endpoint **out, fanin_error *error)
{
    ucx_endpoint *e = calloc(1, sizeof *e);
    if (!e)
        return error_set_memory(error);
    e->client = c;
    const fanin_status status =
        ucx_worker_connect(&c->w, address, size, on_endpoint_error, e, &e->ep, error);
    if (status != FANIN_OK) {
        free(e);
        return status;
    }
    e->next = c->endpoints;
    e->link = &c->endpoints;
    if (e->next)
        e->next->link = &e->next;
    c->endpoints = e;
    *out = e;
    return FANIN_OK;
}

int ucx_endpoint_failed(const ucx_endpoint *e, const char **text_out)
{
    if (text_out)
        *text_out = e->client->w.u->ucs_status_string(e->failed);
    return e->failed;
}

uint64_t ucx_endpoint_outstanding(const ucx_endpoint *e)
{
    return e->outstanding;
}

static bool is_of_path(ucx_path path, const char *transport)
{
    if (path == UCX_PATH_HOST)
        return strcmp(transport, "cma") == 0;
    return strncmp(transport, "rc", 2) == 0 || strncmp(transport, "dc", 2) == 0;
}

const char *ucx_endpoint_transport(ucx_endpoint *e)
{
    ucp_transport_entry_t entries[MAX_TRANSPORTS];
    ucp_ep_attr_t attributes = {
        .field_mask = UCP_EP_ATTR_FIELD_TRANSPORTS,
        .transports = {.entries = entries,
                       .num_entries = MAX_TRANSPORTS,
                       .entry_size = sizeof entries[0]},
    };
    e->transport[0] = '\0';
    if (e->close_asked || e->client->w.u->ucp_ep_query(e->ep, &attributes) != UCS_OK)
        return e->transport;
    text t = text_in(e->transport, sizeof e->transport);
    for (int of_path = 1; of_path >= 0; of_path--) {
        for (unsigned i = 0; i < attributes.transports.num_entries; i++)
            if (is_of_path(e->client->path, entries[i].transport_name) == of_path)
                text_add_whole(&t, 0, "%s%s/%s", t.used ? " " : "",
                               entries[i].transport_name, entries[i].device_name);
    }
    return e->transport;
}

static void on_endpoint_closed(void *request, ucs_status_t status, void *cookie)
{
    ucx_endpoint *e = cookie;
    (void)status;
    e->closed = true;
    e->client->w.u->ucp_request_free(request);
}

static void endpoint_ask_close(ucx_endpoint *e)
{
    const ucp_request_param_t param = {
        .op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS | UCP_OP_ATTR_FIELD_CALLBACK |
                        UCP_OP_ATTR_FIELD_USER_DATA,
        .flags = UCP_EP_CLOSE_FLAG_FORCE,
        .cb.send = on_endpoint_closed,
        .user_data = e,
    };
    if (e->close_asked)
        return;
    e->close_asked = true;
    const ucx_scope scope = ucx_scope_enter(&e->client->w.log, false);
    const ucs_status_ptr_t request = e->client->w.u->ucp_ep_close_nbx(e->ep, &param);
    ucx_scope_leave(&scope);
    if (!UCS_PTR_IS_PTR(request))
        e->closed = true;
}

bool ucx_endpoint_close(ucx_endpoint **endpoint, deadline at)
{
    ucx_endpoint *e = endpoint ? *endpoint : NULL;
    if (!e)
        return true;
    *endpoint = NULL;
    endpoint_ask_close(e);
    while (!e->closed || e->outstanding > 0) {
        if (deadline_passed(at))
            return false;
        if (ucx_client_progress(e->client) || !ucx_client_arm(e->client))
            continue;
        struct pollfd wait = {.fd = e->client->w.fd, .events = POLLIN};
        const int left = deadline_poll_ms(at);
        (void)poll(&wait, 1, left < 10 ? left : 10);
    }
    endpoint_free(e);
    return true;
}

fanin_status ucx_rkey_unpack(ucx_endpoint *e, const uint8_t *data, size_t size,
                             ucx_rkey **out, fanin_error *error)
{
    if (size == 0 || size > UCX_BLOB_MAX)
        return error_set(error, FANIN_ERR_PROTOCOL, NULL, "a remote key of %zu bytes",
                         size);
    const char *why = ucx_rkey_check(data, size);
    if (why)
        return error_set(error, FANIN_ERR_PROTOCOL, NULL,
                         "the bytes from the peer are no UCX remote key: %s", why);
    ucx_rkey *rkey = calloc(1, sizeof *rkey);
    uint8_t *copy = calloc(2, UCX_BLOB_MAX);
    if (!rkey || !copy) {
        free(rkey);
        free(copy);
        return error_set_memory(error);
    }
    memcpy(copy, data, size);
    const ucx_scope scope = ucx_scope_enter(&e->client->w.log, false);
    const ucs_status_t ucs =
        e->client->w.u->ucp_ep_rkey_unpack(e->ep, copy, &rkey->handle);
    ucx_scope_leave(&scope);
    free(copy);
    if (ucs != UCS_OK) {
        free(rkey);
        return ucx_error(e->client->w.u, error, FANIN_ERR_UNSUPPORTED, ucs, NULL,
                         "a remote key cannot be used");
    }
    rkey->endpoint = e;
    rkey->next = e->rkeys;
    rkey->link = &e->rkeys;
    if (rkey->next)
        rkey->next->link = &rkey->next;
    e->rkeys = rkey;
    *out = rkey;
    return FANIN_OK;
}

void ucx_rkey_destroy(ucx_rkey **rkey)
{
    ucx_rkey *r = *rkey;
    *rkey = NULL;
    if (!r)
        return;
    *r->link = r->next;
    if (r->next)
        r->next->link = r->link;
    r->endpoint->client->w.u->ucp_rkey_destroy(r->handle);
    free(r);
}

fanin_status ucx_local_create(ucx_client *c, void *base, size_t length,
                              fanin_memory memory, ucx_local **out, fanin_error *error)
{
    ucx_local *l = calloc(1, sizeof *l);
    if (!l)
        return error_set_memory(error);
    l->client = c;
    const fanin_status status =
        ucx_mapping_open(&c->w, base, length, memory, false, &l->mapping, error);
    if (status != FANIN_OK) {
        free(l);
        return status;
    }
    *out = l;
    return FANIN_OK;
}

void ucx_local_destroy(ucx_local **local)
{
    ucx_local *l = local ? *local : NULL;
    if (!l)
        return;
    *local = NULL;
    ucx_mapping_close(&l->client->w, &l->mapping);
    free(l);
}

static get *get_take(ucx_client *c)
{
    get *g = c->spare;
    if (!g)
        return malloc(sizeof *g);
    c->spare = g->next;
    return g;
}

/* The record is given back before the callback, which may start the next get. */
static void get_finish(get *g, ucs_status_t status)
{
    const get done = *g;
    ucx_endpoint *e = g->endpoint;
    g->next = e->client->spare;
    e->client->spare = g;
    e->outstanding--;
    done.done(done.cookie, done.tag, status);
}

static void on_get_done(void *request, ucs_status_t status, void *cookie)
{
    get *g = cookie;
    g->endpoint->client->w.u->ucp_request_free(request);
    get_finish(g, status);
}

fanin_status ucx_get(ucx_endpoint *e, ucx_rkey *rkey, uint64_t remote, void *to,
                     size_t length, const ucx_local *local, ucx_done_fn done,
                     void *cookie, uint64_t tag, fanin_error *error)
{
    ucx_client *c = e->client;
    if (e->failed != UCS_OK)
        return ucx_error(c->w.u, error, FANIN_ERR_CLOSED, e->failed, NULL,
                         "the endpoint failed");
    get *g = get_take(c);
    if (!g)
        return error_set_memory(error);
    *g = (get){.endpoint = e, .done = done, .cookie = cookie, .tag = tag};
    const ucp_request_param_t param = {
        .op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA |
                        UCP_OP_ATTR_FIELD_MEMH | UCP_OP_ATTR_FIELD_MEMORY_TYPE,
        .cb.send = on_get_done,
        .user_data = g,
        .memh = local->mapping.handle,
        .memory_type = local->mapping.type,
    };
    e->outstanding++;
    const ucx_scope scope = ucx_scope_enter(&c->w.log, false);
    const ucs_status_ptr_t request =
        c->w.u->ucp_get_nbx(e->ep, to, length, remote, rkey->handle, &param);
    ucx_scope_leave(&scope);
    if (UCS_PTR_IS_ERR(request)) {
        e->outstanding--;
        g->next = c->spare;
        c->spare = g;
        return ucx_error(c->w.u, error, FANIN_ERR_TRANSPORT, UCS_PTR_STATUS(request),
                         NULL, "a read could not be started");
    }
    if (!request)
        get_finish(g, UCS_OK);
    return FANIN_OK;
}
