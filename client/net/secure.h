/* SPDX-License-Identifier: Apache-2.0 */
/** @file What is said of a rank with which no secured connection can be made, and who it proves to
    be. */
#ifndef SECURE_H
#define SECURE_H

#include "messages.h"
#include "tls.h"

typedef struct secure_fault {
    fanin_status status;
    char what[400]; /**< what the rank does, or is not: "has another secret ..." */
    char remedy[256];
} secure_fault;

/** Why a handshake has failed. */
void secure_explain(const tls *t, secure_fault *out);
/** Whether receiving has failed because the rank refused this end's certificate, and what of that
    is said. Of NULL: no. */
bool secure_refused(const tls *t, secure_fault *out);
/** Whether receiving has failed because of what came, or of what the rank says that came to it, and
    what of that is said; FANIN_ERR_TRANSPORT. So it is if either end lacked memory:
    FANIN_ERR_MEMORY, FANIN_ERR_CLOSED. Of NULL: no. */
bool secure_broken(const tls *t, secure_fault *out);
/** Whether the rank that answers is who it says, as far as there is TLS (NULL: it need not prove
    it). */
bool secure_proven(tls *t, const msg_hello_ok *peer);
/** Why it is not, or is not known. */
void secure_explain_unproven(const tls *t, const msg_hello_ok *peer, secure_fault *out);

#endif
