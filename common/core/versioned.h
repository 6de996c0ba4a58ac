/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file
 * Structs of the public interface whose first member, size_t struct_size, says how large the
 * caller's are: programs that were built with older or newer headers than this library can call it.
 * Members are only ever added at the end, and 0 or the default of a member means what was before
 * it.
 */
#ifndef VERSIONED_H
#define VERSIONED_H

#include <fanin/types.h>
#include <stdbool.h>
#include <stddef.h>

/** What fanin_tensor was in the first release: all of it must be given. */
#define TENSOR_LEAST (offsetof(fanin_tensor, memory) + sizeof(fanin_memory))

/** Makes a caller's struct of @p size bytes from @p defaults, of which this library knows @p known;
    struct_size is @p size then. Does nothing if there is no room for struct_size. */
void versioned_init(void *to, size_t size, const void *defaults, size_t known);

/** Reads a caller's struct over the defaults in @p to, which has @p known bytes and that
    struct_size then. False: @p from is NULL or has less than @p least bytes. */
bool versioned_read(void *to, size_t known, const void *from, size_t least);

/** Fills in a caller's struct, but for struct_size, with what of @p from, which has @p known bytes,
    it has room for. What is beyond stays as it is: nothing is written to what nobody knows. */
void versioned_write(void *to, const void *from, size_t known);

/** Element @p index of a caller's array as versioned_read() over zeros. */
void versioned_element(void *to, size_t known, const void *array, size_t index);

#endif
