/* SPDX-License-Identifier: Apache-2.0 */
#include "topology.h"
#include "ucx_internal.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Bits of roles. */
#define R(role) (1u << UCX_ROLE_##role)
#define CLIENTS (R(CLIENT_HOST) | R(CLIENT_RDMA))
#define SAME_HOST (R(SERVER_HOST) | R(CLIENT_HOST))
#define EVERYBODY (SAME_HOST | R(SERVER_RDMA) | R(CLIENT_RDMA))

typedef struct setting {
    const char *key, *value;
    unsigned roles;
    unsigned minor; /**< of the first UCX 1.x that knows it */
    bool required;  /**< holds whatever the environment says, or there is no context */
} setting;

static const setting settings[] = {
    /* What may be used. tcp is never among it: it would listen on IP sockets, and reads over
       it are emulated by the server. Nor is sysv: its segments can be written by every user of
       the group, and what is scribbled over a queue ends the process. The transports decide what
       a path's name means. */
    {"TLS", "posix,cma", SAME_HOST, 0, true},
    {"TLS", "rc,dc,cuda_copy,gdr_copy", R(SERVER_RDMA) | R(CLIENT_RDMA), 0, true},
    /* The one form of addresses that ucx_address.h knows. */
    {"ADDRESS_VERSION", "v1", EVERYBODY, 0, true},
    {"ADDRESS_DEBUG_INFO", "n", EVERYBODY, 0, true},
    {"UNIFIED_MODE", "n", EVERYBODY, 0, true},
    /* An emulated read would wait for ever: the server ignores it. */
    {"PROTO_EMULATION_ENABLE", "n", CLIENTS, 21, true},
    /* Transports listed above that this host lacks are no reason to warn. */
    {"WARN_INVALID_CONFIG", "n", EVERYBODY, 0, false},
    /* Without these, shared memory and cma are not used with PEER error handling. */
    {"POSIX_ERROR_HANDLING", "y", SAME_HOST, 0, false},
    {"CMA_MEMORY_INVALIDATE", "y", SAME_HOST, 0, false},
    /* One lane of RDMA: the server, which lacks the RMA feature, answers a connection with
       one, and UCX ends the process when it expected more. See also pin_device(). */
    {"MAX_RMA_RAILS", "1", EVERYBODY, 0, true},
    {"MAX_RNDV_RAILS", "1", EVERYBODY, 0, true},
    {"MAX_EAGER_RAILS", "1", EVERYBODY, 0, true},
    /* Registered means registered until it is unmapped, not while a cache likes it. */
    {"RCACHE_ENABLE", "n", EVERYBODY, 0, false},
    {"KEEPALIVE_INTERVAL", "1s", EVERYBODY, 0, false},
};

/* Up to UCX 1.18 the newer protocols have no one-sided read with PEER error handling and
   would emulate it; the older ones have it for RDMA. */
#define PROTOCOLS_GOOD_SINCE 19
static const setting old_settings[] = {
    {"PROTO_ENABLE", "n", R(CLIENT_RDMA), 0, true},
};

/* Options of the whole process, set only on a library that nobody else had loaded. */
static const setting global_settings[] = {
    /* Every call says what kind of memory it means. */
    {"MEMTYPE_CACHE", "n", EVERYBODY, 0, false},
};

fanin_status ucx_error(const ucx *u, fanin_error *error, fanin_status status,
                       ucs_status_t ucs, const char *remedy, const char *what)
{
    const error_place place = {.remedy = remedy, .ucx_status = ucs};
    return error_set(error, status, &place, "%s: %s", what, u->ucs_status_string(ucs));
}

static bool is_in_environment(const char *key)
{
    char name[64];
    snprintf(name, sizeof name, "UCX_%s", key);
    return getenv(name) != NULL;
}

