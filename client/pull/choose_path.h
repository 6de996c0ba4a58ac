/* SPDX-License-Identifier: Apache-2.0 */
/** @file Which path each rank's bytes take: by what both ends can do, proven by a probe read. */
#ifndef CHOOSE_PATH_H
#define CHOOSE_PATH_H

#include "path/path_round.h"

/**
 * Decides the path of every peer with want[i] that has none yet for this publication and sets it
 * up (endpoint, regions, remote keys, mappings); for those that have one, brings keys and
 * mappings to the current tables and the goal's devices. Sets peer.path and peer.reason.
 * FANIN_ERR_UNSUPPORTED: the path that the configuration forces does not work (says why). With
 * FANIN_PATH_AUTO what fails falls back to stream and peer.reason says why.
 */
fanin_status path_prepare(fanin_client *client, publication *p, const bool *want,
                          path_goal *goal, deadline at, fanin_error *error);

#endif
