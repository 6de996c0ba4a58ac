/* SPDX-License-Identifier: Apache-2.0 */
/** @file What a relay knows of the inside of its server: the two halves' insides do not mix. */
#ifndef HANDING_H
#define HANDING_H

#include "duty.h"
#include "messages.h"
#include <fanin/server.h>

/** server_fill() and server_prove() of server/publish/filling.h. */
fanin_status handing_fill(fanin_server *s, const char *publication, uint64_t step,
                          fanin_error *error);
fanin_status handing_prove(fanin_server *s, const char *publication, uint64_t step,
                           const landed_range *ranges, size_t n, fanin_error *error);
/** As its hello_ok tells them: who it is, and on which host. Static until it is destroyed. */
member handing_member(const fanin_server *s);
const char *handing_host(const fanin_server *s);

#endif
