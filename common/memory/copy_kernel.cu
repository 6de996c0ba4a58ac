/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Copies between layouts, from peer memory as a rule: each warp takes entries (copy_kernel.h), one
 * after the other. What counts is that many bytes are under way at once, over NVLink most of all:
 * each lane has several loads in flight before it stores, as wide as the addresses allow.
 */
#include "copy_kernel.h"

#define LANES 32
/** Loads that a lane has in flight. */
#define DEPTH 4
/** From this length on, runs whose addresses are only aligned to 4 bytes (2 bytes and less) are
    worth being shifted into place in vectors. */
#define SHIFT_FROM_4 2048
#define SHIFT_FROM_2 512

/** An entry, or the share of it that a warp takes, with real addresses. */
struct work {
    const char *from;
    char *to;
    int64_t from_step, to_step;
    uint32_t run, runs, convert;
};

/* Everything is read once and written once. */
template <typename T> static __device__ T load(const char *at)
{
    return __ldcs(reinterpret_cast<const T *>(at));
}

template <typename T> static __device__ void store(char *at, T value)
{
    __stcs(reinterpret_cast<T *>(at), value);
}

/* ----------------------------------------------------- equal alignment on both sides */

/** What moves elements as they are: T on both sides. */
template <typename T> struct plain {
    typedef T in;
    static const uint32_t in_size = sizeof(T), out_size = sizeof(T);
    static __device__ in read(const char *at)
    {
        return load<T>(at);
    }
    static __device__ void write(char *at, in value)
    {
        store<T>(at, value);
    }
};

/*
 * The lanes share all of the warp's elements, whatever run they are in: short runs keep them as
 * busy as long ones.
 */
template <typename Element>
static __device__ void copy_elements(const work &w, uint32_t lane)
{
    const uint32_t each = w.run / Element::in_size;
    const uint64_t total = static_cast<uint64_t>(each) * w.runs;
    uint32_t run = lane / each, place = lane % each;
    const uint32_t runs_on = LANES / each, places_on = LANES % each;
    uint64_t at = lane;
#pragma unroll 1
    while (at < total) {
        typename Element::in values[DEPTH];
        char *to[DEPTH];
#pragma unroll
        for (int i = 0; i < DEPTH; i++) {
            /* without a value in every case, registers would carry it from round to round */
            values[i] =
                at + i * LANES < total
                    ? Element::read(w.from + run * w.from_step +
                                    static_cast<uint64_t>(place) * Element::in_size)
                    : typename Element::in();
            to[i] = w.to + run * w.to_step +
                    static_cast<uint64_t>(place) * Element::out_size;
            run += runs_on;
            place += places_on;
            if (place >= each) {
                place -= each;
                run++;
            }
        }
#pragma unroll
        for (int i = 0; i < DEPTH; i++)
            if (at + i * LANES < total)
                Element::write(to[i], values[i]);
        at += DEPTH * LANES;
    }
}

/* --------------------------------------------------------- any alignment, longer runs */

/** What is before byte @p head and from byte @p tail on. */
static __device__ void copy_edges(char *to, const char *from, uint32_t head,
                                  uint32_t tail, uint32_t n, uint32_t lane)
{
#pragma unroll 1
    for (uint32_t i = lane; i < head + n - tail; i += LANES) {
        const uint32_t at = i < head ? i : i - head + tail;
        store<char>(to + at, load<char>(from + at));
    }
}

