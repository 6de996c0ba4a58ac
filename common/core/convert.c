/* SPDX-License-Identifier: Apache-2.0 */
#include "convert.h"

#include <fanin/types.h>
#include <string.h>

int convert_between(int32_t from, int32_t to)
{
    if (from == to)
        return CONVERT_NONE;
    if (from == FANIN_DTYPE_F32 && to == FANIN_DTYPE_BF16)
        return CONVERT_F32_BF16;
    if (from == FANIN_DTYPE_F32 && to == FANIN_DTYPE_F16)
        return CONVERT_F32_F16;
    return -1;
}

void convert_run(uint32_t convert, void *to, const void *from, size_t bytes)
{
    if (convert == CONVERT_NONE) {
        memcpy(to, from, bytes);
        return;
    }
    const uint8_t *in = from;
    uint8_t *out = to;
    for (size_t i = 0; i < bytes / 4; i++) {
        uint32_t bits;
        memcpy(&bits, in + 4 * i, sizeof bits);
        uint16_t half =
            convert == CONVERT_F32_BF16 ? convert_to_bf16(bits) : convert_to_f16(bits);
        memcpy(out + 2 * i, &half, sizeof half);
    }
}
