/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file
 * A rank in a process of its own that does what it is told by letters, each of which it says again
 * when it has done so:
 *
 *   u  an update begins, and its memory is overwritten
 *   e  that ends: the next step is published
 *   c  an update goes by
 *   r  the publication is removed
 *   a  it is there again, and the next step published
 *
 * Other letters are the test's own, or end it, as does whatever goes wrong there. It holds a part
 * of the tensor "a" of lora:0, each byte of which is the step's number. On the test's side what
 * fails fails the test. Thread: one at a time.
 */
#ifndef OBEDIENT_RANK_H
#define OBEDIENT_RANK_H

#include <fanin/server.h>
#include <sys/types.h>

#define OVERWRITTEN 0xee

/** The test's side. */
typedef struct obedient_rank {
    pid_t pid; /**< 0: it has ended */
    int to, from;
} obedient_rank;

/** What it is, in its own process. */
typedef struct obedience {
    unsigned number, ranks;
    uint8_t *memory, *bytes; /**< its part, as the library and as the CPU sees it */
    size_t size;
    uint32_t lease_ms;
    bool (*more)(struct obedience *o, char word); /**< the test's letters; NULL: none */
    fanin_server *server;
    uint64_t step;
    int answers; /**< where it says them */
} obedience;

/** Forks a rank that calls @p live, which fills in the rest and calls obedient_serve(). */
void obedient_fork(obedient_rank *r, unsigned number, void (*live)(obedience *));
/** Publishes the first step, says its address and obeys, until it ends. */
_Noreturn void obedient_serve(obedience *o);
void obedient_obey(obedience *o, char word);
void obedient_need(bool good); /**< ends the rank's process otherwise */

#define OBEDIENT_ADDRESS 64
void obedient_address(const obedient_rank *r, char out[OBEDIENT_ADDRESS]);
/** Returns when it has done each. */
void obedient_tell(const obedient_rank *r, const char *words);
void obedient_kill(obedient_rank *r);
/** Kills it if it lives, and forgets it. */
void obedient_end(obedient_rank *r);

#endif
