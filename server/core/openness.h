/* SPDX-License-Identifier: Apache-2.0 */
/** @file What a server that listens on a network must be told in so many words. */
#ifndef OPENNESS_H
#define OPENNESS_H

#include "core/server_state.h"

/** Whether the server, whose secret is known, may listen where it is to, for the networks that it
    allows. FANIN_ERR_ARGUMENT says why not, and what to give: without FANIN_SERVER_INSECURE no
    network is served by a rank without the launch's secret, and none that is wider than a private
    one. */
fanin_status openness_check(const fanin_server *s, fanin_error *error);
/** Tells the log what openness_check() would not have let pass without FANIN_SERVER_INSECURE. */
void openness_tell(const fanin_server *s);

#endif
