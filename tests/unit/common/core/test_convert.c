/* SPDX-License-Identifier: Apache-2.0 */
/* Conversions against what rounding to the nearest means, at all values of the narrow types: each
   of them, the middle to its neighbour, and the floats beside both. */
#include "block.h"
#include "convert.h"
#include "random.h"
#include "testing.h"

#include <fanin/types.h>

static uint32_t bits_of(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

static float float_of(uint32_t bits)
{
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

static uint16_t converted(uint32_t convert, uint32_t bits)
{
    uint16_t half = 0x5555;
    convert_run(convert, &half, &bits, sizeof bits);
    return half;
}

static float f16_value(uint16_t half)
{
    uint32_t exponent = half >> 10 & 31, mantissa = half & 1023;
    float magnitude = exponent == 0 ? (float)mantissa * 0x1p-24F
                                    : float_of((exponent + 112) << 23 | mantissa << 13);
    return half & 0x8000 ? -magnitude : magnitude;
}

static float bf16_value(uint16_t half)
{
    return float_of((uint32_t)half << 16);
}

/* All finite values of one sign, and what lies between each and the next one. @p largest: the bits
   of the largest finite value; behind it is infinity, which the rounding sees one step further. */
static void check_all(uint32_t convert, float (*value)(uint16_t), uint16_t largest,
                      uint32_t last_middle)
{
    for (uint32_t sign = 0; sign <= 0x8000; sign += 0x8000)
        for (uint32_t h = 0; h <= largest; h++) {
            uint32_t half = sign | h;
            uint32_t here = bits_of(value((uint16_t)half));
            assert_int_equal(converted(convert, here), half);
            if (here != sign << 16) /* not 0 */
                assert_int_equal(converted(convert, here - 1), half);
            assert_int_equal(converted(convert, here + 1), half);
            uint32_t middle =
                h == largest ? sign << 16 | last_middle
                             : bits_of((float)(((double)value((uint16_t)half) +
                                                (double)value((uint16_t)(half + 1))) /
                                               2));
            uint32_t even = half % 2 == 0 ? half : half + 1;
            assert_int_equal(converted(convert, middle), even);
            assert_int_equal(converted(convert, middle - 1), half);
            assert_int_equal(converted(convert, middle + 1), half + 1);
        }
}

TEST(test_bf16)
{
    check_all(CONVERT_F32_BF16, bf16_value, 0x7f7f, 0x7f7f8000);
}

TEST(test_f16)
{
    /* beside 0 a step of the float is far below half of the smallest subnormal number */
    check_all(CONVERT_F32_F16, f16_value, 0x7bff, bits_of(65520));
}

TEST(test_beyond)
{
    for (uint32_t sign = 0; sign < 2; sign++) {
        uint16_t minus = (uint16_t)(sign << 15);
        const uint32_t infinite = sign << 31 | 0x7f800000;
        assert_int_equal(converted(CONVERT_F32_BF16, infinite), minus | 0x7f80);
        assert_int_equal(converted(CONVERT_F32_F16, infinite), minus | 0x7c00);
        assert_int_equal(converted(CONVERT_F32_BF16, infinite - 1), minus | 0x7f80);
        assert_int_equal(converted(CONVERT_F32_F16, infinite - 1), minus | 0x7c00);
        /* the smallest subnormal float */
        assert_int_equal(converted(CONVERT_F32_BF16, sign << 31 | 1), minus);
        assert_int_equal(converted(CONVERT_F32_F16, sign << 31 | 1), minus);
        /* payloads that would be cut to those of an infinity, or round into the sign */
        const uint32_t nans[] = {1, 0x1fff, 0xffff, 0x10000, 0x400000, 0x7fffff};
        for (size_t i = 0; i < sizeof nans / sizeof nans[0]; i++) {
            assert_int_equal(converted(CONVERT_F32_BF16, infinite | nans[i]),
                             minus | 0x7fc0);
            assert_int_equal(converted(CONVERT_F32_F16, infinite | nans[i]),
                             minus | 0x7e00);
        }
    }
}

/* From numpy (float16) and PyTorch (bfloat16). */
TEST(test_golden)
{
    static const struct {
        float from;
        uint16_t bf16, f16;
    } values[] = {
        {1.0F, 0x3f80, 0x3c00},          {-2.5F, 0xc020, 0xc100},
        {3.14159274F, 0x4049, 0x4248},   {0.1F, 0x3dcd, 0x2e66},
        {-1.0e-7F, 0xb3d7, 0x8002},      {6.0e-8F, 0x3381, 0x0001},
        {2.9802322e-8F, 0x3300, 0x0000}, {65504.0F, 0x4780, 0x7bff},
        {65519.996F, 0x4780, 0x7bff},    {1.0e30F, 0x714a, 0x7c00},
        {0.333333343F, 0x3eab, 0x3555},  {1.00390625F, 0x3f80, 0x3c04},
        {1.01171875F, 0x3f82, 0x3c0c},   {6.1e-5F, 0x3880, 0x03ff},
    };
    for (size_t i = 0; i < sizeof values / sizeof values[0]; i++) {
        assert_int_equal(converted(CONVERT_F32_BF16, bits_of(values[i].from)),
                         values[i].bf16);
        assert_int_equal(converted(CONVERT_F32_F16, bits_of(values[i].from)),
                         values[i].f16);
    }
}

TEST(test_runs)
{
    random_source random = {7};
    uint8_t from[1024], to[1024], plain[1024];
    for (size_t i = 0; i < sizeof from; i++)
        from[i] = (uint8_t)random_next(&random);
    for (size_t skew = 0; skew < 8; skew++)
        for (size_t n = 0; n < 64; n++)
            for (uint32_t convert = CONVERT_F32_BF16; convert <= CONVERT_F32_F16;
                 convert++) {
                memset(to, 0xEE, sizeof to);
                convert_run(convert, to + skew, from + skew, 4 * n);
                for (size_t i = 0; i < n; i++) {
                    uint32_t bits;
                    uint16_t half;
                    memcpy(&bits, from + skew + 4 * i, sizeof bits);
                    memcpy(&half, to + skew + 2 * i, sizeof half);
                    assert_int_equal(half, converted(convert, bits));
                }
                assert_int_equal(to[skew + 2 * n], 0xEE);
                assert_int_equal(convert_bytes(convert, 4 * n), 2 * n);
            }
    convert_run(CONVERT_NONE, plain, from, sizeof plain);
    assert_memory_equal(plain, from, sizeof plain);
    assert_int_equal(convert_bytes(CONVERT_NONE, 17), 17);
}

TEST(test_which)
{
    for (fanin_dtype from = FANIN_DTYPE_BOOL; from <= FANIN_DTYPE_U64; from++)
        for (fanin_dtype to = FANIN_DTYPE_BOOL; to <= FANIN_DTYPE_U64; to++) {
            int wanted = from == to ? CONVERT_NONE : -1;
            if (from == FANIN_DTYPE_F32 && to == FANIN_DTYPE_BF16)
                wanted = CONVERT_F32_BF16;
            if (from == FANIN_DTYPE_F32 && to == FANIN_DTYPE_F16)
                wanted = CONVERT_F32_F16;
            assert_int_equal(convert_between(from, to), wanted);
        }
}

/* A transposed view of floats, converted on the way. */
TEST(test_strided)
{
    const uint64_t extent[] = {3, 5};
    const int64_t from_stride[] = {20, 4}, to_stride[] = {2, 6};
    float from[3][5];
    uint16_t to[5][3];
    strided view;
    for (int i = 0; i < 15; i++)
        from[i / 5][i % 5] = 1.0F + (float)i / 7;
    strided_init(&view, 2, extent, from_stride, to_stride, 4);
    view.convert = CONVERT_F32_BF16;
    strided_copy(&view, to, from);
    for (int i = 0; i < 15; i++)
        assert_int_equal(to[i % 5][i / 5],
                         converted(CONVERT_F32_BF16, bits_of(from[i / 5][i % 5])));
}
