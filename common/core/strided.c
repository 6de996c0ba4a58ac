/* SPDX-License-Identifier: Apache-2.0 */
#include "block.h"
#include "convert.h"

#include <fanin/types.h>
#include <string.h>

/* ------------------------------------------------------------------------ convert */

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

/* ------------------------------------------------------------------------ strided */

/* Strides of hostile or odd layouts may wrap; unsigned arithmetic keeps that defined. */
static int64_t times(int64_t stride, uint64_t count)
{
    return (int64_t)((uint64_t)stride * count);
}

static int64_t plus(int64_t a, int64_t b)
{
    return (int64_t)((uint64_t)a + (uint64_t)b);
}

void strided_init(strided *s, uint32_t n_dims, const uint64_t *extent_units,
                  const int64_t *from, const int64_t *to, uint64_t unit_bytes)
{
    memset(s, 0, sizeof *s);
    s->run = unit_bytes;
    /* From the innermost dimension outwards; the kept ones come out reversed. */
    uint32_t kept = 0;
    for (uint32_t i = n_dims; i-- > 0;) {
        if (extent_units[i] == 1)
            continue;
        if (kept == 0 && from[i] == (int64_t)s->run && to[i] == (int64_t)s->run) {
            s->run *= extent_units[i];
            continue;
        }
        uint32_t inner = kept - 1;
        if (kept > 0 && from[i] == times(s->from[inner], s->extent[inner]) &&
            to[i] == times(s->to[inner], s->extent[inner])) {
            s->extent[inner] *= extent_units[i];
            continue;
        }
        s->extent[kept] = extent_units[i];
        s->from[kept] = from[i];
        s->to[kept] = to[i];
        kept++;
    }
    s->n_dims = kept;
    for (uint32_t i = 0; i < kept / 2; i++) {
        uint32_t j = kept - 1 - i;
        uint64_t extent = s->extent[i];
        int64_t a = s->from[i], b = s->to[i];
        s->extent[i] = s->extent[j];
        s->from[i] = s->from[j];
        s->to[i] = s->to[j];
        s->extent[j] = extent;
        s->from[j] = a;
        s->to[j] = b;
    }
}

uint64_t strided_runs(const strided *s)
{
    uint64_t runs = 1;
    for (uint32_t i = 0; i < s->n_dims; i++)
        runs *= s->extent[i];
    return runs;
}

uint64_t strided_bytes(const strided *s)
{
    return strided_runs(s) * s->run;
}

void strided_run(const strided *s, uint64_t index, int64_t *from_out, int64_t *to_out)
{
    int64_t from = 0, to = 0;
    for (uint32_t i = s->n_dims; i-- > 0;) {
        uint64_t at = index % s->extent[i];
        index /= s->extent[i];
        from = plus(from, times(s->from[i], at));
        to = plus(to, times(s->to[i], at));
    }
    if (from_out)
        *from_out = from;
    if (to_out)
        *to_out = to;
}

/* One line of runs. Constant sizes let the compiler turn memcpy into single moves. */
static void copy_line(char *to, int64_t to_stride, const char *from,
                      int64_t from_stride, uint64_t count, uint64_t run,
                      uint32_t convert)
{
    if (convert != CONVERT_NONE) {
        for (uint64_t i = 0; i < count; i++, to += to_stride, from += from_stride)
            convert_run(convert, to, from, run);
        return;
    }
#define COPY_LINE(size)                                                                \
    for (uint64_t i = 0; i < count; i++, to += to_stride, from += from_stride)         \
    memcpy(to, from, (size))
    switch (run) {
    case 1:
        COPY_LINE(1);
        break;
    case 2:
        COPY_LINE(2);
        break;
    case 4:
        COPY_LINE(4);
        break;
    case 8:
        COPY_LINE(8);
        break;
    case 16:
        COPY_LINE(16);
        break;
    default:
        COPY_LINE(run);
        break;
    }
#undef COPY_LINE
}

void strided_copy(const strided *s, void *to, const void *from)
{
    if (s->n_dims == 0) {
        convert_run(s->convert, to, from, s->run);
        return;
    }
    uint32_t last = s->n_dims - 1;
    uint64_t at[FANIN_MAX_DIMS] = {0};
    int64_t from_at = 0, to_at = 0;
    for (;;) {
        copy_line((char *)to + to_at, s->to[last], (const char *)from + from_at,
                  s->from[last], s->extent[last], s->run, s->convert);
        uint32_t i = last;
        for (; i > 0; i--) {
            from_at = plus(from_at, s->from[i - 1]);
            to_at = plus(to_at, s->to[i - 1]);
            if (++at[i - 1] < s->extent[i - 1])
                break;
            from_at = plus(from_at, -times(s->from[i - 1], s->extent[i - 1]));
            to_at = plus(to_at, -times(s->to[i - 1], s->extent[i - 1]));
            at[i - 1] = 0;
        }
        if (i == 0)
            return;
    }
}
