/* SPDX-License-Identifier: Apache-2.0 */
/** @file What a relay is made of, and one attempt of it to get a step. */
#ifndef INSIDE_H
#define INSIDE_H

#include "list.h"
#include "net/client_state.h"
#include "parts.h"
#include "place.h"
#include "pull/pull_session.h"
#include "schedule.h"
#include "whole.h"
#include <fanin/relay.h>
#include <pthread.h>
#include <stdatomic.h>

#define MS UINT64_C(1000000)
#define LINGER_NS                                                                      \
    (50 * MS) /* a session at the trainer with nothing to read lasts so long */

/** A client of a holder that is not read from now: its connection, catalog, plans and mapped memory
    serve the next pull. */
typedef struct idle_client {
    member who;
    fanin_client *client;
} idle_client;

struct fanin_relay {
    pid_t pid;
    fanin_client_config client_config; /* its texts are in texts */
    fanin_server_config server_config;
    uint64_t unit_bytes;
    char place[PLACE_SIZE];
    char **addresses;
    size_t n_addresses;
    char *texts[16];
    size_t n_texts;
    logger log;
    int wake; /* eventfd of the thread that pulls: something has changed, or it is cancelled */
    atomic_bool cancelled, busy;
    fanin_client *origin;
    fanin_server *server; /* NULL: none yet */
    uint8_t world_id[16]; /* of the server */
    list_rank *ranks; /* the processes that are pulled from; others have other bytes */
    size_t n_ranks;
    member self;
    holders_list *list;
    msg_offer offered; /* to it; port 0: nothing */
    digest offered_whole;
    holder *last; /* that held the step before, without this reader */
    size_t n_last;
    bool last_whole; /* somebody held all tensors of it whole */
    member *
        blamed; /* they brought other bytes than the trainer holds, and are not asked again */
    size_t n_blamed, blamed_capacity;
    idle_client *idle; /* the oldest first */
    size_t n_idle, idle_capacity;
    parts parts; /* that are published, or pulled */
    fanin_destination *from_origin;
    unit_map alike; /* onto the parts of holders of the same */
    whole whole;    /* holders of all tensors whole */
    char publication[80];
    bool is_put;          /* they are put into the server */
    pthread_mutex_t lock; /* guards what follows */
    fanin_relay_stats stats;
    member *disbelieved; /* the log has told that they do not prove what they are */
    size_t n_disbelieved, disbelieved_capacity;
    uint64_t handed_on; /* by servers before this one */
};

#define RUNS 128  /**< that are read before a confirmation */
#define BATCHES 4 /**< that wait for one at a time */

/** What was read at a time, until its source has confirmed it. */
typedef struct batch {
    struct feed *of; /**< NULL: the place is free */
    unit_run runs[RUNS];
    size_t n;
    uint64_t began_ns, read_ns; /* when the read began, and ended */
} batch;

/** A thread that reads from one source. */
typedef struct feed {
    struct attempt *of;
    pthread_t thread;
    bool started, ended; /**< ended: what is left of it says who it was */
    atomic_bool stop, done;
    atomic_bool has_answered; /**< the holder has said once what it has */
    atomic_bool was_tried;    /**< it has, or the first try has failed */
    atomic_bool holds_units;  /**< of what it has the reader wants some */
    atomic_bool
        is_in_list; /**< the rank lists it for this step; else it held the last one */
    atomic_bool is_beginning; /**< there is no session yet: a stop cancels the call */
    fanin_client *client;
    size_t number; /**< of the schedule; SCHEDULE_ORIGIN: the trainer */
    holder who;    /**< of a holder */
    uint64_t began_ns;
    const unit_map *map; /**< units onto its parts */
    loop_source wake;
    fanin_session *session;
    fanin_result *result; /**< of the trainer's last session that has ended */
    uint64_t batch_bytes; /**< that it brings in some milliseconds */
    uint64_t offered_ns;  /**< since when it has some, but little; 0: it has not */
    batch batches[BATCHES];
    fanin_error refusal; /**< of a confirmation */
    uint64_t brought;    /**< bytes */
    /* of a holder: what it says that it has */
    bool asking, first, refused;
    uint64_t version;
    uint8_t *has;         /**< a byte a part of its */
    uint32_t *missing;    /**< of a unit, what it has not */
    landed_range *ranges; /**< of one reply */
} feed;

