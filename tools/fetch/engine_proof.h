/* SPDX-License-Identifier: Apache-2.0 */
/** @file What an engine serves, compared with what the ranks train, by fanin's Python package. */
#ifndef ENGINE_PROOF_H
#define ENGINE_PROOF_H

#include "fetch/session.h"

/** Runs "python3 -m fanin.check" for the engine at @p url and the session's target and run, which
    is a whole model's, and prints what it says. Nothing is connected here. Returns the exit status.
    */
int engine_proof(session *s, const invocation *line, const char *url);

#endif
