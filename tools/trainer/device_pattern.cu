/* SPDX-License-Identifier: Apache-2.0 */
#include "device_pattern.h"

extern "C" __global__ void __launch_bounds__(DEVICE_PATTERN_THREADS)
    fanin_pattern(const pattern_parameters parameters)
{
    for (uint64_t i = blockIdx.x; i < parameters.count; i += gridDim.x) {
        const pattern_piece p = parameters.pieces[i];
        for (uint64_t at = p.begin + 8 * threadIdx.x; at < p.begin + p.bytes;
             at += 8 * DEVICE_PATTERN_THREADS) {
            device_pattern_write(&p, parameters.add, at);
        }
    }
}
