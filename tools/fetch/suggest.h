/* SPDX-License-Identifier: Apache-2.0 */
/** @file What a name that the ranks do not know may have meant. */
#ifndef SUGGEST_H
#define SUGGEST_H

#include "fetch/session.h"

/**
 * Makes the remedy of a NOT_FOUND error one that names the nearest key (@p name, NULL: no key was
 * asked for) or the nearest run, or the runs that there are. Asks the ranks, briefly; leaves
 * the error as it is if they do not answer.
 */
void suggest(const session *s, const char *name, fanin_error *error);

#endif
