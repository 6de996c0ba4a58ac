/* SPDX-License-Identifier: Apache-2.0 */
/** @file How a publication is dealt to its ranks. */
#ifndef LIST_MAP_H
#define LIST_MAP_H

#include "fetch/session.h"

/** Tells of each rank what it holds, and what nobody does. The exit status. */
int list_map(session *s, const common_options *common);

#endif
