/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file
 * The ranks' processes, which the kernel reads for this one: asked for once a connection, whatever
 * the publication, and by whatever path its bytes come.
 */
#ifndef RANK_PROCESS_H
#define RANK_PROCESS_H

#include "cma/cma_process.h"
#include "net/client_state.h"

/** One rank is asked to let itself be read. */
typedef struct rank_opening {
    bool asked;
    size_t *left;
    uint64_t witness; /**< out; 0: it does not */
    pid_t pid;        /**< by rank_process_objection() */
    fanin_error error;
} rank_opening;

/** What holds against reading it before it was asked; NULL: nothing. *@p pid: in this process's
    numbers. */
const char *rank_process_objection(const fanin_client *client, size_t peer, pid_t *pid);
/** Asks; o->left counts who has not answered. Whoever stops waiting has @p o forgotten. */
void rank_opening_ask(fanin_client *client, size_t peer, rank_opening *o);
/** Who is to be read by what the rank has answered. */
cma_process rank_opening_process(const fanin_client *client, size_t peer,
                                 const rank_opening *o);

/** A read of that process has gone well: it is the rank's as long as this connection lasts. */
void rank_process_keep(fanin_client *client, size_t peer, const cma_process *process);
/** NULL: none is known on this connection. */
const cma_process *rank_process_of(const fanin_client *client, size_t peer);
/** Asks those of @p want that were not asked on this connection, and tries to read them; who cannot
    be read stays unknown, and is no error. FANIN_ERR_MEMORY; FANIN_ERR_CANCELLED,
    FANIN_ERR_TIMEOUT. */
fanin_status rank_processes_open(fanin_client *client, const bool *want, deadline at,
                                 fanin_error *error);

#endif
