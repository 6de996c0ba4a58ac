/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file
 * How the program ends: its exit statuses; Ctrl-C (and SIGTERM, SIGHUP) of the commands that use
 * a client, which cancels its running call.
 */
#ifndef INTERRUPT_H
#define INTERRUPT_H

#include <fanin/client.h>
#include <fanin/relay.h>
#include <stdbool.h>

enum {
    EXIT_USAGE = 2,
    EXIT_GROUP = 10,   /**< plus the hundreds of the status: 11 .. 16 */
    EXIT_SIGNAL = 128, /**< plus the signal's number: 130, 143 */
};

/** 0 for FANIN_OK, else EXIT_GROUP + 1..6. */
int exit_code_of(fanin_status status);

/** Installs the handlers; @p client is cancelled by them. Called again: another client. */
void interrupt_install(fanin_client *client);

/** Its pull is under way, and is cancelled too; NULL: it has ended. */
void interrupt_relay(fanin_relay *relay);

/** From now on a reader of standard output that goes away ends the call as Ctrl-C does, instead of
    the process: what the call has half made goes with it. */
void interrupt_with_output(void);

/** The client is about to be destroyed; signals are still noted. */
void interrupt_detach(void);

/** Whether SIGINT, SIGTERM or SIGHUP came. */
bool interrupt_requested(void);

/** The exit status after that: 130, 143 or 129. */
int interrupt_exit_code(void);

#endif
