/* SPDX-License-Identifier: Apache-2.0 */
/** @file Everything public: for trainers <fanin/server.h>, for workers <fanin/client.h>. */
#ifndef FANIN_FANIN_H
#define FANIN_FANIN_H

#include <fanin/client.h>
#include <fanin/error.h>
#include <fanin/log.h>
#include <fanin/objects.h>
#include <fanin/relay.h>
#include <fanin/server.h>
#include <fanin/trace.h>
#include <fanin/types.h>

#endif
