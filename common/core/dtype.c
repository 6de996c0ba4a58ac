/* SPDX-License-Identifier: Apache-2.0 */
#include "dtype.h"

#include <string.h>

#define TEXT_OF(x) #x
#define TEXT(x) TEXT_OF(x)
#define VERSION_TEXT                                                                   \
    TEXT(FANIN_VERSION_MAJOR)                                                          \
    "." TEXT(FANIN_VERSION_MINOR) "." TEXT(FANIN_VERSION_PATCH)

const char *fanin_version(void)
{
    return VERSION_TEXT;
}

typedef struct dtype_row {
    const char *name;
    uint32_t bits;
} dtype_row;

static const dtype_row dtype_rows[] = {
    [FANIN_DTYPE_BOOL] = {"BOOL", 8},
    [FANIN_DTYPE_F4] = {"F4", 4},
    [FANIN_DTYPE_F6_E2M3] = {"F6_E2M3", 6},
    [FANIN_DTYPE_F6_E3M2] = {"F6_E3M2", 6},
    [FANIN_DTYPE_U8] = {"U8", 8},
    [FANIN_DTYPE_I8] = {"I8", 8},
    [FANIN_DTYPE_F8_E5M2] = {"F8_E5M2", 8},
    [FANIN_DTYPE_F8_E4M3] = {"F8_E4M3", 8},
    [FANIN_DTYPE_F8_E8M0] = {"F8_E8M0", 8},
    [FANIN_DTYPE_F8_E4M3FNUZ] = {"F8_E4M3FNUZ", 8},
    [FANIN_DTYPE_F8_E5M2FNUZ] = {"F8_E5M2FNUZ", 8},
    [FANIN_DTYPE_I16] = {"I16", 16},
    [FANIN_DTYPE_U16] = {"U16", 16},
    [FANIN_DTYPE_F16] = {"F16", 16},
    [FANIN_DTYPE_BF16] = {"BF16", 16},
    [FANIN_DTYPE_I32] = {"I32", 32},
    [FANIN_DTYPE_U32] = {"U32", 32},
    [FANIN_DTYPE_F32] = {"F32", 32},
    [FANIN_DTYPE_C64] = {"C64", 64},
    [FANIN_DTYPE_F64] = {"F64", 64},
    [FANIN_DTYPE_I64] = {"I64", 64},
    [FANIN_DTYPE_U64] = {"U64", 64},
};
#define DTYPE_ROWS ((int32_t)(sizeof dtype_rows / sizeof *dtype_rows))

const char *fanin_dtype_name(fanin_dtype dtype)
{
    return dtype > 0 && dtype < DTYPE_ROWS ? dtype_rows[dtype].name : NULL;
}

fanin_dtype fanin_dtype_from_name(const char *name)
{
    for (fanin_dtype dtype = 1; name && dtype < DTYPE_ROWS; dtype++)
        if (strcmp(dtype_rows[dtype].name, name) == 0)
            return dtype;
    return 0;
}

uint32_t fanin_dtype_bits(fanin_dtype dtype)
{
    return dtype > 0 && dtype < DTYPE_ROWS ? dtype_rows[dtype].bits : 0;
}

dtype_unit dtype_get_unit(fanin_dtype dtype)
{
    uint32_t bits = fanin_dtype_bits(dtype);
    switch (bits) {
    case 4:
        return (dtype_unit){2, 1};
    case 6:
        return (dtype_unit){4, 3};
    default:
        return (dtype_unit){bits ? 1 : 0, bits / 8};
    }
}

bool dtype_bytes(fanin_dtype dtype, uint32_t n_dims, const uint64_t *extent,
                 uint64_t *bytes_out)
{
    dtype_unit unit = dtype_get_unit(dtype);
    if (!unit.elements || n_dims > FANIN_MAX_DIMS)
        return false;
    if (unit.elements > 1 && (n_dims == 0 || extent[n_dims - 1] % unit.elements))
        return false;
    uint64_t bytes = unit.bytes;
    bool empty = false;
    for (uint32_t i = 0; i < n_dims; i++)
        empty |= extent[i] == 0;
    for (uint32_t i = 0; i < n_dims && !empty; i++) {
        uint64_t extent_units = i + 1 == n_dims ? extent[i] / unit.elements : extent[i];
        if (__builtin_mul_overflow(bytes, extent_units, &bytes))
            return false;
    }
    *bytes_out = empty ? 0 : bytes;
    return true;
}
