/* SPDX-License-Identifier: Apache-2.0 */
/** @file The proof for clients of cma that the process which they read is this server's. */
#ifndef WITNESS_H
#define WITNESS_H

#include <stdint.h>

/** A copy of @p incarnation in a page of its own. A forked child, which may get the rank's number
    when the rank has died, lacks this page. NULL: there is none to be had. */
uint8_t *witness_make(const uint8_t incarnation[16]);
/** Also of a child, which does not have it. */
void witness_free(uint8_t **witness);

#endif
