/* SPDX-License-Identifier: Apache-2.0 */
#include "text.h"
#include "ucx_address.h"
#include "ucx_internal.h"

#include <inttypes.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>

/* --------------------------------------------------------------------- ucx server */

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

/* --------------------------------------------------------------------- ucx worker */

static fanin_status open_context(ucx_worker *w, ucx_role role, uint64_t features,
                                 const char *gpu, fanin_error *error)
{
    const ucx *u = w->u;
    ucp_config_t *config;
    fanin_status status = ucx_config_make(u, role, gpu, &w->log, &config, error);
    if (status != FANIN_OK)
        return status;
    /* mt_workers_shared: regions are made by other threads than the one that progresses. */
    const ucp_params_t params = {
        .field_mask = UCP_PARAM_FIELD_FEATURES | UCP_PARAM_FIELD_MT_WORKERS_SHARED |
                      UCP_PARAM_FIELD_NAME,
        .features = features,
        .mt_workers_shared = 1,
        .name = "fanin",
    };
    ucs_status_t ucs =
        u->ucp_init_version(UCX_MIN_MAJOR, UCX_MIN_MINOR, &params, config, &w->context);
    u->ucp_config_release(config);
    if (ucs != UCS_OK)
        return ucx_error(u, error, FANIN_ERR_UNSUPPORTED, ucs,
                         "look at the transports with ucx_info -d",
                         "UCX has no transport for this path on this host");
    ucp_context_attr_t attributes = {.field_mask = UCP_ATTR_FIELD_MEMORY_TYPES};
    ucs = u->ucp_context_query(w->context, &attributes);
    if (ucs == UCS_OK)
        w->memory_types = attributes.memory_types;
    return FANIN_OK;
}

static fanin_status open_worker(ucx_worker *w, fanin_error *error)
{
    const ucx *u = w->u;
    const ucp_worker_params_t params = {
        .field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE,
        .thread_mode = UCS_THREAD_MODE_SERIALIZED,
    };
    ucs_status_t ucs = u->ucp_worker_create(w->context, &params, &w->worker);
    if (ucs != UCS_OK) {
        w->worker = NULL;
        return ucx_error(u, error, FANIN_ERR_TRANSPORT, ucs,
                         "check the limits of open files and of shared memory",
                         "UCX could not create its worker");
    }
    ucp_worker_attr_t attributes = {.field_mask = UCP_WORKER_ATTR_FIELD_ADDRESS};
    ucs = u->ucp_worker_query(w->worker, &attributes);
    if (ucs == UCS_OK) {
        w->address = attributes.address;
        w->address_size = attributes.address_length;
        ucs = u->ucp_worker_get_efd(w->worker, &w->fd);
    }
    if (ucs != UCS_OK)
        return ucx_error(u, error, FANIN_ERR_TRANSPORT, ucs, NULL,
                         "UCX's worker has no address or no descriptor");
    if (w->address_size > UCX_BLOB_MAX)
        return error_set(error, FANIN_ERR_LIMIT, NULL,
                         "UCX's worker address has %zu bytes, more than %zu",
                         w->address_size, UCX_BLOB_MAX);
    return FANIN_OK;
}

fanin_status ucx_worker_open(ucx_worker *w, ucx *u, ucx_role role, uint64_t features,
                             const char *gpu, const logger *log, fanin_error *error)
{
    *w = (ucx_worker){.u = u, .fd = -1};
    if (log)
        w->log = *log;
    w->has_rdma = role == UCX_ROLE_SERVER_RDMA || role == UCX_ROLE_CLIENT_RDMA;
    const ucx_scope scope = ucx_scope_enter(&w->log, true);
    fanin_status status = open_context(w, role, features, gpu, error);
    if (status == FANIN_OK)
        status = open_worker(w, error);
    ucx_scope_leave(&scope);
    if (status != FANIN_OK)
        ucx_worker_close(w);
    return status;
}

void ucx_worker_close(ucx_worker *w)
{
    const ucx_scope scope = ucx_scope_enter(&w->log, true);
    if (w->address)
        w->u->ucp_worker_release_address(w->worker, w->address);
    if (w->worker)
        w->u->ucp_worker_destroy(w->worker);
    if (w->context)
        w->u->ucp_cleanup(w->context);
    ucx_scope_leave(&scope);
    *w = (ucx_worker){.fd = -1};
}

fanin_status ucx_worker_connect(const ucx_worker *w, const uint8_t *address,
                                size_t size, ucp_err_handler_cb_t on_error,
                                void *cookie, ucp_ep_h *out, fanin_error *error)
{
    if (size == 0 || size > UCX_BLOB_MAX)
        return error_set(error, FANIN_ERR_PROTOCOL, NULL,
                         "a UCX worker address of %zu bytes", size);
    const char *why = ucx_address_check(address, size, (const uint8_t *)w->address,
                                        w->address_size, !w->has_rdma);
    if (why)
        return error_set(error, FANIN_ERR_PROTOCOL, NULL,
                         "the bytes from the peer are no UCX worker address: %s", why);
    uint8_t *copy = calloc(2, UCX_BLOB_MAX);
    if (!copy)
        return error_set_memory(error);
    memcpy(copy, address, size);
    const ucp_ep_params_t params = {
        .field_mask = UCP_EP_PARAM_FIELD_REMOTE_ADDRESS |
                      UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE |
                      UCP_EP_PARAM_FIELD_ERR_HANDLER,
        .address = (const ucp_address_t *)copy,
        .err_mode = UCP_ERR_HANDLING_MODE_PEER,
        .err_handler = {.cb = on_error, .arg = cookie},
    };
    const ucx_scope scope = ucx_scope_enter(&w->log, true);
    const ucs_status_t ucs = w->u->ucp_ep_create(w->worker, &params, out);
    ucx_scope_leave(&scope);
    free(copy);
    if (ucs == UCS_OK)
        return FANIN_OK;
    return ucx_error(w->u, error, FANIN_ERR_UNSUPPORTED, ucs, NULL,
                     "UCX cannot reach the peer");
}