/** One try to get a step. */
typedef struct attempt {
    fanin_relay *relay;
    const fanin_pull_options *options;
    deadline at;
    uint64_t began_ns, step;
    bool passed;                /**< all ranks had a later step when it began */
    uint32_t before;            /**< attempts */
    pthread_mutex_t feeds_lock; /**< held while feeds come or end, and to wake them */
    feed origin, **holders;
    size_t n_holders, holder_capacity;
    size_t n_others;    /**< that are listed now */
    uint64_t seen;      /**< of the list */
    uint64_t listed_ns; /**< when it was looked at first */
    bool remembers;     /**< holders of the step before are taken for its own */
    bool whole_left;    /**< more hold all tensors whole than are read */
    /* with the relay's lock */
    schedule *schedule;
    feed **bringers;  /**< who has brought each unit */
    bool origin_gone; /**< it does not serve this step any more */
    uint64_t gone_ns; /**< since */
    uint64_t news_ns; /**< when a holder has told last of a unit that it has got */
    fanin_error why_gone;
    fanin_error failed; /**< nothing can go on */
    const feed *owing;  /**< who owed most of it when time ran out; NULL: nobody */
    size_t owed;        /**< units */
    uint64_t bytes_done;
} attempt;

/** The tensors of units, of which each unit has some. */
static inline group_run tensors_of_units(const uint32_t *unit_first, unit_run units)
{
    uint32_t first = unit_first[units.first];
    return (group_run){first, unit_first[units.first + units.count] - first};
}

/* state.c */
/** The ranks that are there are those that a pull begins with. *@p same_out: all of them were there
    the last time. FANIN_ERR_CLOSED: there are none; FANIN_ERR_MEMORY. */
fanin_status relay_take_ranks(fanin_relay *r, bool *same_out, fanin_error *error);
/** Whether no other process has taken the place of one of these, even with its world id. */
bool relay_has_same_ranks(const fanin_relay *r);
/** The client of a holder that was kept, NULL: there is none. */
fanin_client *relay_take_client(fanin_relay *r, const member *who);
void relay_keep_client(fanin_relay *r, const member *who, fanin_client *client);
/** Only those of @p all are kept. */
void relay_forget_clients(fanin_relay *r, const holder *all, size_t n);
/** Bytes that others have read of the server; NULL: none. */
uint64_t relay_handed_on(fanin_server *server);
/** The fields of an offer that tell how far it is. */
msg_offer relay_numbers(fanin_relay *r);
/** Tells the trainer these, for statistics. */
void relay_tell(fanin_relay *r);

/* feeds.c */
/** Starts reading from the trainer by the session, NULL: by one that it begins. The feed owns it,
    also where it does not start. */
fanin_status feed_start_origin(attempt *a, fanin_session *session, fanin_error *error);
/** Starts reading from a holder. */
fanin_status feed_start_holder(attempt *a, const holder *who, fanin_error *error);
/** Asks it to end; it does so on its own unless it is broken off. */
void feed_stop(feed *f);
void feed_break_off(feed *f);
/** Waits for it, and frees what it has but itself, and the trainer's client and result. */
void feed_end(feed *f);
/** Wakes all that wait for something to be asked of them. */
void feeds_wake(attempt *a);

/* attempt.c */
/** What is left of the attempt's time, at least 1. */
uint32_t attempt_left_ms(const attempt *a);
/** The caller's, for the time that is left, and without its callbacks. */
fanin_pull_options attempt_options(const attempt *a);
/** Finds out whether all ranks have committed a later step than @p step: a->passed. Steps only
    grow, so it does not matter that the trainer updates, is paused, or has taken the later step
    back; a plain pull waits for the end of that. Blocks at most lost_ms. FANIN_ERR_CANCELLED; what
    ranks do not say is left open. */
fanin_status attempt_look_passed(attempt *a, uint64_t step, fanin_error *error);
/** A session at the trainer for the attempt's step. FANIN_ERR_SUPERSEDED: the trainer has
    restarted, or passed it; others as fanin_client_begin_into(). */
fanin_status attempt_begin_at_origin(const attempt *a, fanin_session **out,
                                     fanin_error *error);
/** Whether no later attempt can have what this one cannot, after the trainer was lost for that
    reason: what others have of the step is waited for. */
bool attempt_is_last(const attempt *a, fanin_status why);
/** Gets the step of which @p session, which it ends, reads the trainer; the relay's parts are put
    and fill. FANIN_OK: all is proven, and verified if the options say so. */
fanin_status attempt_run(attempt *a, fanin_session *session, fanin_error *error);
/** Bytes that relays have brought, when all is there. */
uint64_t attempt_relayed(const attempt *a);
void attempt_free(attempt *a);

#endif
