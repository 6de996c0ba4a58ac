/* SPDX-License-Identifier: Apache-2.0 */
#include "ucx_internal.h"
#include <stdlib.h>

#define PROGRESS_AT_ONCE 64
#define DESTROY_MS 5000

struct ucx_server {
    ucx_worker w;
};

struct ucx_region {
    ucx_server *server;
    ucx_mapping mapping;
    void *rkey;
    size_t rkey_size;
};

fanin_status ucx_server_create(ucx *u, ucx_path path, const logger *log,
                               ucx_server **out, fanin_error *error)
{
    ucx_server *s = calloc(1, sizeof *s);
    if (!s)
        return error_set_memory(error);
    /* Some feature is needed for lanes to answer RDMA connections with. STREAM is the one
       that installs no handler which takes an address from the peer. */
    const fanin_status status = ucx_worker_open(
        &s->w, u, path == UCX_PATH_HOST ? UCX_ROLE_SERVER_HOST : UCX_ROLE_SERVER_RDMA,
        UCP_FEATURE_STREAM | UCP_FEATURE_WAKEUP, NULL, log, error);
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
    /* Destroying a worker while UCX still discards an endpoint may abort the process: rather
       leak one that does not finish. */
    const deadline at = deadline_in_ms(DESTROY_MS);
    while (!ucx_server_progress(s))
        if (deadline_passed(at))
            return;
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

fanin_status ucx_region_create(ucx_server *s, void *base, size_t length,
                               fanin_memory memory, ucx_region **out,
                               fanin_error *error)
{
    ucx_region *r = calloc(1, sizeof *r);
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
