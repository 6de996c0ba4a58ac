/* SPDX-License-Identifier: Apache-2.0 */
/** @file What a client is made of, shared by the client's own files. */
#ifndef CLIENT_STATE_H
#define CLIENT_STATE_H

#include "catalog.h"
#include "host.h"
#include "log.h"
#include "net/connection.h"
#include "trace.h"
#include "worker_pool.h"
#include <fanin/client.h>
#include <stdatomic.h>
#include <sys/types.h>

typedef struct publication publication; /* catalog/tables.h */

/** One trainer rank: its connection. */
typedef struct peer {
    connection *control;
    uint64_t generation; /**< of the connection; what is of another one is void */
    uint64_t admitted; /**< of the connection that was compared with the other ranks' */
    bool slow;         /**< the last call stopped waiting for the connection */
    bool half_made;    /**< it was being made already when this call began */
    uint64_t lost_ns;  /**< when a pull lost it; 0: it did not, or it is needed */
} peer;

struct fanin_client {
    pid_t pid;
    fanin_client_config config;
    const struct path_reader *forced; /**< the path that it names; NULL: any */
    char *server_name;
    logger log;
    char host[HOST_ID_SIZE]; /**< "": not known, so that no rank is on it */
    loop loop;
    connection_shared shared;
    unsigned told_strangers; /**< differences of ranks that the log has spoken of */
    peer *peers;             /**< in the order of the addresses */
    size_t n_peers;
    atomic_bool cancelled;
    loop_source cancel; /**< eventfd that cancel writes to */
    bool connected;     /**< addresses are known */
    trace_place place;  /**< the pull that is under way */
    struct {
        uint64_t since_ns;
        unsigned told, left_out;
    } pulls_told;       /**< pull/result.c: lines of the current second */
    uint64_t plan_seed; /**< which of several holders it reads (plan/plan.h) */
    /* what rooms above this one keep between calls, each its own; NULL: nothing */
    publication *publications;       /**< catalog/tables.h */
    struct devices *devices;         /**< device/devices.h */
    struct path_peer *paths;         /**< path/path.h; one a peer */
    struct stream_end *streams;      /**< stream/stream_link.h; one a peer */
    struct reading_threads *readers; /**< net/threads.h */
    struct cma_end *cma;             /**< cma/cma.h */
    struct ucx_end *one_sided;       /**< ucx/ucx_end.h */
    struct spare_file *spare;        /**< adapter/spare_file.h */
    struct adapter_layout *layout;   /**< adapter/adapter.h */
    struct step_contents *contents;  /**< adapter/adapter_internal.h */
    fanin_session *session;          /**< pull/pull_session.h: no other call may run */
};

/** Makes client->cancel. FANIN_ERR_LIMIT. */
fanin_status client_watch_cancel(fanin_client *client, fanin_error *error);
/** FANIN_ERR_FORKED in a child, FANIN_ERR_ARGUMENT for NULL. */
fanin_status client_check(const fanin_client *client, fanin_error *error);
/** client_check(), and that fanin_client_connect() gave addresses. */
fanin_status client_check_connected(const fanin_client *client, fanin_error *error);
/** client_check_connected(), and that there is a callback (@p told). */
fanin_status client_check_told(const fanin_client *client, bool told,
                               fanin_error *error);

/**
 * Steps the loop until *@p left is 0. FANIN_ERR_CANCELLED; FANIN_ERR_TIMEOUT when @p at passes.
 * Handlers with cookies that die with the caller must then be forgotten.
 */
fanin_status client_run(fanin_client *client, const size_t *left, deadline at,
                        const char *phase, fanin_error *error);
/** For work that computes for long: stops when a deadline has passed or the call was cancelled. */
typedef struct client_work {
    work_stop stop;
    fanin_client *client;
    deadline at;
} client_work;
/** @p w must stay where it is. */
void client_work_start(client_work *w, fanin_client *client, deadline at);
/** Whether its deadline has passed or the call was cancelled. In any thread. */
bool client_work_over(const client_work *w);
/** @p status of the work and its @p error; if it was stopped by cancel, FANIN_ERR_CANCELLED. */
fanin_status client_work_end(const client_work *w, fanin_status status,
                             fanin_error *error);
