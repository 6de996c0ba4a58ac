/* SPDX-License-Identifier: Apache-2.0 */
/** @file XXH3-64 (seed 0), by the widest instructions that the CPU has. */
#ifndef CHECKSUM_H
#define CHECKSUM_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

uint64_t checksum_of(const void *data, size_t size);

/** The same of bytes that come piece by piece. */
typedef struct checksum checksum;

checksum *checksum_create(void); /**< of nothing yet; NULL: no memory */
void checksum_free(checksum *c); /**< NULL is fine */
void checksum_reset(checksum *c);
void checksum_copy(checksum *to, const checksum *from);
void checksum_add(checksum *c, const void *data, size_t size);
uint64_t checksum_get(const checksum *c); /**< of what was added; more may be */

#endif
