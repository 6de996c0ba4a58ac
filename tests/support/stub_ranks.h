/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file
 * Ranks without threads: they live in the client's own loop, so that a test of one of the client's
 * rooms has all of them, and the time, in its hand. What they are asked they answer as a server
 * would, but for what the test takes over (stub_rank.answer). They publish one tensor of bytes,
 * "t" of "lora:0", one part a rank.
 *
 * The time is the test's (stub_ranks of tests/support/meson.build): it stands still while anything
 * can be done, jumps to the next deadline when nothing can, and a wait that nothing would end fails
 * the test.
 */
#ifndef STUB_RANKS_H
#define STUB_RANKS_H

#include "catalog.h"
#include "framing.h"
#include "messages.h"
#include "net/client_state.h"
#include "patch.h"

#define STUB_RANKS 4
#define STUB_TALKS 8
#define STUB_TYPES 32
#define STUB_RUN "lora:0"

typedef struct stub_rank stub_rank;

/** One connection to a rank. */
typedef struct stub_talk {
    loop_source source; /**< first: the loop hands it back */
    stub_rank *rank;
    role role;
    bool is_unix;
    framing in;
    buffer out;
    size_t sent;
    uint64_t waits; /**< the request of a wait without an answer yet; 0: none */
    msg_wait wait;
} stub_talk;

/** Takes one frame; replies are encoded into t->out. False: the connection is closed. */
typedef bool (*stub_answer_fn)(stub_talk *t, const frame *f, body *in);

typedef struct stub_listener {
    loop_source source; /**< first: the loop hands it back */
    stub_rank *rank;
} stub_listener;

struct stub_rank {
    char address[32];
    loop *loop;
    stub_listener listeners[2]; /**< TCP, the Unix name beside it */
    stub_talk talks[STUB_TALKS];
    msg_hello_ok hello;    /**< what it says of itself */
    stub_answer_fn answer; /**< of any frame, hellos too; stub_answer() as it starts */
    unsigned asked[STUB_TYPES]; /**< frames that came, by type */
    uint64_t last_request;      /**< of these */
    bool old;                   /**< knows no leases that come with announcements */
    bool drips;                 /**< what it sends goes out byte by byte */
    bool impatient; /**< a wait times out when the time that it was given is up */

    /* What it publishes; nothing while state is WIRE_STATE_UNPUBLISHED. */
    int32_t state;
    uint64_t state_age_ms, step, version;
    buffer keys, boxes, regions;
    uint8_t *bytes;
    uint64_t size;
    /* The patches that it tells of, if it is asked, and serves; of generation 0: none. */
    patch_offers patches;
    buffer patch_boxes[PATCH_BOXES * PATCHES_MOST];
};

/** Listens on a free port of 127.0.0.1 and on the Unix name beside it, alone in its world, and
    publishes nothing. Fails the test. */
void stub_rank_start(stub_rank *r, loop *l);
void stub_rank_stop(stub_rank *r);
/** Closes its connections; it goes on listening. */
void stub_rank_hang_up(stub_rank *r);
/** The connection of this role, NULL: none. */
stub_talk *stub_rank_talk(stub_rank *r, role of);
/** Sends what was encoded into t->out. */
void stub_talk_flush(stub_talk *t);

/** As a server answers. */
bool stub_answer(stub_talk *t, const frame *f, body *in);
bool stub_answer_error(stub_talk *t, uint64_t request, fanin_status code,
                       const char *message);

/** The checksum of a hello and of its answer, which begins at @p reply of t->out. */
void stub_seal_hello(stub_talk *t, const body *hello, size_t reply);

/** Tables of part @p part of @p parts, @p size bytes each; a rank that has them publishes them. */
void stub_rank_put(stub_rank *r, uint32_t part, uint32_t parts, uint64_t size);
/** Its step from now on; waits that this fulfils are answered. */
void stub_rank_commit(stub_rank *r, uint64_t step);
/** The same with other bytes, which are taken, and the patch that leads there; @p most: that are
    kept, at most PATCHES_MOST. The copy's generation is the step. */
void stub_rank_patch(stub_rank *r, uint64_t step, uint8_t *bytes, uint32_t most);
/** The byte of the tensor at @p offset, at any step. */
uint8_t stub_byte(uint64_t offset);

/** A client and its ranks, connected over Unix names. */
typedef struct stub_world {
    fanin_client *client;
    stub_rank ranks[STUB_RANKS];
    size_t size;
} stub_world;

/** @p parts of the tensor, @p size bytes each, over @p ranks: rank r has part r mod parts. All are
    at step 1, at version 1 of their catalogs. */
void stub_world_start(stub_world *w, size_t ranks, uint32_t parts, uint64_t size);
/** The same by a configuration of the test's. */
void stub_world_start_with(stub_world *w, size_t ranks, uint32_t parts, uint64_t size,
                           const fanin_client_config *config);
void stub_world_stop(stub_world *w);
/** All ranks, and who hung up, ready again. */
void stub_world_reconnect(stub_world *w);
/** Steps the client's loop until nothing is under way. */
void stub_world_settle(stub_world *w);
/** What was asked of all ranks. */
unsigned stub_world_asked(const stub_world *w, message_type type);

/** Adds to the test's time. */
void stub_time_pass_ms(uint64_t ms);
/** Runs @p fn when so much time has passed. */
void stub_time_at_ms(uint64_t ms, void (*fn)(void *cookie), void *cookie);
/** For TCP, which may take its time: the test's time stands still, and waits are real ones of 20 s
    at most; or as before. */
void stub_time_hold(bool hold);

#endif
