/* SPDX-License-Identifier: Apache-2.0 */
/** @file A process with a ucx_server, driven by a test over a socket pair. */
#ifndef UCX_CHILD_H
#define UCX_CHILD_H

#include "ucx.h"
#include <sys/types.h>

/** Words that the process shares: word i is ucx_child_word(i). */
#define UCX_CHILD_WORDS ((size_t)1 << 20)
#define UCX_CHILD_BYTES (UCX_CHILD_WORDS * 8)
uint64_t ucx_child_word(uint64_t i);

/** What the process shares memory with. */
typedef enum ucx_child_kind {
    UCX_CHILD_SAFE, /**< ucx_server_create(): what the product does */
    UCX_CHILD_RMA,  /**< the same with UCP_FEATURE_RMA, as a control */
} ucx_child_kind;

typedef enum ucx_child_order {
    UCX_CHILD_COUNT_CHANGED = 1, /**< progresses, then counts words that differ */
    UCX_CHILD_UNMAP,             /**< unmaps the second half of the words */
    UCX_CHILD_COUNT_OUTPUT,      /**< bytes that were written to stdout and stderr */
} ucx_child_order;

typedef struct ucx_child {
    pid_t pid;
    int fd;
    uint8_t address[4096], rkey[4096];
    size_t address_size, rkey_size;
    uint64_t base;
} ucx_child;

/** First thing in main(): runs the process if this is one. -1: it is not. */
int ucx_child_main(int argc, char **argv);
/** fork and exec of this very program. False: it could not start. */
bool ucx_child_start(ucx_child *c, ucx_child_kind kind);
/** Sends an order, returns the answer. UINT64_MAX: the process is gone or took more than
    10 s. */
uint64_t ucx_child_ask(ucx_child *c, ucx_child_order order);
/** Ends it and waits. True: it had not crashed. */
bool ucx_child_stop(ucx_child *c);

#endif
