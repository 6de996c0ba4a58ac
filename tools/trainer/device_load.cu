/* SPDX-License-Identifier: Apache-2.0 */
/* Work that keeps a device busy as training does: a product of large matrices on the tensor
   cores, and a kernel that only moves memory. */
#include "device_work.h"

#include <cuda_fp16.h>
#include <mma.h>
#include <stdint.h>

using namespace nvcuda;

namespace
{
enum {
    THREADS = DEVICE_WORK_THREADS,
    TILE_ROWS = DEVICE_PRODUCT_TILE,
    TILE_COLUMNS = DEVICE_PRODUCT_TILE,
    TILE_DEPTH = 32,
    PITCH = TILE_DEPTH + 8, /* so that rows begin in different banks */
};

/* Copies a tile of 128 rows and TILE_DEPTH columns: 512 groups of eight numbers. */
__device__ inline void load_tile(uint4 registers[2], const __half *from, uint32_t n)
{
    for (int i = 0; i < 2; i++) {
        uint32_t group = threadIdx.x + i * THREADS;
        registers[i] = *reinterpret_cast<const uint4 *>(
            from + (uint64_t)(group / 4) * n + group % 4 * 8);
    }
}

__device__ inline void store_tile(__half *tile, const uint4 registers[2])
{
    for (int i = 0; i < 2; i++) {
        uint32_t group = threadIdx.x + i * THREADS;
        *reinterpret_cast<uint4 *>(tile + group / 4 * PITCH + group % 4 * 8) =
            registers[i];
    }
}
} // namespace

extern "C" __global__ void __launch_bounds__(THREADS)
    fanin_product(const work_parameters p)
{
    const __half *a = static_cast<const __half *>(p.a);
    const __half *b = static_cast<const __half *>(p.b);
    float *c = static_cast<float *>(p.c);
    uint32_t n = (uint32_t)p.count;
    __shared__ __align__(32) __half a_tile[2][TILE_ROWS * PITCH];
    __shared__ __align__(32) __half b_tile[2][TILE_COLUMNS * PITCH];
    wmma::fragment<wmma::accumulator, 16, 16, 16, float> sum[2][4];
    uint32_t tiles = n / TILE_COLUMNS;
    uint32_t row = blockIdx.x / tiles * TILE_ROWS;
    uint32_t column = blockIdx.x % tiles * TILE_COLUMNS;
    uint32_t warp = threadIdx.x / 32;
    uint32_t warp_row = warp / 2 * 32; /* 4 by 2 warps, each 32 by 64 */
    uint32_t warp_column = warp % 2 * 64;
    uint4 a_next[2], b_next[2];
    for (int i = 0; i < 2; i++) {
        for (int j = 0; j < 4; j++) {
            wmma::fill_fragment(sum[i][j], 0.0f);
        }
    }
    a += (uint64_t)row * n;
    b += (uint64_t)column * n;
    load_tile(a_next, a, n);
    load_tile(b_next, b, n);
    store_tile(a_tile[0], a_next);
    store_tile(b_tile[0], b_next);
    __syncthreads();
    for (uint32_t k = 0, now = 0; k < n; k += TILE_DEPTH, now ^= 1) {
        bool more = k + TILE_DEPTH < n;
        if (more) {
            load_tile(a_next, a + k + TILE_DEPTH, n);
            load_tile(b_next, b + k + TILE_DEPTH, n);
        }
        for (int depth = 0; depth < TILE_DEPTH; depth += 16) {
            wmma::fragment<wmma::matrix_a, 16, 16, 16, __half, wmma::row_major> x[2];
            wmma::fragment<wmma::matrix_b, 16, 16, 16, __half, wmma::col_major> y[4];
            for (int i = 0; i < 2; i++) {
                wmma::load_matrix_sync(
                    x[i], &a_tile[now][(warp_row + i * 16) * PITCH + depth], PITCH);
            }
            for (int j = 0; j < 4; j++) {
                wmma::load_matrix_sync(
                    y[j], &b_tile[now][(warp_column + j * 16) * PITCH + depth], PITCH);
            }
            for (int i = 0; i < 2; i++) {
                for (int j = 0; j < 4; j++) {
                    wmma::mma_sync(sum[i][j], x[i], y[j], sum[i][j]);
                }
            }
        }
        if (more) {
            store_tile(a_tile[now ^ 1], a_next);
            store_tile(b_tile[now ^ 1], b_next);
        }
        __syncthreads();
    }
    for (int i = 0; i < 2; i++) {
        for (int j = 0; j < 4; j++) {
            wmma::store_matrix_sync(c + (uint64_t)(row + warp_row + i * 16) * n +
                                        column + warp_column + j * 16,
                                    sum[i][j], n, wmma::mem_row_major);
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
    fanin_sweep(const work_parameters p)
{
    const float4 *a = static_cast<const float4 *>(p.a);
    float4 *c = static_cast<float4 *>(p.c);
    for (uint64_t i = (uint64_t)blockIdx.x * THREADS + threadIdx.x; i < p.count;
         i += (uint64_t)gridDim.x * THREADS) {
        float4 x = a[i];
        float4 y = c[i];
        c[i] = make_float4(x.x + y.x / 2, x.y + y.y / 2, x.z + y.z / 2, x.w + y.w / 2);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
    fanin_halves(const work_parameters p)
{
    __half *out = static_cast<__half *>(p.c);
    for (uint64_t i = (uint64_t)blockIdx.x * THREADS + threadIdx.x; i < p.count;
         i += (uint64_t)gridDim.x * THREADS) {
        uint32_t x = (uint32_t)i * 2654435761u;
        x = (x ^ (x >> 15)) * 2246822519u;
        x ^= x >> 13;
        out[i] = __float2half((float)(x & 0xffff) / 32768.0f - 1.0f);
    }
}
