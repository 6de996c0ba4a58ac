/* SPDX-License-Identifier: Apache-2.0 */
/*
 * XXH3-64 of pieces of 4 KiB, and XXH3-128 of pieces of 4 MiB, as the specification describes them
 * for inputs of more than 240 bytes with seed 0 and the default secret. A warp takes a piece, four
 * blocks of 16 stripes of 64 bytes at a time.
 * What the stripes of a block add to the eight accumulators does not depend on their order, so
 * lanes take stripes side by side and their sums are added; only the blocks come one after the
 * other, by what is done to the accumulators between two of them.
 */
#include "digest_kernel.h"

#define LANES 32
#define VECTORS (DIGEST_KERNEL_PIECE / 16 / LANES) /* that a lane has of a piece */
#define BLOCKS 4
#define PER_BLOCK (VECTORS / BLOCKS)
#define COLUMNS 4 /* vectors of a stripe */

#define PRIME32_1 0x9e3779b1u
#define PRIME32_2 0x85ebca77u
#define PRIME32_3 0xc2b2ae3du
#define PRIME64_1 0x9e3779b185ebca87ull
#define PRIME64_2 0xc2b2ae3d27d4eb4full
#define PRIME64_3 0x165667b19e3779f9ull
#define PRIME64_4 0x85ebca77c2b2ae63ull
#define PRIME64_5 0x27d4eb2f165667c5ull
#define PRIME_MX1 0x165667919e3779f9ull

/* Places in the secret: of the last stripe, of what comes between blocks, of the end. */
#define SECRET_LAST 121
#define SECRET_BETWEEN 128
#define SECRET_END 11
#define SECRET_END_HIGH 117 /* of the high word */

static __device__ const uint64_t secret[24] = {
    0xbe4ba423396cfeb8ull, 0x1cad21f72c81017cull, 0xdb979083e96dd4deull,
    0x1f67b3b7a4a44072ull, 0x78e5c0cc4ee679cbull, 0x2172ffcc7dd05a82ull,
    0x8e2443f7744608b8ull, 0x4c263a81e69035e0ull, 0xcb00c391bb52283cull,
    0xa32e531b8b65d088ull, 0x4ef90da297486471ull, 0xd8acdea946ef1938ull,
    0x3f349ce33f76faa8ull, 0x1d4f0bc7c7bbdcf9ull, 0x3159b4cd4be0518aull,
    0x647378d9c97e9fc8ull, 0xc3ebd33483acc5eaull, 0xeb6313faffa081c5ull,
    0x49daf0b751dd0d17ull, 0x9e68d429265516d3ull, 0xfca1477d58be162bull,
    0xce31d07ad1b8f88full, 0x280416958f3acb45ull, 0x7e404bbbcafbd7afull,
};

static __device__ const uint64_t first_values[2 * COLUMNS] = {
    PRIME32_3, PRIME64_1, PRIME64_2, PRIME64_3,
    PRIME64_4, PRIME32_2, PRIME64_5, PRIME32_1,
};

/** Two neighbouring words: of a stripe, of the accumulators, of the secret. */
struct pair {
    uint64_t a, b;
};

/* ------------------------------------------------------------------------------- XXH3 */

static __device__ uint64_t secret_word(uint32_t at)
{
    const uint32_t word = at / 8, bits = at % 8 * 8;
    if (bits == 0)
        return secret[word];
    return secret[word] >> bits | secret[word + 1] << (64 - bits);
}

static __device__ pair secret_pair(uint32_t at)
{
    const pair key = {secret_word(at), secret_word(at + 8)};
    return key;
}

static __device__ uint64_t product_of_halves(uint64_t x)
{
    return (x & 0xffffffffu) * (x >> 32);
}

static __device__ void add_vector(pair &sum, uint4 v, pair key)
{
    const uint64_t a = v.x | static_cast<uint64_t>(v.y) << 32;
    const uint64_t b = v.z | static_cast<uint64_t>(v.w) << 32;
    sum.a += b + product_of_halves(a ^ key.a);
    sum.b += a + product_of_halves(b ^ key.b);
}

