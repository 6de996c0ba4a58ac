/* SPDX-License-Identifier: Apache-2.0 */
/** @file Sizes of element types in whole bytes. */
#ifndef DTYPE_H
#define DTYPE_H

#include <fanin/types.h>

#define DTYPE_LAST FANIN_DTYPE_U64 /**< the highest number */

/**
 * The smallest group of elements that fills whole bytes: 1 element of 1..8 bytes, 2 F4
 * elements in 1 byte, 4 F6 elements in 3. All false/0 for an unknown dtype.
 */
typedef struct dtype_unit {
    uint32_t elements, bytes;
} dtype_unit;
dtype_unit dtype_get_unit(fanin_dtype dtype);

/**
 * Bytes of @p n_dims extents of @p dtype. False: unknown dtype, overflow of uint64_t, or the
 * last extent is no multiple of the unit (a scalar of a packed dtype neither).
 */
bool dtype_bytes(fanin_dtype dtype, uint32_t n_dims, const uint64_t *extent,
                 uint64_t *bytes_out);

#endif
