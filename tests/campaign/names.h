/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file
 * A name server that can be silent: the process's getaddrinfo() answers names that end in
 * ".campaign" with 127.0.0.1, and not before the board says that the name server speaks.
 */
#ifndef CAMPAIGN_NAMES_H
#define CAMPAIGN_NAMES_H

#include "board.h"

/** Before the first lookup. */
void names_by(const board *board);

#endif
