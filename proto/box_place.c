/* SPDX-License-Identifier: Apache-2.0 */
#include "box_place.h"

#include "dtype.h"

uint64_t place_expected(const place_state *s, uint32_t region)
{
    uint64_t unit = UINT64_C(1) << s->shift;
    uint64_t end = region < PLACE_REGIONS ? s->ends[region] : 0;
    return (end + unit - 1) & ~(unit - 1);
}

void place_advance(place_state *s, uint32_t region, uint64_t end)
{
    s->region = region;
    if (region < PLACE_REGIONS)
        s->ends[region] = end;
}

uint32_t place_shift(uint64_t all_offsets)
{
    if (all_offsets == 0)
        return 0;
    uint32_t shift = (uint32_t)__builtin_ctzll(all_offsets);
    return shift < PLACE_SHIFT_MAX ? shift : PLACE_SHIFT_MAX;
}

static bool strided_end(dtype_unit unit, const block *in_units, const box_place *place,
                        uint64_t *end_out)
{
    int64_t low = (int64_t)place->offset, high = low, reach;
    for (uint32_t i = 0; i < in_units->n_dims; i++) {
        uint64_t steps = in_units->extent[i] - 1;
        if (steps > INT64_MAX ||
            __builtin_mul_overflow((int64_t)steps, place->stride[i], &reach) ||
            __builtin_add_overflow(reach < 0 ? low : high, reach,
                                   reach < 0 ? &low : &high))
            return false;
    }
    if (low < 0 || (uint64_t)high > PLACE_END_MAX - unit.bytes)
        return false;
    *end_out = (uint64_t)high + unit.bytes;
    return true;
}

bool place_end(const key_entry *key, const block *b, const box_place *place,
               uint64_t *end_out)
{
    dtype_unit unit = dtype_get_unit(key->dtype);
    block in_units;
    uint64_t bytes;
    if (place->offset > PLACE_END_MAX)
        return false;
    /* Of nearly all dtypes elements are units, and nothing of a packed box is to be asked in them.
       */
    bool as_it_is = unit.elements == 1 && place->packed;
    if (!as_it_is && !block_in_units(b, unit.elements, &in_units))
        return false;
    if (!place->packed)
        return strided_end(unit, &in_units, place, end_out);
    if (!dtype_bytes(key->dtype, b->n_dims, b->extent, &bytes) ||
        bytes > PLACE_END_MAX - place->offset)
        return false;
    *end_out = place->offset + bytes;
    return true;
}

bool place_strides_packed(const key_entry *key, const block *b, const int64_t *stride)
{
    dtype_unit unit = dtype_get_unit(key->dtype);
    int64_t packed[FANIN_MAX_DIMS];
    block in_units;
    if (!block_in_units(b, unit.elements, &in_units))
        return false;
    block_packed_strides(b->n_dims, in_units.extent, unit.bytes, packed);
    for (uint32_t i = 0; i < b->n_dims; i++)
        if (in_units.extent[i] > 1 && stride[i] != packed[i])
            return false;
    return true;
}