static fanin_status apply(const ucx *u, ucp_config_t *config, const setting *s,
                          const logger *log, fanin_error *error)
{
    if (u->minor < s->minor || (!s->required && is_in_environment(s->key)))
        return FANIN_OK;
    const ucs_status_t ucs = u->ucp_config_modify(config, s->key, s->value);
    if (ucs == UCS_OK)
        return FANIN_OK;
    char what[128];
    snprintf(what, sizeof what, "UCX %s does not take %s=%s", u->version, s->key,
             s->value);
    if (s->required)
        return ucx_error(u, error, FANIN_ERR_UNSUPPORTED, ucs, NULL, what);
    /* A key is unknown as long as the module that it belongs to is absent. */
    log_write(log, FANIN_LOG_DEBUG, "ucx-config", "%s", what);
    return FANIN_OK;
}

static fanin_status apply_all(const ucx *u, ucp_config_t *config, ucx_role role,
                              const setting *list, size_t count, const logger *log,
                              fanin_error *error)
{
    fanin_status status = FANIN_OK;
    for (size_t i = 0; i < count && status == FANIN_OK; i++)
        if (list[i].roles & (1u << role))
            status = apply(u, config, &list[i], log, error);
    return status;
}

/* RDMA ports have a colon; the list may name network interfaces too. */
static bool first_port_of(const char *list, char name[UCX_DEVICE_NAME])
{
    while (list && *list) {
        const size_t length = strcspn(list, ",");
        if (list[0] != '^' && memchr(list, ':', length) && length < UCX_DEVICE_NAME) {
            memcpy(name, list, length);
            name[length] = '\0';
            return true;
        }
        list += length + (list[length] == ',');
    }
    return false;
}

bool ucx_device_choose(const char *sysfs, const char *wanted, const char *gpu,
                       char name[UCX_DEVICE_NAME])
{
    if (first_port_of(wanted, name))
        return true;
    topology *t;
    if (topology_read(sysfs, &t, NULL) != FANIN_OK)
        return false;
    const topology_gpu *near = gpu ? topology_gpu_at(t, gpu) : NULL;
    const bool found = topology_choose_port(t, near ? &near->place : NULL, name);
    topology_free(&t);
    return found;
}

/* Lanes for different purposes must not lie on different devices either. */
static fanin_status pin_device(const ucx *u, ucp_config_t *config, const char *gpu,
                               const logger *log, fanin_error *error)
{
    char name[UCX_DEVICE_NAME];
    const char *wanted = getenv("UCX_NET_DEVICES");
    if (!ucx_device_choose("/sys", wanted, gpu, name))
        return error_set(error, FANIN_ERR_UNSUPPORTED, NULL,
                         "this host has no active RDMA port");
    if (wanted && strchr(wanted, ','))
        log_write(log, FANIN_LOG_INFO, "ucx-config",
                  "of UCX_NET_DEVICES %s only %s is used", wanted, name);
    const setting pinned = {"NET_DEVICES", name, 0, 0, true};
    return apply(u, config, &pinned, log, error);
}

fanin_status ucx_config_make(const ucx *u, ucx_role role, const char *gpu,
                             const logger *log, ucp_config_t **out, fanin_error *error)
{
    ucp_config_t *config;
    const ucs_status_t ucs = u->ucp_config_read(NULL, NULL, &config);
    if (ucs != UCS_OK)
        return ucx_error(u, error, FANIN_ERR_TRANSPORT, ucs,
                         "check the UCX_ variables in the environment",
                         "UCX could not read its configuration");
    fanin_status status = apply_all(u, config, role, settings,
                                    sizeof settings / sizeof settings[0], log, error);
    if (status == FANIN_OK && u->minor < PROTOCOLS_GOOD_SINCE)
        status = apply_all(u, config, role, old_settings,
                           sizeof old_settings / sizeof old_settings[0], log, error);
    if (status == FANIN_OK && u->ours)
        status =
            apply_all(u, config, role, global_settings,
                      sizeof global_settings / sizeof global_settings[0], log, error);
    if (status == FANIN_OK && role == UCX_ROLE_CLIENT_RDMA)
        status = pin_device(u, config, gpu, log, error);
    if (status != FANIN_OK) {
        u->ucp_config_release(config);
        return status;
    }
    *out = config;
    return FANIN_OK;
}
