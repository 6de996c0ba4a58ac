/* SPDX-License-Identifier: Apache-2.0 */
/** @file How much the server's threads let others of the process, and of the host, go first. */
#ifndef YIELDING_H
#define YIELDING_H

#include "core/server_state.h"

/** The nice value of threads that have @p more than the calling one. */
int yielding_value(int32_t more);
/** For a thread of the server at its beginning: takes the server's nice value, if it has one. */
void yielding_begin(const fanin_server *s);

#endif
