/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file
 * Readers that hand on to each other what they read of a local world: in the test's process, in a
 * process of its own, and false ones.
 */
#ifndef RELAY_READERS_H
#define RELAY_READERS_H

#include "call.h"
#include "list.h"
#include "local_world.h"
#include "parts.h"

/** How readers are opened. */
typedef struct reader_ways {
    world *world;
    fanin_path path;
    uint32_t lost_ms;
    bool no_unix;
    const char *place;
    fanin_log_fn log;
    size_t
        slices; /**< 0: they want all; else each tensor is cut by so many workers, ... */
    fanin_dtype floats; /**< as which F32 is wanted; 0: as F32 */
} reader_ways;

extern reader_ways ways;
/** By stream, lost after 2 s, whole, as published. */
void ways_reset(world *of);

#define UNIT 128 /**< so that there are many, and a pull takes its time */

typedef struct reader {
    fanin_relay *relay;
    fanin_tensor *tensors;
    fanin_box *boxes;
    fanin_pull_options options;
    fanin_error error;
    fanin_result_info info;
    char how[160];
    call call;
} reader;

/** @p slice: which of the workers it is. */
void relay_reader_open(reader *r, size_t slice);
void relay_reader_close(reader *r);
uint64_t reader_bytes(const reader *r); /**< that it wants */

/** Of a reader: releases what it holds, and pulls. */
fanin_status relay_pull(void *cookie);
/** All is of the step, and nothing else was written. */
void check_bytes(const reader *r, uint64_t step);
void expect_pull(reader *r, uint64_t step);
/** Of who is slow to be reached a reader takes nothing: again, until some of it came from others.
    */
fanin_status pull_of_others(reader *r);
void expect_pull_of_others(reader *r, uint64_t step);
fanin_relay_stats stats_of(const reader *r);

/** A reader in a process of its own, which has the step and hands it on. */
pid_t fork_holder(void);

/** A list's entry, also of whom it is not: a port where nobody listens, a rank, the reader itself.
    */
void offer_falsely(holders_list **list, const fanin_client_config *config,
                   const digest *holding, uint16_t port, member self);
/** The next step of the same list. */
void offer_step_falsely(holders_list *list, uint64_t step, const digest *holding,
                        uint16_t port, member self);

/** A relay that offers all that a reader wants, and publishes what a test makes of its parts. */
typedef struct false_relay {
    fanin_server *server;
    holders_list *list;
    fanin_client_config config;
    parts parts;
} false_relay;

void false_relay_cut(false_relay *x, const reader *like);
/** It publishes the first @p n parts, and has @p proven of them; offered by false_relay_offer(). */
void false_relay_serve(false_relay *x, size_t n, size_t proven);
void false_relay_offer(false_relay *x, uint16_t port);
void false_relay_open(false_relay *x, size_t n, size_t proven);
void false_relay_close(false_relay *x);

#endif
