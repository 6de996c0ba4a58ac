/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file
 * UCX, loaded at run time: the only place that knows its API. A build without UCX headers
 * has the same functions; ucx_load() then says so.
 *
 * Threads: a ucx_server, and a ucx_client and what hangs from it, are used by
 * one thread at a time. ucx_region_create, _rkey and _destroy may be called by other threads
 * while one progresses the server.
 *
 * No end opens an IP socket for UCX: the transports are shared memory and cma, or RDMA.
 *
 * On a kernel with yama's ptrace_scope 1, UCX lets every process of the same uid read this
 * one (PR_SET_PTRACER) when an end of UCX_PATH_HOST is created.
 */
#ifndef UCX_H
#define UCX_H

#include "clock.h"
#include "log.h"
#include <fanin/types.h>

/** A loaded library. One a process; never unloaded (UCX does not survive that). */
typedef struct ucx ucx;

/**
 * Looks in FANIN_UCX_LIBRARY (a file; empty string: do not load; nothing else is tried), a
 * libucp.so.0 already loaded, where the dynamic loader looks. Needs >= 1.16.
 * FANIN_ERR_UNSUPPORTED with a sentence that says what was found where and what to install.
 * Logs path and version. Sets UCX_MEM_EVENTS=n, UCX_HANDLE_ERRORS=none, UCX_DEBUG_SIGNO=0
 * (where unset) around the first dlopen and removes them again, under a lock: no other
 * thread of the process may use getenv meanwhile. What UCX has to say during a call of this
 * file goes to that call's logger, never to stdout. Thread: any.
 */
fanin_status ucx_load(const logger *log, ucx **out, fanin_error *error);
void ucx_unload(ucx **u);              /**< forgets the handle; the library stays */
const char *ucx_version(const ucx *u); /**< "1.22.0" */
const char *ucx_library_path(const ucx *u);
/** Whether two versions may talk: equal major.minor. */
bool ucx_versions_match(const char *a, const char *b);

/** What carries the reads. */
typedef enum ucx_path {
    UCX_PATH_HOST, /**< between processes of one host, for tests where there is no adapter */
    UCX_PATH_RDMA,
} ucx_path;

/** A region that peers may read. */
typedef struct ucx_region ucx_region;
/** The trainer's end. Its features are STREAM and WAKEUP: with RMA any peer could read and
    write the whole process, and with AM or TAG too (rendezvous messages of UCX 1.22). It
    answers connections and starts none: two ends that connect to each other and disagree about
    lanes make UCX end a process. With RDMA, what a client may read ends with its region; on
    UCX_PATH_HOST the kernel decides, which lets the same uid read anything. */
typedef struct ucx_server ucx_server;

/** FANIN_ERR_UNSUPPORTED: this host or this UCX has no transport of @p path. */
fanin_status ucx_server_create(ucx *u, ucx_path path, const logger *log,
                               ucx_server **out, fanin_error *error);
/** Clients may still be connected. Regions must be gone. */
void ucx_server_destroy(ucx_server **s);
/** The worker's address; owned by the server. */
const uint8_t *ucx_server_address(const ucx_server *s, size_t *size_out);
int ucx_server_fd(const ucx_server *s); /**< readable: call ucx_server_progress */
/** Progresses until nothing is left and the fd is armed; bounded work a call: false: call
    again before sleeping. Call it once before the first sleep. */
bool ucx_server_progress(ucx_server *s);

/** Registers [base, base+length). @p memory must be HOST or CUDA; for CUDA its device's
    context must be current. FANIN_ERR_LIMIT (locked memory: says the limit and how to raise
    it), FANIN_ERR_UNSUPPORTED (read-only memory and RDMA; CUDA and a UCX without it),
    FANIN_ERR_TRANSPORT. Without RDMA nothing is pinned and this takes less than 1 us. */
fanin_status ucx_region_create(ucx_server *s, void *base, size_t length,
                               fanin_memory memory, ucx_region **out,
                               fanin_error *error);
/** Packed remote key; owned by the region. */
const uint8_t *ucx_region_rkey(const ucx_region *r, size_t *size_out);
void ucx_region_destroy(ucx_region **r);

