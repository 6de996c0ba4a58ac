/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file
 * A reader that hands on what it has read. Where many workers want the same tensors of a step, each
 * of them reads a part from the trainer and the rest from the others. So a step leaves the trainer
 * about once, and all have it in about the time of one pull. Nobody orders the workers: the
 * trainer's rank 0 tells them of each other. A worker that dies, stops or is slow is done without.
 * The trainer is always there as the last source.
 *
 * What is handed on is proven: its source has confirmed, after the last byte was in place, that it
 * is of the step. It is handed on from the memory that was pulled into.
 *
 * Threads: one thread at a time uses a relay. Any thread, and a signal handler, may call
 * fanin_relay_cancel(). A relay has a server's threads and one that keeps the list of others. While
 * it pulls it has one more for the trainer and one for each of the others that it reads from.
 *
 * Environment, fork: see fanin/types.h. Errors come as in fanin/client.h.
 */
#ifndef FANIN_RELAY_H
#define FANIN_RELAY_H

#include <fanin/client.h>
#include <fanin/server.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct fanin_relay fanin_relay;

typedef struct fanin_relay_config {
    size_t struct_size;
    /** how the trainer and other relays are read; NULL: fanin_client_config_init()'s */
    const fanin_client_config *client;
    /** where others reach this reader: bind, allow, secret, certificates and so on. NULL: only
        processes of this host. The relay sets name, world_id, rank, world_size and base_port */
    const fanin_server_config *server;
    /** most bytes of what is handed on at a time, alike for all relays; 0 (default): by the size
        of what is pulled, at most 4 MiB. For tests */
    uint64_t unit_bytes;
    /** where this reader is: "site" or "site/rack", of ASCII letters, digits, '.', '-' and '_', at
        most 63 in all. Readers of different sites hand nothing on to each other: each site takes a
        step from the trainer. "": in the site of all readers that say no place. NULL (default):
        FANIN_PLACE in the environment, if it is set */
    const char *place;
} fanin_relay_config;

/** Defaults. @p size is the caller's sizeof(fanin_relay_config); never writes past it. */
FANIN_API void fanin_relay_config_init(fanin_relay_config *config, size_t size);

/**
 * Creates a relay of the trainer at @p addresses, one a rank; copies all that it is given. Connects
 * to nobody. The caller ends *@p relay_out with fanin_relay_destroy().
 *
 * Errors: those of fanin_client_create(), and
 * - FANIN_ERR_ARGUMENT: no addresses, or more than 65536; a place of another form.
 * - FANIN_ERR_LIMIT: no thread or descriptor is left.
 */
FANIN_API FANIN_MUST_CHECK fanin_status
fanin_relay_create(const fanin_relay_config *config, const char *const *addresses,
                   size_t n_addresses, fanin_relay **relay_out, fanin_error *error);

/**
 * Pulls as fanin_client_pull(), from the trainer and from other relays that want the same: the same
 * tensors, dtypes and boxes of the same publication and step. It also takes from relays that pull
 * all tensors of the publication whole, whatever it wants of them. Afterwards what was pulled is
 * handed on, until the next pull writes the memory, or until fanin_relay_release() or
 * fanin_relay_destroy(). Until then the memory stays as it is, and the caller only reads it. After
 * an error nothing is handed on.
 *
 * The step is agreed upon with the trainer, as ever. If the trainer updates meanwhile, the pull
 * ends with the step that it began, if others hold what is missing; else it begins again.
 * FANIN_STEP_EXACT may name a step that the trainer has passed: others that hold all of
 * it together bring it (`nixl-fetch relay --keep`), unless the trainer has taken it back.
 *
 * Of the options progress tells of all bytes, and rank_progress is not called. With verify the
 * trainer's ranks make the digests, also of what relays brought. They cannot for a step that they
 * have passed: FANIN_ERR_SUPERSEDED, naming verify. The result's path_reason says what
 * share came from relays.
 *
 * Blocks and fails as fanin_client_pull(), and
 * - FANIN_ERR_STATE: another thread pulls by this relay.
 * - FANIN_ERR_LIMIT: more than 2^20 parts. Pull fewer tensors at a time.
 * - Those of fanin_server_create(), when a relay serves for the first time, or a trainer has
 *   restarted.
 * - FANIN_ERR_TRANSPORT, with verify: a relay brought other bytes than the trainer holds; names it.
 *   This one does not ask that relay again.
 */
FANIN_API FANIN_MUST_CHECK fanin_status fanin_relay_pull_into(
    fanin_relay *relay, const fanin_pull_options *options, const fanin_tensor *tensors,
    size_t count, fanin_result **result_out, fanin_error *error);

/**
 * Stops handing on. After it returns nobody reads the memory, which may be written or freed. Blocks
 * at most the server's lease_ms. NULL is fine.
 */
FANIN_API void fanin_relay_release(fanin_relay *relay);

/** Makes a running pull of this relay return FANIN_ERR_CANCELLED soon. If none runs, the next one
    does. NULL is fine. Does not block. Thread: any, also from a signal handler. */
FANIN_API void fanin_relay_cancel(fanin_relay *relay);

/** Of the last pull, but for the bytes, which are since the relay was created. */
typedef struct fanin_relay_stats {
    size_t struct_size;
    uint64_t units, landed;     /**< that there are, and that it has */
    uint64_t bytes_from_origin; /**< read of the trainer's ranks */
    uint64_t bytes_from_relays; /**< read of other relays */
    uint64_t bytes_handed_on;   /**< that others have read of it, as far as they told */
    uint64_t late; /**< units that were asked of somebody else, as they took too long */
    uint64_t taken_over; /**< units that were another's to read of the trainer */
    uint64_t holders;    /**< relays that want the same, without this one */
    uint64_t forbidden;  /**< 1: the trainer forbids relays, so nothing is handed on */
} fanin_relay_stats;

/** Fills @p stats up to its struct_size; of NULL: with zeros. Does not block. Thread: any. */
FANIN_API void fanin_relay_get_stats(fanin_relay *relay, fanin_relay_stats *stats);

/** Releases as fanin_relay_release(), and frees; *@p relay becomes NULL. NULL and *relay == NULL
    are fine. In a forked child it frees nothing. No other call of this handle may be under way. */
FANIN_API void fanin_relay_destroy(fanin_relay **relay);

#ifdef __cplusplus
}
#endif
#endif
