/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file
 * How many bytes of tensors are streamed a second (max_bytes_per_second). Servers of one process
 * share a host's network, and a cache has a server for each step that it keeps: so all that have a
 * limit share one bucket, and a byte takes the time that its server's limit says. Any thread.
 */
#ifndef LIMIT_H
#define LIMIT_H

#include "core/server_state.h"

#define LIMIT_WINDOW_NS                                                                \
    UINT64_C(50000000)      /**< what was not sent for so long may be sent at once */
#define LIMIT_LEAST 1000000 /**< bytes a second: less would stall readers */

extern bucket limit_bucket;

/** Whether more has to wait. */
bool limit_is_reached(const fanin_server *s);
/** So much was sent, be the limit reached or not. */
void limit_charge(const fanin_server *s, uint64_t bytes);

#endif
