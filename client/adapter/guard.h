/* SPDX-License-Identifier: Apache-2.0 */
/** @file How it is said in JSON what guarded a pull's bytes on their way. */
#ifndef GUARD_H
#define GUARD_H

#include <fanin/client.h>
#include <jansson.h>

/** true, false or "local"; NULL: out of memory. */
json_t *guard_json(fanin_checksums guard);

#endif
