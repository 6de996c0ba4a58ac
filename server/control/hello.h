/* SPDX-License-Identifier: Apache-2.0 */
/** @file The first message of a connection. */
#ifndef HELLO_H
#define HELLO_H

#include "control/session.h"

/** Opens the session, hands the connection over to the data thread, or rejects it. */
void handle_hello(session *s, const frame *f, body *in);

#endif
