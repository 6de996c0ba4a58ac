/* SPDX-License-Identifier: Apache-2.0 */
#include "seal.h"

#include <string.h>

#define CHECKED 20 /* bytes of a header that its own checksum covers */

static void header_sum(const uint8_t *header, uint8_t out[4])
{
    uint8_t sum[SEAL_SIZE];
    seal_encode(checksum_of(header, CHECKED), sum);
    memcpy(out, sum, 4);
}

void seal_header(uint8_t header[FRAME_SIZE])
{
    header_sum(header, header + CHECKED);
}

void seal_encode(uint64_t sum, uint8_t out[SEAL_SIZE])
{
    for (int i = 0; i < SEAL_SIZE; i++)
        out[i] = (uint8_t)(sum >> (8 * i));
}

fanin_status seal_decode(const uint8_t header[FRAME_SIZE], bool sealed, frame *out,
                         const char **why_out)
{
    uint8_t sum[4], plain[FRAME_SIZE] = {0};
    if (!sealed)
        return frame_decode(header, out, why_out);
    header_sum(header, sum);
    if (memcmp(sum, header + CHECKED, sizeof sum) != 0) {
        *why_out = SEAL_BROKEN;
        return FANIN_ERR_TRANSPORT;
    }
    memcpy(plain, header, CHECKED);
    return frame_decode(plain, out, why_out);
}

bool seal_fits(uint64_t sum, const uint8_t in[SEAL_SIZE])
{
    uint8_t expected[SEAL_SIZE];
    seal_encode(sum, expected);
    return memcmp(expected, in, SEAL_SIZE) == 0;
}

bool seal_check(const uint8_t *frame, size_t size)
{
    return seal_fits(checksum_of(frame, size), frame + size);
}
