/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Making: what differs between two copies, in words of two bytes. A warp takes an eighth of a
 * segment, eight words a lane at a time: what it finds is in order. Both copies are read twice, to
 * count and to emit, as where a segment's changes lie is known when all before it are counted. Host
 * memory is written in rows of what a warp has gathered in shared memory: by single words the link
 * would carry little but addresses.
 */
#include "patch_kernel.h"

#define LANES 32
#define WORDS 8              /* that a lane takes at a time */
#define STEP (LANES * WORDS) /* words of a warp */
#define DEPTH 4              /* loads from each copy that a lane has in flight */
#define ROOM (2 * STEP)      /* changes that a warp gathers */

/** A lane's words of DEPTH steps, of both copies. */
struct fetched {
    uint4 before[DEPTH], after[DEPTH];
};

/* Eight words; what is behind the end is 0. */
static __device__ uint4 fetch_words(const uint8_t *copy, uint64_t at, uint64_t bytes)
{
    if (at + sizeof(uint4) <= bytes)
        return __ldcs(reinterpret_cast<const uint4 *>(copy + at));
    uint32_t words[4] = {0, 0, 0, 0};
    for (uint32_t i = 0; i < sizeof(uint4) && at + i < bytes; i++)
        words[i / 4] |= static_cast<uint32_t>(copy[at + i]) << 8 * (i % 4);
    return make_uint4(words[0], words[1], words[2], words[3]);
}

static __device__ void fetch_steps(const patch_parameters &p, uint64_t word, fetched &f)
{
#pragma unroll
    for (uint32_t i = 0; i < DEPTH; i++) {
        f.before[i] = fetch_words(p.before, 2 * (word + i * STEP), p.bytes);
        f.after[i] = fetch_words(p.after, 2 * (word + i * STEP), p.bytes);
    }
}

/* A bit for each of the eight words. */
static __device__ uint32_t changed_words(uint4 before, uint4 after)
{
    const uint32_t x[4] = {before.x ^ after.x, before.y ^ after.y, before.z ^ after.z,
                           before.w ^ after.w};
    uint32_t mask = 0;
#pragma unroll
    for (uint32_t i = 0; i < 4; i++)
        mask |= ((x[i] & 0xffffu) != 0 ? 1u : 0u) << 2 * i | (x[i] >> 16 != 0 ? 2u : 0u)
                                                                 << 2 * i;
    return mask;
}

/* Of this lane and those before it. */
static __device__ uint32_t sum_up_to(uint32_t value, uint32_t lane)
{
#pragma unroll
    for (uint32_t distance = 1; distance < LANES; distance *= 2) {
        const uint32_t other = __shfl_sync(~0u, value, (lane - distance) % LANES);
        value += lane >= distance ? other : 0;
    }
    return value;
}

static __device__ uint32_t of_last_lane(uint32_t value)
{
    return __shfl_sync(~0u, value, LANES - 1);
}

/* Changes of a segment. */
static __device__ uint32_t count_segment(const patch_parameters &p, uint64_t segment)
{
    const uint4 counts = reinterpret_cast<const uint4 *>(p.counts)[segment];
    const uint32_t x[4] = {counts.x, counts.y, counts.z, counts.w};
    uint32_t all = 0;
#pragma unroll
    for (uint32_t i = 0; i < 4; i++)
        all += (x[i] & 0xffffu) + (x[i] >> 16);
    return all;
}

extern "C" __global__ void __launch_bounds__(PATCH_KERNEL_THREADS)
    fanin_patch_count(const patch_parameters p)
{
    const uint32_t lane = threadIdx.x % LANES, warp = threadIdx.x / LANES;
    const uint64_t shares = patch_kernel_segments(p.bytes) * PATCH_SHARES;
    const uint64_t warps = static_cast<uint64_t>(gridDim.x) * PATCH_KERNEL_WARPS;
    uint64_t share = static_cast<uint64_t>(blockIdx.x) * PATCH_KERNEL_WARPS + warp;
    for (; share < shares; share += warps) {
        uint32_t found = 0;
        for (uint32_t at = 0; at < PATCH_SHARE_WORDS; at += DEPTH * STEP) {
            fetched f;
            fetch_steps(p, share * PATCH_SHARE_WORDS + at + lane * WORDS, f);
#pragma unroll
            for (uint32_t i = 0; i < DEPTH; i++)
                found += __popc(changed_words(f.before[i], f.after[i]));
        }
        found = of_last_lane(sum_up_to(found, lane));
        if (lane == 0)
            p.counts[share] = static_cast<uint16_t>(found);
    }
}