static __device__ uint64_t stirred(uint64_t value, uint64_t key)
{
    return (value ^ value >> 47 ^ key) * PRIME32_1;
}

static __device__ uint64_t finished(uint64_t sum)
{
    sum = (sum ^ sum >> 37) * PRIME_MX1;
    return sum ^ sum >> 32;
}

/* The lane's value and that of the lane whose number differs in @p bit. */
static __device__ uint64_t with_lane(uint64_t value, uint32_t lane, uint32_t bit)
{
    const uint32_t low = __shfl_sync(~0u, static_cast<uint32_t>(value), lane ^ bit);
    const uint32_t high =
        __shfl_sync(~0u, static_cast<uint32_t>(value >> 32), lane ^ bit);
    return value + (low | static_cast<uint64_t>(high) << 32);
}

/** A lane's two accumulators, in each of eight lanes the same. */
static __device__ pair first_value(uint32_t lane)
{
    const pair value = {first_values[lane % COLUMNS * 2],
                        first_values[lane % COLUMNS * 2 + 1]};
    return value;
}

/*
 * BLOCKS blocks more. Lane l has of each block the vectors l and l + 32: column l % 4 of the
 * stripes l / 4 and l / 4 + 8. @p is_end: the last of them is the last of all.
 */
static __device__ void take_blocks(pair &value, const uint4 *v, bool is_end,
                                   uint32_t lane)
{
    const uint32_t column = 16 * (lane % COLUMNS), stripe = lane / COLUMNS;
    const pair between = secret_pair(SECRET_BETWEEN + column);
#pragma unroll
    for (uint32_t block = 0; block < BLOCKS; block++) {
        pair sum = {0, 0};
#pragma unroll
        for (uint32_t i = 0; i < PER_BLOCK; i++) {
            const uint32_t of_block = stripe + i * (LANES / COLUMNS);
            const bool last = is_end && block == BLOCKS - 1 &&
                              of_block == PER_BLOCK * LANES / COLUMNS - 1;
            const uint32_t at = last ? SECRET_LAST : 8 * of_block;
            add_vector(sum, v[block * PER_BLOCK + i], secret_pair(at + column));
        }
#pragma unroll
        for (uint32_t bit = COLUMNS; bit < LANES; bit *= 2) {
            sum.a = with_lane(sum.a, lane, bit);
            sum.b = with_lane(sum.b, lane, bit);
        }
        value.a += sum.a;
        value.b += sum.b;
        if (block < BLOCKS - 1 || !is_end) {
            value.a = stirred(value.a, between.a);
            value.b = stirred(value.b, between.b);
        }
    }
}

/* The accumulators folded with the secret from @p at on, and @p start; the same in every lane. */
static __device__ uint64_t merged(pair value, uint32_t at, uint64_t start,
                                  uint32_t lane)
{
    const pair key = secret_pair(at + 16 * (lane % COLUMNS));
    const uint64_t x = value.a ^ key.a, y = value.b ^ key.b;
    uint64_t folded = x * y ^ __umul64hi(x, y);
    folded = with_lane(folded, lane, 1);
    folded = with_lane(folded, lane, 2);
    return finished(start + folded);
}

/* Every lane returns the result. */
static __device__ uint64_t digest_of(const uint4 *v, uint32_t lane)
{
    pair value = first_value(lane);
    take_blocks(value, v, true, lane);
    return merged(value, SECRET_END, DIGEST_KERNEL_PIECE * PRIME64_1, lane);
}

/* ------------------------------------------------------------- the bytes of a piece */

/* Everything is read once. */
template <typename T> static __device__ T load(const char *at)
{
    return __ldcs(reinterpret_cast<const T *>(at));
}