/* ------------------------------------------------------------ client end */

typedef struct ucx_client ucx_client;
typedef struct ucx_endpoint ucx_endpoint;
typedef struct ucx_rkey ucx_rkey;
typedef struct ucx_local ucx_local; /**< a registered destination */

/**
 * @p path narrows the transports to it. Gets that UCX would emulate fail at once where UCX
 * knows PROTO_EMULATION_ENABLE (>= 1.21); with older ones they never complete, since the
 * server ignores them: the first get on an endpoint is a probe with a deadline. RDMA uses
 * one port: the first that UCX_NET_DEVICES names, else the nearest to the GPU with PCI address
 * @p gpu (NULL: host memory), then the fastest.
 */
fanin_status ucx_client_create(ucx *u, ucx_path path, const char *gpu,
                               const logger *log, ucx_client **out, fanin_error *error);
/** All endpoints are force-closed and drained first. The client's ucx_locals must be gone.
    False: not drained within 5 s; then the client is leaked on purpose, and the destinations
    of its gets must never be released. */
bool ucx_client_destroy(ucx_client **c);
const uint8_t *ucx_client_address(const ucx_client *c, size_t *size_out);
int ucx_client_fd(const ucx_client *c);
/** Progresses; true: something happened. Callbacks of gets run in here. */
bool ucx_client_progress(ucx_client *c);
/** Arms the fd; false: something is pending, progress again instead of sleeping. */
bool ucx_client_arm(ucx_client *c);

/** Connects to a server's worker address (at most 4 KiB). Does not wait
    for the server; for RDMA the kernel may take seconds to find that nobody has an address.
    With PEER error handling. FANIN_ERR_UNSUPPORTED: the path's transports do not reach the server.
    */
fanin_status ucx_endpoint_create(ucx_client *c, const uint8_t *address, size_t size,
                                 ucx_endpoint **out, fanin_error *error);
/** 0, or the ucs_status_t the endpoint failed with; text for messages. */
int ucx_endpoint_failed(const ucx_endpoint *e, const char **text_out);
uint64_t ucx_endpoint_outstanding(const ucx_endpoint *e);
/** The transports of the endpoint as UCX names them ("cma/memory", "rc_mlx5/mlx5_0:1"), that
    of the path first if it is there, for the log; "" when unknown. */
const char *ucx_endpoint_transport(ucx_endpoint *e);
/**
 * Force-closes, progresses until every outstanding get has called back (with an error), then
 * frees the endpoint and its rkeys. Must not be called by a callback of a get. False: not
 * drained before @p at; then the destinations of its gets must not be released before
 * ucx_client_destroy() has returned true, and callbacks may come until then.
 */
bool ucx_endpoint_close(ucx_endpoint **e, deadline at);

/** Freed with the endpoint. @p size at most 4 KiB. */
fanin_status ucx_rkey_unpack(ucx_endpoint *e, const uint8_t *data, size_t size,
                             ucx_rkey **out, fanin_error *error);
/** Frees one before its endpoint; no get may be using it. *rkey NULL is fine. */
void ucx_rkey_destroy(ucx_rkey **rkey);

/** As ucx_region_create, for a destination. */
fanin_status ucx_local_create(ucx_client *c, void *base, size_t length,
                              fanin_memory memory, ucx_local **out, fanin_error *error);
void ucx_local_destroy(ucx_local **l);

/** status 0: done; else a ucs_status_t. Called once a get, in the thread that progresses or
    inside ucx_get(). May call ucx_get() (mind the recursion when gets complete inline). */
typedef void (*ucx_done_fn)(void *cookie, uint64_t tag, int ucx_status);

/**
 * Starts reading @p length bytes at @p remote into @p to (inside @p local). FANIN_OK:
 * @p done was or will be called once. Else it is never called. With cma this only queues;
 * ucx_client_progress() copies, at most 512 KiB a call, in the thread that calls it.
 */
fanin_status ucx_get(ucx_endpoint *e, ucx_rkey *rkey, uint64_t remote, void *to,
                     size_t length, const ucx_local *local, ucx_done_fn done,
                     void *cookie, uint64_t tag, fanin_error *error);

#endif
