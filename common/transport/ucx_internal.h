/* SPDX-License-Identifier: Apache-2.0 */
/** @file What the files of the UCX transport share. */
#ifndef UCX_INTERNAL_H
#define UCX_INTERNAL_H

#include "error_set.h"
#include "log.h"
#include "ucx.h"
#include <signal.h>
#include <stdarg.h>
#include <ucp/api/ucp.h>

/* UCX's header for these is not usable in ISO C. The same from 1.16 to 1.22. */
enum { UCX_LOG_FATAL = 0, UCX_LOG_WARN = 2 };
enum { UCX_LOG_STOP = 0, UCX_LOG_CONTINUE = 1 };
typedef int (*ucx_log_fn)(const char *file, unsigned line, const char *function,
                          int level, const void *component, const char *format,
                          va_list arguments);
void ucs_log_push_handler(ucx_log_fn handler);

/** The oldest UCX that is used; ucp_init_version() is called with it. */
#define UCX_MIN_MAJOR 1U
#define UCX_MIN_MINOR 16U

/** Longest address and remote key that is accepted. UCX is not told their length and
    believes what they say, so they are parsed in a copy with zeros behind. */
#define UCX_BLOB_MAX ((size_t)4096)

/** All functions of UCX that are called: members of struct ucx and names for dlsym. */
#define UCX_FUNCTIONS(X)                                                               \
    X(ucp_lib_query)                                                                   \
    X(ucp_config_read)                                                                 \
    X(ucp_config_modify)                                                               \
    X(ucp_config_release)                                                              \
    X(ucp_init_version)                                                                \
    X(ucp_cleanup)                                                                     \
    X(ucp_context_query)                                                               \
    X(ucp_worker_create)                                                               \
    X(ucp_worker_destroy)                                                              \
    X(ucp_worker_query)                                                                \
    X(ucp_worker_release_address)                                                      \
    X(ucp_worker_progress)                                                             \
    X(ucp_worker_arm)                                                                  \
    X(ucp_worker_get_efd)                                                              \
    X(ucp_ep_create)                                                                   \
    X(ucp_ep_close_nbx)                                                                \
    X(ucp_ep_query)                                                                    \
    X(ucp_ep_rkey_unpack)                                                              \
    X(ucp_rkey_destroy)                                                                \
    X(ucp_rkey_pack)                                                                   \
    X(ucp_rkey_buffer_release)                                                         \
    X(ucp_mem_map)                                                                     \
    X(ucp_mem_unmap)                                                                   \
    X(ucp_get_nbx)                                                                     \
    X(ucp_request_free)                                                                \
    X(ucs_status_string)                                                               \
    X(ucs_log_push_handler)

struct ucx {
    unsigned major, minor, release;
    bool ours; /**< loaded by ucx_load, not by somebody else before */
    char version[32];
    char path[512];
#define X(name) __typeof__(&name) name; /* NOLINT(bugprone-macro-parentheses) */
    UCX_FUNCTIONS(X)
#undef X
};

/**
 * Surrounds calls of UCX: its messages go to @p log. With @p threads signals are blocked
 * too, for calls in which UCX may start its thread, which inherits the mask. May nest.
 */
typedef struct ucx_scope {
    const logger *outer;
    sigset_t signals;
    bool threads;
} ucx_scope;
ucx_scope ucx_scope_enter(const logger *log, bool threads);
void ucx_scope_leave(const ucx_scope *scope);

/** What a context is for. */
typedef enum ucx_role {
    UCX_ROLE_SERVER_HOST,
    UCX_ROLE_SERVER_RDMA,
    UCX_ROLE_CLIENT_HOST,
    UCX_ROLE_CLIENT_RDMA,
} ucx_role;
/** The role's configuration, respecting the environment; @p gpu as in ucx_client_create().
    Released by the caller. */
fanin_status ucx_config_make(const ucx *u, ucx_role role, const char *gpu,
                             const logger *log, ucp_config_t **out, fanin_error *error);

#define UCX_DEVICE_NAME 64
/**
 * The RDMA port that a client uses ("mlx5_0:1"): the first of @p wanted (the user's
 * UCX_NET_DEVICES, may be NULL), else of the active ones that @p sysfs ("/sys") shows the
 * nearest to the GPU with PCI address @p gpu (may be NULL), then the fastest. False: there is
 * none.
 */
bool ucx_device_choose(const char *sysfs, const char *wanted, const char *gpu,
                       char name[UCX_DEVICE_NAME]);

/** A context with its one worker. Zeroed: none. */
typedef struct ucx_worker {
    const ucx *u;
    logger log;
    ucp_context_h context;
    ucp_worker_h worker;
    uint64_t memory_types; /**< bits of ucs_memory_type_t */
    bool has_rdma;         /**< registration pins memory */
    int fd;
    ucp_address_t *address;
    size_t address_size;
} ucx_worker;
fanin_status ucx_worker_open(ucx_worker *w, ucx *u, ucx_role role, uint64_t features,
                             const char *gpu, const logger *log, fanin_error *error);
/** Everything that hangs from it must be gone, endpoints excepted. */
void ucx_worker_close(ucx_worker *w);

/** A connection with PEER error handling to an address from the network. */
fanin_status ucx_worker_connect(const ucx_worker *w, const uint8_t *address,
                                size_t size, ucp_err_handler_cb_t on_error,
                                void *cookie, ucp_ep_h *out, fanin_error *error);

/** A registered range of memory. */
typedef struct ucx_mapping {
    ucp_mem_h handle;
    ucs_memory_type_t type;
} ucx_mapping;
fanin_status ucx_mapping_open(const ucx_worker *w, void *base, size_t length,
                              fanin_memory memory, bool remote, ucx_mapping *out,
                              fanin_error *error);
void ucx_mapping_close(const ucx_worker *w, ucx_mapping *m);

/** error_set() with ": <UCX's text>" behind the message and ucx_status set. */
fanin_status ucx_error(const ucx *u, fanin_error *error, fanin_status status,
                       ucs_status_t ucs, const char *remedy, const char *what);

#endif