static bool choose_type(const ucx_worker *w, fanin_memory memory,
                        ucs_memory_type_t *out, fanin_error *error)
{
    if (memory.kind == FANIN_MEMORY_HOST) {
        *out = UCS_MEMORY_TYPE_HOST;
        return true;
    }
    *out = UCS_MEMORY_TYPE_CUDA;
    if (memory.kind != FANIN_MEMORY_CUDA) {
        error_set(error, FANIN_ERR_ARGUMENT, NULL,
                  "memory of kind %d cannot be registered", (int)memory.kind);
        return false;
    }
    /* A UCX without CUDA would touch a device pointer with the CPU. */
    if (w->memory_types & UCS_BIT(UCS_MEMORY_TYPE_CUDA))
        return true;
    const error_place place = {.remedy =
                                   "install a UCX with CUDA modules, 1.19 or newer; "
                                   "ucx_info -d | grep cuda shows them"};
    error_set(error, FANIN_ERR_UNSUPPORTED, &place,
              "UCX %s at %s has no CUDA support here", w->u->version, w->u->path);
    return false;
}

/* Whether all mapped parts of the range can be written. */
static bool is_writable(uintptr_t from, uintptr_t to)
{
    FILE *maps = fopen("/proc/self/maps", "re");
    if (!maps)
        return true;
    bool writable = true;
    char line[512];
    while (fgets(line, sizeof line, maps)) {
        uintptr_t begin, end;
        char mode[5];
        if (sscanf(line, "%" SCNxPTR "-%" SCNxPTR " %4s", &begin, &end, mode) == 3 &&
            begin < to && end > from && mode[1] != 'w')
            writable = false;
    }
    fclose(maps);
    return writable;
}

/* UCX says no more than that it failed: look for the usual causes. */
static fanin_status ucx_worker_explain(const ucx_worker *w, ucs_status_t ucs,
                                       void *base, size_t length, bool cuda,
                                       fanin_error *error)
{
    char what[192];
    text t = text_in(what, sizeof what);
    text_add(&t, "%zu bytes at %p could not be registered", length, base);
    if (!w->has_rdma || cuda)
        return ucx_error(w->u, error, FANIN_ERR_TRANSPORT, ucs, NULL, what);
    if (!is_writable((uintptr_t)base, (uintptr_t)base + length)) {
        text_add(&t, " for RDMA, part of it is read-only");
        return ucx_error(
            w->u, error, FANIN_ERR_UNSUPPORTED, ucs,
            "RDMA needs writable memory: map it with PROT_WRITE (MAP_PRIVATE "
            "for a file) or copy it",
            what);
    }
    struct rlimit limit;
    if (getrlimit(RLIMIT_MEMLOCK, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY) {
        text_add(&t, "; the limit of locked memory is %" PRIu64 " bytes",
                 (uint64_t)limit.rlim_cur);
        return ucx_error(
            w->u, error, FANIN_ERR_LIMIT, ucs,
            "raise it: ulimit -l unlimited, LimitMEMLOCK=infinity in a systemd "
            "unit, --ulimit memlock=-1 for a container",
            what);
    }
    return ucx_error(w->u, error, FANIN_ERR_TRANSPORT, ucs, NULL, what);
}

fanin_status ucx_mapping_open(const ucx_worker *w, void *base, size_t length,
                              fanin_memory memory, bool remote, ucx_mapping *out,
                              fanin_error *error)
{
    ucs_memory_type_t type;
    if (length == 0 || !base || (uintptr_t)base + length < (uintptr_t)base)
        return error_set(error, FANIN_ERR_ARGUMENT, NULL,
                         "no range of memory: %zu bytes at %p", length, base);
    if (!choose_type(w, memory, &type, error))
        return memory.kind == FANIN_MEMORY_CUDA ? FANIN_ERR_UNSUPPORTED
                                                : FANIN_ERR_ARGUMENT;
    const ucp_mem_map_params_t params = {
        .field_mask = UCP_MEM_MAP_PARAM_FIELD_ADDRESS | UCP_MEM_MAP_PARAM_FIELD_LENGTH |
                      UCP_MEM_MAP_PARAM_FIELD_PROT |
                      UCP_MEM_MAP_PARAM_FIELD_MEMORY_TYPE,
        .address = base,
        .length = length,
        .prot = remote ? UCP_MEM_MAP_PROT_LOCAL_READ | UCP_MEM_MAP_PROT_REMOTE_READ
                       : UCP_MEM_MAP_PROT_LOCAL_READ | UCP_MEM_MAP_PROT_LOCAL_WRITE,
        .memory_type = type,
    };
    ucp_mem_h handle;
    const ucx_scope scope = ucx_scope_enter(&w->log, false);
    const ucs_status_t ucs = w->u->ucp_mem_map(w->context, &params, &handle);
    ucx_scope_leave(&scope);
    if (ucs != UCS_OK)
        return ucx_worker_explain(w, ucs, base, length, type == UCS_MEMORY_TYPE_CUDA,
                                  error);
    *out = (ucx_mapping){.handle = handle, .type = type};
    return FANIN_OK;
}

void ucx_mapping_close(const ucx_worker *w, ucx_mapping *m)
{
    const ucx_scope scope = ucx_scope_enter(&w->log, false);
    if (m->handle)
        w->u->ucp_mem_unmap(w->context, m->handle);
    ucx_scope_leave(&scope);
    m->handle = NULL;
}
