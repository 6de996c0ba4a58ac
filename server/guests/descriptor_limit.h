/* SPDX-License-Identifier: Apache-2.0 */
/** @file How many connections the process's limit of open files allows. */
#ifndef DESCRIPTOR_LIMIT_H
#define DESCRIPTOR_LIMIT_H

#include "log.h"
#include <fanin/server.h>

/** Connections unless the configuration says how many: 512 workers have 5 each, also where all of
    them come from one address, which gets half. */
#define SESSIONS_DEFAULT 5120

/**
 * Sets c->max_sessions, if it is 0, to as many as the hard limit of open files has room for, at
 * most SESSIONS_DEFAULT; then raises the soft limit, if need be, to what that takes. *limited_out:
 * there
 * was less room than that. FANIN_ERR_LIMIT: there is not room for c->max_sessions, or for 2.
 */
fanin_status descriptors_allow(fanin_server_config *c, const logger *log,
                               bool *limited_out, fanin_error *error);

#endif