extern "C" __global__ void __launch_bounds__(PATCH_SCAN_THREADS)
    fanin_patch_scan(const patch_parameters p)
{
    const uint32_t lane = threadIdx.x % LANES;
    const uint64_t n = patch_kernel_segments(p.bytes);
    uint64_t before = 0;
    for (uint64_t base = 0; base < n; base += DEPTH * LANES) {
        uint32_t counts[DEPTH];
#pragma unroll
        for (uint32_t i = 0; i < DEPTH; i++) {
            const uint64_t segment = base + i * LANES + lane;
            counts[i] = segment < n ? count_segment(p, segment) : 0;
        }
#pragma unroll
        for (uint32_t i = 0; i < DEPTH; i++) {
            const uint64_t segment = base + i * LANES + lane;
            const uint32_t up_to = sum_up_to(counts[i], lane);
            if (segment < n) {
                p.directory[segment] = counts[i];
                p.first[segment] = before + up_to - counts[i];
            }
            before += of_last_lane(up_to);
        }
    }
    if (lane == 0) {
        p.first[n] = before;
        *p.made = before <= p.most ? before : PATCH_TOO_LARGE;
    }
}

/** Where a warp's changes go, and those that are gathered for there. */
struct row {
    uint16_t *places, *words;           /* in host memory */
    uint16_t *room_places, *room_words; /* ROOM each */
    uint32_t held;
};

/* What share @p share of its segment writes. */
static __device__ row row_of(const patch_parameters &p, uint64_t share, uint16_t *room)
{
    const uint64_t segment = share / PATCH_SHARES;
    uint32_t before = 0;
    for (uint64_t i = segment * PATCH_SHARES; i < share; i++)
        before += p.counts[i];
    row r;
    r.places = reinterpret_cast<uint16_t *>(p.changes) + 2 * p.first[segment] + before;
    r.words = r.places + count_segment(p, segment);
    r.room_places = room;
    r.room_words = room + ROOM;
    r.held = 0;
    return r;
}

static __device__ void write_row(row &r, uint32_t lane)
{
    __syncwarp();
    for (uint32_t i = lane; i < r.held; i += LANES) {
        r.places[i] = r.room_places[i];
        r.words[i] = r.room_words[i];
    }
    r.places += r.held;
    r.words += r.held;
    r.held = 0;
    __syncwarp();
}

/* The changes of one step, whose first word has the lane's @p place in the segment. */
static __device__ void gather_step(row &r, uint4 before, uint4 after, uint32_t place,
                                   uint32_t lane)
{
    const uint32_t x[4] = {after.x, after.y, after.z, after.w};
    const uint32_t mask = changed_words(before, after), mine = __popc(mask);
    const uint32_t up_to = sum_up_to(mine, lane);
    uint32_t at = r.held + up_to - mine;
#pragma unroll
    for (uint32_t i = 0; i < WORDS; i++) {
        if (!(mask >> i & 1))
            continue;
        r.room_places[at] = static_cast<uint16_t>(place + i);
        r.room_words[at++] = static_cast<uint16_t>(x[i / 2] >> 16 * (i % 2));
    }
    r.held += of_last_lane(up_to);
    if (r.held > ROOM - STEP)
        write_row(r, lane);
}

extern "C" __global__ void __launch_bounds__(PATCH_KERNEL_THREADS)
    fanin_patch_emit(const patch_parameters p)
{
    __shared__ uint16_t rooms[PATCH_KERNEL_WARPS][2 * ROOM];
    const uint32_t lane = threadIdx.x % LANES, warp = threadIdx.x / LANES;
    const uint64_t segments = patch_kernel_segments(p.bytes);
    const uint64_t warps = static_cast<uint64_t>(gridDim.x) * PATCH_KERNEL_WARPS;
    uint64_t share = static_cast<uint64_t>(blockIdx.x) * PATCH_KERNEL_WARPS + warp;
    if (p.first[segments] > p.most)
        return;
    for (; share < segments * PATCH_SHARES; share += warps) {
        if (p.counts[share] == 0)
            continue;
        row r = row_of(p, share, rooms[warp]);
        const uint32_t place =
            static_cast<uint32_t>(share % PATCH_SHARES) * PATCH_SHARE_WORDS +
            lane * WORDS;
        for (uint32_t at = 0; at < PATCH_SHARE_WORDS; at += DEPTH * STEP) {
            fetched f;
            fetch_steps(p, share * PATCH_SHARE_WORDS + at + lane * WORDS, f);
#pragma unroll
            for (uint32_t i = 0; i < DEPTH; i++)
                gather_step(r, f.before[i], f.after[i], place + at + i * STEP, lane);
        }
        write_row(r, lane);
    }
}

