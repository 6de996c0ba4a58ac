/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file
 * A process that starts worlds of rank processes, one after the other, and does bad things
 * to them. Forked before this process uses the library, so that a test can have new ranks
 * after it has used a client.
 */
#ifndef LAB_H
#define LAB_H

#include "rank_world.h"

#define LAB_RANKS 8

/** What a world is to be like. */
typedef struct lab_order {
    char shape[16];
    uint32_t world_size, replicate;
    uint16_t base_port; /**< see lab_free_ports() */
    uint8_t world;      /**< the world id's bytes */
    uint64_t step;      /**< that is committed; 0: step 1 */
    uint32_t life; /**< 0: the bytes are the step's; else those of lab_step(life) */
    uint32_t flags;
    char bind[32], allow[32]; /**< "": loopback */
    int devices[4];           /**< whose memory ranks have, see rank_publishing */
    size_t n_devices;
    bool snapshot;
    fanin_dtype dtype;       /**< of the tensors; 0: BF16 */
    fanin_dtype cast;        /**< of the snapshots; 0: none */
    char environment[2][48]; /**< of the ranks: "NAME=VALUE" */
} lab_order;

/** A small world, its defaults, at free ports. */
lab_order lab_order_of(uint32_t world_size);

typedef struct lab {
    pid_t pid;
    int channel;
} lab;

/** Forks the process; @p own_network: into a network namespace of its own (root). */
void lab_open(lab *l, bool own_network);
/** Ends its ranks and itself. */
void lab_close(lab *l);

/** Starts the ordered ranks, which commit one step, and describes them in @p w (to be freed with
    rank_world_free()). */
void lab_start(lab *l, const lab_order *order, rank_world *w);
/** Starts them without a new description: another life at the addresses of the one before. */
void lab_restart(lab *l, const lab_order *order);
/** SIGKILL, SIGSTOP or SIGCONT to one rank; returns when it has taken effect. */
void lab_signal(lab *l, uint32_t rank, int number);
/** Kills all ranks of the world; returns when they are gone. */
void lab_stop(lab *l);

/** Whose pattern a life's bytes at step 1 follow. */
uint64_t lab_step(uint32_t life);

/** The first of @p n neighbouring ports of 127.0.0.1 that are free now. */
uint16_t lab_free_ports(uint32_t n);

#endif
