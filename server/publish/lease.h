/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file
 * Readers (sessions as the publications see them) and their leases. A lease exists exactly
 * as long as its token is good: until end, session close, or the turn of its epoch.
 */
#ifndef LEASE_H
#define LEASE_H

#include "clock.h"
#include "publish/publication.h"

#define SESSION_LEASES 64 /**< at a time */

/** A reader's right to the bytes of one epoch. */
typedef struct lease {
    uint8_t token[16];
    publication *of; /**< NULL: this slot is free */
    uint64_t epoch;
    shard_catalog *catalog; /**< that it is for, with a reference */
    uint64_t begin;         /**< the request that it was granted to */
    uint32_t first_region;  /**< of the arena that it is for (messages.h, begin_ok) */
    deadline expires; /**< when begin_update stops waiting for it, at the latest */
    uint8_t drained;  /**< its place in the publication's drain, from 1; 0: in none */
    reader *holder;
    struct lease *older, *newer; /**< of the publication */
} lease;

/** A lease whose epoch has gone. */
typedef struct void_lease {
    uint8_t token[16];
    publication *of; /**< NULL: this slot was never used */
} void_lease;

/** What a control session and its data connections share. Guarded by the server's lock. */
struct reader {
    uint8_t id[16]; /**< session id */
    unsigned references, n_data;
    peer_share *from; /**< as long as it is not closed */
    bool closed;
    uint64_t active_ns; /**< when bytes last went to it over a data connection */
    reader *next;
    lease leases[SESSION_LEASES];
    unsigned n_void; /**< ever; the last ones are remembered */
    void_lease gone[SESSION_LEASES];
    /** the last one that was taken away as the memory could not be read */
    struct {
        uint8_t token[16];
        fanin_error why; /**< its status FANIN_OK: none was */
    } failed;
};

/* All with the lock held. */

reader *reader_make(fanin_server *s,
                    peer_share *from); /**< NULL: no memory or random bytes */
reader *reader_find(const fanin_server *s, const uint8_t id[16]);
void reader_close(fanin_server *s, reader *r);   /**< drops its leases */
void reader_release(fanin_server *s, reader *r); /**< frees with the last reference */
/** NULL: all slots are taken, or no random bytes. */
lease *lease_grant(fanin_server *s, reader *r, publication *p, uint64_t begin);
lease *lease_find(reader *r, const uint8_t token[16]);
/** One that was granted to this request; NULL: none. */
lease *lease_find_begun(reader *r, uint64_t begin);
/** The publication of a lease that was taken away, NULL: there was none (lately). */
publication *lease_find_void(reader *r, const uint8_t token[16]);
void lease_drop(fanin_server *s, lease *l);
/** Takes a lease away, if it is there, as what it is for cannot be read: its end will not be good.
    */
void lease_fail(fanin_server *s, reader *r, const uint8_t token[16],
                const fanin_error *why);
/** Why a lease was taken away by lease_fail() (lately), else NULL. */
const fanin_error *lease_failed(const reader *r, const uint8_t token[16]);
void lease_void_epoch(fanin_server *s, publication *p, uint64_t epoch);
/** Those whose epoch has gone. */
void lease_void_outdated(fanin_server *s, publication *p);

#endif