/** One step of the loop; returns at @p wake at the latest. FANIN_ERR_CANCELLED,
    FANIN_ERR_TIMEOUT when @p at has passed. */
fanin_status client_step(fanin_client *client, deadline at, deadline wake,
                         const char *phase, fanin_error *error);
/** Pings and gives up ranks that fell silent. When to look again: at once if a rank was given up
    just now, for nothing may follow that would wake the loop. */
deadline client_tick(fanin_client *client);

/**
 * Connects what is down and waits until every connection is READY or failed, at most until
 * @p at; then compares all ranks (one world, each rank once, one world size). If they differ, all
 * are asked whether they still live, for lost_ms or half of the time at most; who is silent is
 * connected anew, and all are compared again. FANIN_OK if at least one rank is there.
 *
 * Unless @p patient, who is silent holds nobody up once a rank is there: ranks that fell silent or
 * did not answer in time before are not waited for, the others for half of the time at most. They
 * go on connecting, and are there in a later call.
 */
fanin_status client_ensure_connected(fanin_client *client, bool patient, deadline at,
                                     fanin_error *error);
/** Ranks that are there: peer_ready(). */
size_t client_count_ready(const fanin_client *client);
/** Whether ranks that are not there are still connecting. */
bool client_expects_more(const fanin_client *client);

/** The first connecting: returns as soon as one rank is there; the loop carries on the others. */
fanin_status client_connect_first(fanin_client *client, deadline at,
                                  fanin_error *error);
/** All that are connected take part from now on, if they belong together and are who was demanded:
    FANIN_ERR_WORLD. None is there: why the first one is not. */
fanin_status client_compare(fanin_client *client, fanin_error *error);
/** Connected, and compared with the other ranks. */
bool peer_ready(const peer *p);

/**
 * Writes "rank 3 at host:port", or "ranks 0-2, 7", of the peers with @p mask; those that never said
 * who they are by address. What does not fit is counted ("and 12 more"), never cut.
 */
void rank_list_text(const fanin_client *client, const bool *mask, char *out,
                    size_t size);

/* What calls tell the trace (trace.h); nothing where there is none. */

/** A part of a call, from @p began until now. @p about may be NULL. */
void span_of_call(const fanin_client *client, trace_name name, uint64_t began,
                  fanin_status outcome, const char *about);
/** One rank's part of it, until @p ended. */
void span_of_rank(const fanin_client *client, size_t peer, trace_name name,
                  uint64_t began, uint64_t ended, uint64_t bytes, fanin_status outcome);
/** The same of a connection, whose client's place @p place is, until now. */
void span_of_connection(const connection *c, const trace_place *place, trace_name name,
                        uint64_t began, fanin_status outcome);

/* What each rank has of one publication: who is gone, who is behind, in words. */

typedef struct rank_status {
    bool answered;    /**< the rest is known */
    bool present;     /**< the rank publishes it */
    int32_t state;    /**< FANIN_PUBLICATION_... */
    uint64_t age_ms;  /**< since it has this state; 0: not known */
    uint64_t step;    /**< last committed, 0: none */
    uint64_t version; /**< of the catalog; 0: none yet */
    uint8_t keys[16]; /**< digest of the key table */
} rank_status;

/**
 * Asks every rank that is there, until @p at; out[i] is peer i's. Who does not answer has answered
 * false. FANIN_ERR_CANCELLED, FANIN_ERR_MEMORY.
 */
fanin_status rank_status_ask(fanin_client *client, const char *publication, deadline at,
                             rank_status *out, fanin_error *error);

/**
 * Writes who can't be read at @p step: first the ranks that are gone, then those that do not
 * answer, then those that are furthest behind, then those that are in an update. Returns the first
 * peer that it names, n_peers if there is none.
 */
size_t rank_status_text(const fanin_client *client, const rank_status *all,
                        uint64_t step, char *text, size_t size);

#endif
