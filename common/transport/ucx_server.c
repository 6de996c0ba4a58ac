/* SPDX-License-Identifier: Apache-2.0 */
#include "ucx_internal.h"
#include <poll.h>
#include <stdlib.h>

#define PROGRESS_AT_ONCE 64
#define DESTROY_MS 5000

struct ucx_server {
    ucx_worker w;
    ucx_peer *peers; /**< those open */
    size_t closing;  /**< peers whose close UCX has not finished */
};

struct ucx_peer {
    ucx_server *server;
    ucx_peer *next, **link;
    ucp_ep_h ep;
};

struct ucx_region {
    ucx_server *server;
    ucx_mapping mapping;
    void *rkey;
    size_t rkey_size;
};

fanin_status ucx_server_create(ucx *u, bool loopback, const logger *log,
                               ucx_server **out, fanin_error *error)
{
    ucx_server *s = calloc(1, sizeof(*s));
    if (!s)
        return error_set_memory(error);
    /* Some feature is needed for lanes to answer RDMA connections with. STREAM is the one
       that installs no handler which takes an address from the peer. */
    const fanin_status status = ucx_worker_open(
        &s->w, u, loopback ? UCX_ROLE_SERVER_HOST : UCX_ROLE_SERVER_RDMA,
        UCP_FEATURE_STREAM | UCP_FEATURE_WAKEUP, log, error);
    if (status != FANIN_OK) {
        free(s);
        return status;
    }
    *out = s;
    return FANIN_OK;
}

void ucx_server_destroy(ucx_server **server)
{
    ucx_server *s = server ? *server : NULL;
    if (!s)
        return;
    *server = NULL;
    while (s->peers) {
        ucx_peer *peer = s->peers;
        ucx_peer_close(&peer);
    }
    /* Destroying a worker while UCX still discards an endpoint may abort the process: rather
       leak one that does not finish. */
    const deadline at = deadline_in_ms(DESTROY_MS);
    for (bool idle = false; s->closing > 0 || !idle;) {
        struct pollfd wait = {.fd = s->w.fd, .events = POLLIN};
        if (deadline_passed(at))
            return;
        idle = ucx_server_progress(s);
        if (idle && s->closing > 0)
            (void)poll(&wait, 1, 1);
    }
    ucx_worker_close(&s->w);
    free(s);
}

const uint8_t *ucx_server_address(const ucx_server *s, size_t *size_out)
{
    *size_out = s->w.address_size;
    return (const uint8_t *)s->w.address;
}

int ucx_server_fd(const ucx_server *s)
{
    return s->w.fd;
}

bool ucx_server_progress(ucx_server *s)
{
    bool asleep = false;
    const ucx_scope scope = ucx_scope_enter(&s->w.log, false);
    for (int i = 0; i < PROGRESS_AT_ONCE && !asleep; i++)
        asleep = s->w.u->ucp_worker_progress(s->w.worker) == 0 &&
                 s->w.u->ucp_worker_arm(s->w.worker) == UCS_OK;
    ucx_scope_leave(&scope);
    return asleep;
}

/* Nothing to do: the control connection says when a client is gone, and its owner closes. */
static void on_peer_error(void *cookie, ucp_ep_h ep, ucs_status_t status)
{
    const ucx_peer *p = cookie;
    (void)ep;
    log_write(&p->server->w.log, FANIN_LOG_DEBUG, "ucx-peer",
              "a client's endpoint failed: %s",
              p->server->w.u->ucs_status_string(status));
}

fanin_status ucx_server_add_peer(ucx_server *s, const uint8_t *address, size_t size,
                                 ucx_peer **out, fanin_error *error)
{
    ucx_peer *p = calloc(1, sizeof(*p));
    if (!p)
        return error_set_memory(error);
    p->server = s;
    const fanin_status status =
        ucx_worker_connect(&s->w, address, size, on_peer_error, p, &p->ep, error);
    if (status != FANIN_OK) {
        free(p);
        return status;
    }
    p->next = s->peers;
    p->link = &s->peers;
    if (p->next)
        p->next->link = &p->next;
    s->peers = p;
    *out = p;
    return FANIN_OK;
}

static void on_peer_closed(void *request, ucs_status_t status, void *cookie)
{
    ucx_peer *p = cookie;
    (void)status;
    p->server->closing--;
    p->server->w.u->ucp_request_free(request);
    free(p);
}

void ucx_peer_close(ucx_peer **peer)
{
    ucx_peer *p = peer ? *peer : NULL;
    if (!p)
        return;
    *peer = NULL;
    *p->link = p->next;
    if (p->next)
        p->next->link = p->link;
    const ucp_request_param_t param = {
        .op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS | UCP_OP_ATTR_FIELD_CALLBACK |
                        UCP_OP_ATTR_FIELD_USER_DATA,
        .flags = UCP_EP_CLOSE_FLAG_FORCE,
        .cb.send = on_peer_closed,
        .user_data = p,
    };
    const ucx_scope scope = ucx_scope_enter(&p->server->w.log, false);
    const ucs_status_ptr_t request = p->server->w.u->ucp_ep_close_nbx(p->ep, &param);
    ucx_scope_leave(&scope);
    if (UCS_PTR_IS_PTR(request))
        p->server->closing++;
    else
        free(p);
}

fanin_status ucx_region_create(ucx_server *s, void *base, size_t length,
                               fanin_memory memory, ucx_region **out,
                               fanin_error *error)
{
    ucx_region *r = calloc(1, sizeof(*r));
    if (!r)
        return error_set_memory(error);
    r->server = s;
    fanin_status status =
        ucx_mapping_open(&s->w, base, length, memory, true, &r->mapping, error);
    if (status == FANIN_OK) {
        const ucx_scope scope = ucx_scope_enter(&s->w.log, false);
        const ucs_status_t ucs = s->w.u->ucp_rkey_pack(s->w.context, r->mapping.handle,
                                                       &r->rkey, &r->rkey_size);
        ucx_scope_leave(&scope);
        if (ucs != UCS_OK) {
            r->rkey = NULL;
            status = ucx_error(s->w.u, error, FANIN_ERR_TRANSPORT, ucs, NULL,
                               "no remote key could be made");
        } else if (r->rkey_size > UCX_BLOB_MAX) {
            status = error_set(error, FANIN_ERR_LIMIT, NULL,
                               "a remote key has %zu bytes, more than %zu",
                               r->rkey_size, UCX_BLOB_MAX);
        }
    }
    if (status != FANIN_OK)
        ucx_region_destroy(&r);
    else
        *out = r;
    return status;
}

const uint8_t *ucx_region_rkey(const ucx_region *r, size_t *size_out)
{
    *size_out = r->rkey_size;
    return r->rkey;
}

void ucx_region_destroy(ucx_region **region)
{
    ucx_region *r = region ? *region : NULL;
    if (!r)
        return;
    *region = NULL;
    if (r->rkey)
        r->server->w.u->ucp_rkey_buffer_release(r->rkey);
    ucx_mapping_close(&r->server->w, &r->mapping);
    free(r);
}
