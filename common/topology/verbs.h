/* SPDX-License-Identifier: Apache-2.0 */
/** @file What libibverbs, loaded at run time, can do with a device: may it be opened, does it
    take GPU memory as dma-buf. */
#ifndef VERBS_H
#define VERBS_H

#include <stdbool.h>

typedef enum verbs_answer { VERBS_UNKNOWN, VERBS_NO, VERBS_YES } verbs_answer;

typedef struct verbs_facts {
    bool built_in;         /**< built with libibverbs' headers */
    bool loaded;           /**< libibverbs.so.1 is there */
    verbs_answer can_open; /**< NO: no device file, or no permission */
    verbs_answer dma_buf;  /**< the driver registers dma-bufs */
    int open_errno;
} verbs_facts;

/** Opens the device of that name for a moment. Thread: any. */
verbs_facts verbs_probe(const char *nic);

#endif