/** Sixteen bytes of the 32 in @p low and @p high, from byte 4 * WORDS + bits / 8 on. */
template <int WORDS>
static __device__ uint4 shifted(uint4 low, uint4 high, uint32_t bits)
{
    const uint32_t x[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
    uint4 out;
    out.x = __funnelshift_r(x[WORDS], x[WORDS + 1], bits);
    out.y = __funnelshift_r(x[WORDS + 1], x[WORDS + 2], bits);
    out.z = __funnelshift_r(x[WORDS + 2], x[WORDS + 3], bits);
    out.w = __funnelshift_r(x[WORDS + 3], x[WORDS + 4], bits);
    return out;
}

/*
 * @p n vectors to an aligned place from @p from + 4 * WORDS + bits / 8, where `from` is aligned too
 * and n + 1 vectors of it may be read. All lanes take part.
 */
template <int WORDS>
static __device__ void copy_shifted(char *to, const char *from, uint32_t bits,
                                    uint32_t n, uint32_t lane)
{
    const uint4 nothing = make_uint4(0, 0, 0, 0);
#pragma unroll 1
    for (uint32_t base = 0; base < n; base += DEPTH * LANES) {
        uint4 own[DEPTH + 1];
#pragma unroll
        for (int i = 0; i <= DEPTH; i++) {
            /* one vector more than is written: the first lane's, behind the last */
            const uint32_t at = base + i * LANES + lane;
            const bool needed = at <= n && (i < DEPTH || lane == 0);
            own[i] =
                needed ? load<uint4>(from + 16 * static_cast<uint64_t>(at)) : nothing;
        }
#pragma unroll
        for (int i = 0; i < DEPTH; i++) {
            /* lane 31's neighbour is lane 0 of the next row */
            const uint4 passed = lane == 0 ? own[i + 1] : own[i];
            uint4 next;
            next.x = __shfl_sync(~0u, passed.x, lane + 1);
            next.y = __shfl_sync(~0u, passed.y, lane + 1);
            next.z = __shfl_sync(~0u, passed.z, lane + 1);
            next.w = __shfl_sync(~0u, passed.w, lane + 1);
            const uint32_t at = base + i * LANES + lane;
            if (at < n)
                store(to + 16 * static_cast<uint64_t>(at),
                      shifted<WORDS>(own[i], next, bits));
        }
    }
}

/** One run: the edges byte by byte, whole vectors between them. Never touches a vector of the
    source that is not all inside the run. */
static __device__ void copy_run(char *to, const char *from, uint32_t n, uint32_t lane)
{
    uint32_t head = -reinterpret_cast<uintptr_t>(to) & 15;
    uint32_t skew = (reinterpret_cast<uintptr_t>(from) + head) & 15;
    if (head < skew)
        head += 16;
    if (n < head + 32) {
        copy_edges(to, from, n, n, n, lane);
        return;
    }
    const uint32_t vectors = (n - head + skew) / 16 - (skew ? 1 : 0);
    const uint32_t tail = head + 16 * vectors;
    copy_edges(to, from, head, tail, n, lane);
    to += head;
    from += head - skew;
    if (skew == 0) {
        const work whole = {from, to, 0, 0, 16 * vectors, 1, CONVERT_NONE};
        copy_elements<plain<uint4>>(whole, lane);
        return;
    }
    const uint32_t bits = skew % 4 * 8;
    switch (skew / 4) {
    case 0:
        copy_shifted<0>(to, from, bits, vectors, lane);
        break;
    case 1:
        copy_shifted<1>(to, from, bits, vectors, lane);
        break;
    case 2:
        copy_shifted<2>(to, from, bits, vectors, lane);
        break;
    default:
        copy_shifted<3>(to, from, bits, vectors, lane);
        break;
    }
}

static __device__ void copy_runs(const work &w, uint32_t lane)
{
    for (uint32_t i = 0; i < w.runs; i++)
        copy_run(w.to + i * w.to_step, w.from + i * w.from_step, w.run, lane);
}

static __device__ void copy_plain(const work &w, uint64_t from_bits, uint64_t to_bits,
                                  uint32_t lane)
{
    const uint64_t bits = from_bits | to_bits | w.run;
    if (bits % 16 == 0)
        copy_elements<plain<uint4>>(w, lane);
    else if (bits % 8 == 0)
        copy_elements<plain<uint2>>(w, lane);
    else if (w.run >= (bits % 4 == 0 ? SHIFT_FROM_4 : SHIFT_FROM_2))
        copy_runs(w, lane);
    else if (bits % 4 == 0)
        copy_elements<plain<uint32_t>>(w, lane);
    else if (bits % 2 == 0)
        copy_elements<plain<uint16_t>>(w, lane);
    else
        copy_elements<plain<uint8_t>>(w, lane);
}

/* ------------------------------------------------------------------------ conversion */

template <int CONVERT> static __device__ uint32_t half_of(float x)
{
    const uint32_t bits = __float_as_uint(x);
    if (CONVERT == CONVERT_F32_BF16)
        return convert_to_bf16(bits);
#ifdef __CUDA_ARCH__
    /* The same in one instruction, except for a NaN. */
    if ((bits & 0x7fffffff) <= 0x7f800000) {
        uint16_t half;
        asm("cvt.rn.f16.f32 %0, %1;" : "=h"(half) : "f"(x));
        return half;
    }
#endif
    return convert_to_f16(bits);
}

/** Four aligned elements to an aligned place. */
template <int CONVERT> struct four {
    typedef float4 in;
    static const uint32_t in_size = 16, out_size = 8;
    static __device__ in read(const char *at)
    {
        return load<float4>(at);
    }
    static __device__ void write(char *at, in v)
    {
        store(at, make_uint2(half_of<CONVERT>(v.x) | half_of<CONVERT>(v.y) << 16,
                             half_of<CONVERT>(v.z) | half_of<CONVERT>(v.w) << 16));
    }
};

/** One aligned element to an aligned place. */
template <int CONVERT> struct one {
    typedef float in;
    static const uint32_t in_size = 4, out_size = 2;
    static __device__ in read(const char *at)
    {
        return load<float>(at);
    }
    static __device__ void write(char *at, in v)
    {
        store(at, static_cast<uint16_t>(half_of<CONVERT>(v)));
    }
};

/** One element anywhere. */
template <int CONVERT> struct odd {
    typedef float in;
    static const uint32_t in_size = 4, out_size = 2;
    static __device__ in read(const char *at)
    {
        uint32_t bits = 0;
        for (int i = 0; i < 4; i++)
            bits |= static_cast<uint32_t>(load<uint8_t>(at + i)) << (8 * i);
        return __uint_as_float(bits);
    }
    static __device__ void write(char *at, in v)
    {
        const uint32_t half = half_of<CONVERT>(v);
        store(at, static_cast<uint8_t>(half));
        store(at + 1, static_cast<uint8_t>(half >> 8));
    }
};

template <int CONVERT>
static __device__ void copy_converted(const work &w, uint64_t from_bits,
                                      uint64_t to_bits, uint32_t lane)
{
    if ((from_bits | w.run) % 16 == 0 && to_bits % 8 == 0)
        copy_elements<four<CONVERT>>(w, lane);
    else if (from_bits % 4 == 0 && to_bits % 2 == 0)
        copy_elements<one<CONVERT>>(w, lane);
    else
        copy_elements<odd<CONVERT>>(w, lane);
}

/* --------------------------------------------------------------------------- the kernel */

static __device__ void carry_out(const work &w, uint32_t lane)
{
    uint64_t from_bits = reinterpret_cast<uint64_t>(w.from);
    uint64_t to_bits = reinterpret_cast<uint64_t>(w.to);
    if (w.runs > 1) {
        from_bits |= static_cast<uint64_t>(w.from_step);
        to_bits |= static_cast<uint64_t>(w.to_step);
    }
    if (w.convert == CONVERT_NONE)
        copy_plain(w, from_bits, to_bits, lane);
    else if (w.convert == CONVERT_F32_BF16)
        copy_converted<CONVERT_F32_BF16>(w, from_bits, to_bits, lane);
    else
        copy_converted<CONVERT_F32_F16>(w, from_bits, to_bits, lane);
}

/** Share @p part of @p parts: some of the runs, and where there are too few, a piece of them. */
static __device__ void cut(work &w, uint32_t part, uint32_t parts)
{
    const uint32_t groups = w.runs < parts ? w.runs : parts, pieces = parts / groups;
    const uint32_t group = part / pieces, piece = part % pieces;
    const uint64_t first = static_cast<uint64_t>(w.runs) * group / groups;
    const uint64_t end = static_cast<uint64_t>(w.runs) * (group + 1) / groups;
    /* multiples of a line, so that shares stay aligned as the run is */
    const uint64_t length = ((w.run + pieces - 1ull) / pieces + 127) / 128 * 128;
    const uint64_t begin = length * piece;
    if (group >= groups || begin >= w.run) {
        w.runs = 0;
        return;
    }
    w.from += static_cast<int64_t>(first) * w.from_step + begin;
    w.to += static_cast<int64_t>(first) * w.to_step +
            (w.convert == CONVERT_NONE ? begin : begin / 2);
    w.run = static_cast<uint32_t>(w.run - begin < length ? w.run - begin : length);
    w.runs = static_cast<uint32_t>(end - first);
}

extern "C" __global__ void __launch_bounds__(COPY_KERNEL_THREADS, 4)
    fanin_copy_units(const copy_parameters parameters)
{
    const uint32_t lane = threadIdx.x % LANES;
    const uint64_t shares =
        copy_turns(parameters.count, parameters.ways) * parameters.parts;
    const uint64_t warps = static_cast<uint64_t>(gridDim.x) * COPY_KERNEL_WARPS;
    uint64_t share =
        static_cast<uint64_t>(blockIdx.x) * COPY_KERNEL_WARPS + threadIdx.x / LANES;
    for (; share < shares; share += warps) {
        const uint64_t at =
            copy_entry_of(share / parameters.parts, parameters.count, parameters.ways);
        if (at >= parameters.count)
            continue;
        const copy_entry e = parameters.entries[at];
        const uint64_t base = parameters.bases ? parameters.bases[e.base] : 0;
        work w = {
            reinterpret_cast<const char *>(base + e.from + parameters.from_add),
            reinterpret_cast<char *>(e.to + parameters.to_add),
            e.from_step,
            e.to_step,
            e.run,
            e.runs,
            e.convert,
        };
        if (w.run == 0 || w.runs == 0)
            continue;
        if (parameters.parts > 1)
            cut(w, static_cast<uint32_t>(share % parameters.parts), parameters.parts);
        if (w.runs > 0)
            carry_out(w, lane);
    }
}