template <typename T>
static __device__ void gather_units(const copy_entry &e, const char *from, char *to,
                                    uint32_t lane)
{
    const uint32_t each = e.run / sizeof(T), total = each * e.runs;
    for (uint32_t i = lane; i < total; i += LANES)
        reinterpret_cast<T *>(to)[i] =
            load<T>(from + i / each * e.from_step + i % each * sizeof(T));
}

/* The bits of a float anywhere. */
static __device__ uint32_t load_float(const char *at, bool is_aligned)
{
    if (is_aligned)
        return load<uint32_t>(at);
    uint32_t bits = 0;
    for (int i = 0; i < 4; i++)
        bits |= static_cast<uint32_t>(load<uint8_t>(at + i)) << (8 * i);
    return bits;
}

static __device__ void gather_converted(const copy_entry &e, const char *from, char *to,
                                        bool is_aligned, uint32_t lane)
{
    const uint32_t each = e.run / 4, total = each * e.runs;
    for (uint32_t i = lane; i < total; i += LANES) {
        const uint32_t bits =
            load_float(from + i / each * e.from_step + i % each * 4, is_aligned);
        reinterpret_cast<uint16_t *>(to)[i] = e.convert == CONVERT_F32_BF16
                                                  ? convert_to_bf16(bits)
                                                  : convert_to_f16(bits);
    }
}

/* One entry, packed, by the widest units that all of it allows. Returns where it ends. */
static __device__ uint32_t gather_entry(const copy_entry &e, char *room, uint32_t lane)
{
    const char *from = reinterpret_cast<const char *>(e.from);
    const uint64_t source =
        e.from | (e.runs > 1 ? static_cast<uint64_t>(e.from_step) : 0);
    const uint64_t bits = source | e.run | e.to;
    char *to = room + e.to;
    if (e.convert != CONVERT_NONE)
        gather_converted(e, from, to, source % 4 == 0, lane);
    else if (bits % 16 == 0)
        gather_units<uint4>(e, from, to, lane);
    else if (bits % 8 == 0)
        gather_units<uint2>(e, from, to, lane);
    else if (bits % 4 == 0)
        gather_units<uint32_t>(e, from, to, lane);
    else if (bits % 2 == 0)
        gather_units<uint16_t>(e, from, to, lane);
    else
        gather_units<uint8_t>(e, from, to, lane);
    const uint32_t bytes = e.run * e.runs;
    return static_cast<uint32_t>(e.to) +
           (e.convert == CONVERT_NONE ? bytes : bytes / 2);
}

/* The first entry of a piece, as if it had no other bytes of that run. */
static __device__ copy_entry first_of(copy_entry e, uint32_t skip, uint32_t piece)
{
    const uint32_t most = DIGEST_KERNEL_RUN(e.convert);
    skip += piece * most;
    e.from += skip;
    e.run -= skip;
    if (e.run > most)
        e.run = most;
    return e;
}

/* The lane's vectors of a piece, by way of @p room where they do not lie in memory as they are.
   @p head: of the piece's bytes the first, and @p rest others behind it. */
static __device__ void fetch(const copy_entry &head, const copy_entry *rest,
                             uint32_t n_rest, uint4 *room, uint4 *v, uint32_t lane)
{
    if (head.run == DIGEST_KERNEL_PIECE && head.from % 16 == 0 &&
        head.convert == CONVERT_NONE) {
#pragma unroll
        for (int i = 0; i < VECTORS; i++)
            v[i] = load<uint4>(reinterpret_cast<const char *>(head.from) +
                               16 * (lane + i * LANES));
        return;
    }
    char *bytes = reinterpret_cast<char *>(room);
    uint32_t end = gather_entry(head, bytes, lane);
    for (uint32_t i = 0; i < n_rest; i++)
        end = gather_entry(rest[i], bytes, lane);
    for (uint32_t i = end + lane; i < DIGEST_KERNEL_PIECE; i += LANES)
        bytes[i] = 0;
    __syncwarp();
#pragma unroll
    for (int i = 0; i < VECTORS; i++)
        v[i] = room[lane + i * LANES];
    __syncwarp(); /* the next piece comes into the same room */
}