/* --------------------------------------------------------------------------- applying */

/* Where the landing's byte @p at is; NULL: between two runs, and nobody wants it. */
static __device__ char *landed_at(const patch_landing &l, uint64_t at)
{
    char *to = reinterpret_cast<char *>(l.to);
    if (l.n_dims == 0)
        return to + at;
    for (uint32_t i = 0; i < l.n_dims; i++) {
        const uint64_t index = at / l.from_step[i];
        if (index >= l.extent[i])
            return nullptr;
        at -= index * l.from_step[i];
        to += static_cast<int64_t>(index) * l.to_step[i];
    }
    return at < l.run ? to + at : nullptr;
}

/* The word at byte @p at of the copy, as far as it is the landing's. */
static __device__ void land(const patch_landing &l, uint64_t at, uint16_t word)
{
    if (at >= l.end || at + 1 < l.from)
        return;
    if (l.even) {
        char *to = landed_at(l, at - l.from);
        if (to)
            *reinterpret_cast<uint16_t *>(to) = word;
        return;
    }
    for (uint32_t i = 0; i < 2; i++) {
        const uint64_t byte = at + i;
        char *to =
            byte >= l.from && byte < l.end ? landed_at(l, byte - l.from) : nullptr;
        if (to)
            *to = static_cast<char>(word >> 8 * i);
    }
}

/** Words of a row that a warp has in shared memory, and vectors that they may touch. */
#define TILE 512
#define TILE_VECTORS (2 * TILE / sizeof(uint4) + 1)

/* @p n words of host memory from @p from on, by way of @p room, where they are returned: by
   vectors, as single words fill half of what the link can carry at a time. */
static __device__ const uint16_t *fetch_row(const uint16_t *from, uint32_t n,
                                            uint4 *room, uint32_t lane)
{
    const uint32_t before = reinterpret_cast<uint64_t>(from) % sizeof(uint4) / 2;
    const uint4 *first = reinterpret_cast<const uint4 *>(from - before);
#pragma unroll 3
    for (uint32_t i = lane; i * sizeof(uint4) < 2 * (before + n); i += LANES)
        room[i] = __ldcs(first + i);
    return reinterpret_cast<const uint16_t *>(room) + before;
}

static __device__ void apply_run(const patch_run &run, const patch_landing *landings,
                                 uint4 (*room)[TILE_VECTORS], uint32_t lane)
{
    const uint16_t *changes = reinterpret_cast<const uint16_t *>(run.changes);
    for (uint32_t base = 0; base < run.count; base += TILE) {
        const uint32_t n = run.count - base < TILE ? run.count - base : TILE;
        const uint16_t *places = fetch_row(changes + base, n, room[0], lane);
        const uint16_t *words = fetch_row(changes + run.count + base, n, room[1], lane);
        __syncwarp();
        for (uint32_t i = lane; i < n; i += LANES)
            for (uint32_t j = 0; j < run.n; j++)
                land(landings[run.first + j], run.start + 2 * places[i], words[i]);
        __syncwarp(); /* the next come into the same room */
    }
}

/* A warp takes a run at a time: what it reads of host memory it reads once, and in rows. */
extern "C" __global__ void __launch_bounds__(PATCH_KERNEL_THREADS)
    fanin_patch_apply(const patch_apply_parameters p)
{
    __shared__ uint4 rooms[PATCH_KERNEL_WARPS][2][TILE_VECTORS];
    const uint32_t lane = threadIdx.x % LANES, warp = threadIdx.x / LANES;
    const uint64_t warps = static_cast<uint64_t>(gridDim.x) * PATCH_KERNEL_WARPS;
    uint64_t k = static_cast<uint64_t>(blockIdx.x) * PATCH_KERNEL_WARPS + warp;
    for (; k < p.count; k += warps)
        apply_run(p.runs[k], p.landings, rooms[warp], lane);
}
