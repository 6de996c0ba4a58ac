/* SPDX-License-Identifier: Apache-2.0 */
/** @file How a TCP connection begins: with TLS if the rank has a secret, else without. */
#ifndef SECURE_H
#define SECURE_H

#include "control/session.h"

/** Goes on with it. True: the session may receive. Else it waits, is being told why it is refused,
    or is closed. */
bool session_secure(session *s);

/** The hello_ok's proof of which rank this is, in @p out; empty without TLS, and with certificates.
    No memory: the output has failed, for whoever gets a hello_ok without it takes this rank for an
    impostor. */
void session_prove(session *s, uint8_t out[TLS_PROOF_SIZE], msg_hello_ok *m);

#endif
