/* SPDX-License-Identifier: Apache-2.0 */
/** @file Which path each rank's bytes take: by what both ends can do, proven by a probe read. */
#ifndef PATH_H
#define PATH_H

#include "tables.h"

/**
 * Decides the path of every peer with want[i] that has none yet and sets it up (endpoint,
 * regions, remote keys); for those that have one, brings the remote keys to the current
 * tables. FANIN_ERR_UNSUPPORTED: the path that the configuration forces does not work (says
 * why). With FANIN_PATH_AUTO what fails falls back to stream and peer.reason says why.
 */
fanin_status path_prepare(fanin_client *client, publication *p, const bool *want,
                          deadline at, fanin_error *error);

#endif