/* Pieces [from, from + share) of a row, as many as it has. What a row is comes over the link to the
   host, and so do digests: once for all of them. */
static __device__ void digest_share(const digest_parameters &p, const digest_row &row,
                                    uint32_t from, uint4 *room, uint32_t lane)
{
    const uint32_t end = from + p.share < row.pieces ? from + p.share : row.pieces;
    if (from >= end)
        return;
    const copy_entry entry = p.entries[row.first];
    uint64_t mine = 0;
    for (uint32_t i = from; i < end; i++) {
        uint4 v[VECTORS];
        fetch(first_of(entry, row.skip, i), p.entries + row.first + 1, row.count - 1,
              room, v, lane);
        const uint64_t digest = digest_of(v, lane);
        if (lane == i)
            mine = digest;
    }
    if (lane >= from && lane < end)
        p.out[row.at + lane] = mine;
}

extern "C" __global__ void __launch_bounds__(DIGEST_KERNEL_THREADS)
    fanin_digest_pieces(const digest_parameters parameters)
{
    __shared__ uint4 rooms[DIGEST_KERNEL_WARPS][DIGEST_KERNEL_PIECE / 16];
    const uint32_t lane = threadIdx.x % LANES, warp = threadIdx.x / LANES;
    const uint32_t shares = DIGEST_KERNEL_ROW / parameters.share;
    const uint64_t warps = static_cast<uint64_t>(gridDim.x) * DIGEST_KERNEL_WARPS;
    uint64_t at = static_cast<uint64_t>(blockIdx.x) * DIGEST_KERNEL_WARPS + warp;
    for (; at < parameters.count * shares; at += warps)
        digest_share(parameters, parameters.rows[at / shares],
                     static_cast<uint32_t>(at % shares) * parameters.share, rooms[warp],
                     lane);
}

/* ------------------------------------------------------------- pieces of a file */

/* A lane's vectors of the next BLOCKS blocks. */
static __device__ void fetch_blocks(const char *at, uint4 *v, uint32_t lane)
{
#pragma unroll
    for (int i = 0; i < VECTORS; i++)
        v[i] = load<uint4>(at + 16 * (lane + i * LANES));
}

/* The next vectors are on their way while the sums of these are made. */
static __device__ pair digest_file_piece(const char *from, uint32_t lane)
{
    const uint32_t rounds = DIGEST_FILE_PIECE / DIGEST_KERNEL_PIECE;
    pair value = first_value(lane);
    uint4 v[VECTORS], next[VECTORS];
    fetch_blocks(from, v, lane);
#pragma unroll 1
    for (uint32_t i = 1; i < rounds; i++) {
        fetch_blocks(from + static_cast<uint64_t>(i) * DIGEST_KERNEL_PIECE, next, lane);
        take_blocks(value, v, false, lane);
#pragma unroll
        for (int k = 0; k < VECTORS; k++)
            v[k] = next[k];
    }
    take_blocks(value, v, true, lane);
    return value;
}

extern "C" __global__ void __launch_bounds__(DIGEST_FILE_KERNEL_THREADS)
    fanin_digest_file(const digest_file_parameters parameters)
{
    const uint32_t lane = threadIdx.x % LANES;
    for (uint64_t at = blockIdx.x; at < parameters.count; at += gridDim.x) {
        const pair value =
            digest_file_piece(parameters.bytes + at * DIGEST_FILE_PIECE, lane);
        const uint64_t low =
            merged(value, SECRET_END, DIGEST_FILE_PIECE * PRIME64_1, lane);
        const uint64_t high =
            merged(value, SECRET_END_HIGH, ~(DIGEST_FILE_PIECE * PRIME64_2), lane);
        if (lane == 0) {
            parameters.out[2 * at] = low;
            parameters.out[2 * at + 1] = high;
        }
    }
}
