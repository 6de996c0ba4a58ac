/* SPDX-License-Identifier: Apache-2.0 */
/** @file Keys of a catalog as people and scripts read them. */
#ifndef KEYS_H
#define KEYS_H

#include <fanin/client.h>
#include <jansson.h>

/** "0-3,6": who holds boxes of the entry; malloc'ed, NULL without memory. */
char *keys_ranks(const fanin_entry *entry);

/** The same as an array of numbers. */
json_t *keys_rank_list(const fanin_entry *entry);

json_t *keys_dims(const uint64_t *values, uint32_t count);

#endif
