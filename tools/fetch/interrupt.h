/* SPDX-License-Identifier: Apache-2.0 */
/** @file Ctrl-C (and SIGTERM, SIGHUP) of the commands that use a client: cancels its running call. */
#ifndef INTERRUPT_H
#define INTERRUPT_H

#include <fanin/client.h>
#include <stdbool.h>

/** Installs the handlers; @p client is cancelled by them. Called again: another client. */
void interrupt_install(fanin_client *client);

/** The client is about to be destroyed; signals are still noted. */
void interrupt_detach(void);

/** Whether SIGINT, SIGTERM or SIGHUP came. */
bool interrupt_requested(void);

/** The exit status after that: 130, 143 or 129. */
int interrupt_exit_code(void);

#endif
