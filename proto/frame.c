/* SPDX-License-Identifier: Apache-2.0 */
#include "frame.h"
#include "checksum.h"

#include <string.h>

#define TLS_HANDSHAKE 0x16 /* a ClientHello's first byte; kept free for later */

static void put_le(uint8_t *out, uint64_t value, int bytes)
{
    for (int i = 0; i < bytes; i++)
        out[i] = (uint8_t)(value >> (8 * i));
}

static uint64_t get_le(const uint8_t *in, int bytes)
{
    uint64_t value = 0;
    for (int i = 0; i < bytes; i++)
        value |= (uint64_t)in[i] << (8 * i);
    return value;
}

void frame_encode(const frame *f, uint8_t out[FRAME_SIZE])
{
    put_le(out, FRAME_MAGIC, 4);
    out[4] = FRAME_MAJOR;
    out[5] = 0;
    put_le(out + 6, (uint64_t)f->type, 2);
    put_le(out + 8, f->request, 8);
    put_le(out + 16, f->length, 4);
    put_le(out + 20, 0, 4);
}

static fanin_status frame_refuse(const char **why_out, fanin_status status,
                                 const char *why)
{
    *why_out = why;
    return status;
}

fanin_status frame_decode(const uint8_t in[FRAME_SIZE], frame *out,
                          const char **why_out)
{
    if (get_le(in, 4) != FRAME_MAGIC)
        return frame_refuse(why_out, FANIN_ERR_PROTOCOL,
                            in[0] == TLS_HANDSHAKE ? "TLS is not spoken here"
                                                   : "not a frame of this protocol");
    if (in[4] != FRAME_MAJOR)
        return frame_refuse(why_out, FANIN_ERR_VERSION,
                            "the frame has another major version");
    if (in[5] != 0)
        return frame_refuse(why_out, FANIN_ERR_PROTOCOL, "unknown frame flags");
    if (get_le(in + 20, 4) != 0)
        return frame_refuse(why_out, FANIN_ERR_PROTOCOL,
                            "the frame's reserved field is not zero");
    out->type = (message_type)get_le(in + 6, 2);
    out->request = get_le(in + 8, 8);
    out->length = (uint32_t)get_le(in + 16, 4);
    return FANIN_OK;
}

void seal_header(uint8_t header[FRAME_SIZE])
{
    put_le(header + FRAME_CHECKED, checksum_of(header, FRAME_CHECKED), 4);
}

void seal_encode(uint64_t sum, uint8_t out[SEAL_SIZE])
{
    put_le(out, sum, SEAL_SIZE);
}

fanin_status seal_decode(const uint8_t header[FRAME_SIZE], bool sealed, frame *out,
                         const char **why_out)
{
    uint8_t plain[FRAME_SIZE] = {0};
    if (!sealed)
        return frame_decode(header, out, why_out);
    if (get_le(header + FRAME_CHECKED, 4) !=
        (uint32_t)checksum_of(header, FRAME_CHECKED))
        return frame_refuse(why_out, FANIN_ERR_TRANSPORT, SEAL_BROKEN);
    memcpy(plain, header, FRAME_CHECKED);
    return frame_decode(plain, out, why_out);
}

bool seal_fits(uint64_t sum, const uint8_t in[SEAL_SIZE])
{
    return get_le(in, SEAL_SIZE) == sum;
}

bool seal_check(const uint8_t *frame, size_t size)
{
    return seal_fits(checksum_of(frame, size), frame + size);
}
