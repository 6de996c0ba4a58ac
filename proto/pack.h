/* SPDX-License-Identifier: Apache-2.0 */
/** @file Writing msgpack objects, always in their shortest form. */
#ifndef PACK_H
#define PACK_H

#include "array.h"

/* A failed allocation shows in b->failed. */
void pack_uint(buffer *b, uint64_t value);
void pack_int(buffer *b, int64_t value);
void pack_bool(buffer *b, bool value);
void pack_text(buffer *b, const void *data, size_t size);
void pack_bin(buffer *b, const void *data, size_t size);
void pack_array(buffer *b, size_t count);
void pack_map(buffer *b, size_t count);

#endif
