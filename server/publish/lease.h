/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file
 * Readers (sessions as the publications see them), their leases, and who waits for these. A lease
 * exists exactly as long as its token is good: until end, session close, or the turn of its epoch.
 *
 * A peer's leases hold updates up only as long as it has something left of its share of a minute.
 * After that they are good for as long as their epoch stands, like any lease, but nobody waits for
 * them. A drain's leases are counted by peer when it begins, so that a lease that ends costs the
 * same however many there are.
 */
#ifndef LEASE_H
#define LEASE_H

#include "clock.h"
#include "core/bucket.h"
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

/* --------------------------------------------------------- waiting for them */

#define SHARE_WINDOW_MS 60000 /**< shares are of as long */
#define STRANGERS_HALVES 5    /**< half shares that all strangers together have */
#define DRAIN_PEERS 64 /**< that are told apart at a time, besides the own user */

/** The leases of one peer, or, in the last slot, of those that found no slot. */
typedef struct drain_peer {
    peer_share *from; /**< NULL: of several; good while there are leases */
    unsigned leases;  /**< that there still are */
    bool used, is_stranger;
    bool cut;       /**< its share ends before its leases */
    deadline until; /**< when it is waited for no longer */
} drain_peer;

#define DRAIN_BUCKET_NS UINT64_C(100000) /**< the first bound of drain_waits */
/** The bound behind one: 1, 3, 10, 30 and so on. */
static inline uint64_t drain_bound_after(uint64_t bound)
{
    bool is_power = bound == DRAIN_BUCKET_NS;
    for (uint64_t power = DRAIN_BUCKET_NS; !is_power && power < bound;)
        is_power = (power *= 10) == bound;
    return is_power ? 3 * bound : bound / 3 * 10;
}

typedef struct drain {
    uint64_t since;
    deadline limit;
    bool ignores_expiry;               /**< the limit alone ends it */
    unsigned seen;                     /**< leases that were added */
    bool cut;                          /**< a share ended before the leases did */
    uint64_t strangers_ns, longest_ns; /**< held up by strangers, and by one peer */
    char by[64];                       /**< who that was */
    drain_peer peers[DRAIN_PEERS + 2];
} drain;

/* All with the lock held. */

/** What is left of a share of @p share_ms a minute, in ns, that may be taken in one go: nothing,
    unless it is as long as a lease, or half of it. UINT64_MAX: it has no end. */
uint64_t share_left(const bucket *b, uint64_t now, uint32_t share_ms,
                    uint32_t lease_ms);
/** Takes @p used_ns out of it, be there as much or not. */
void share_take(bucket *b, uint64_t now, uint32_t share_ms, uint64_t used_ns);

/** The publication's from now to drain_end(); nothing else may drain it. @p limit: it waits no
    longer. */
void drain_begin(publication *p, drain *d, deadline limit);
/** Waits for its leases but those of the epoch @p spared (0: for all), until the publication's
    commit is not @p of any more (NULL: it may be any), and ends as drain_end(). */
bool drain_finish(fanin_server *s, publication *p, drain *d, uint64_t spared,
                  const commit *of);
/** Waits for the lease as well. */
void drain_add(fanin_server *s, drain *d, lease *l);
/** The lock is given up while it waits; false: there is nothing left to wait for. */
bool drain_wait(fanin_server *s, drain *d);
/** Charges the peers, and counts who held the update up. True: all leases had ended. */
bool drain_end(fanin_server *s, publication *p, drain *d);

/** Logs who held updates up, now and then. Takes the lock; none may be held. */
void drain_tell(fanin_server *s);

#endif
