/* SPDX-License-Identifier: Apache-2.0 */
#include "frame.h"

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

fanin_status frame_decode(const uint8_t in[FRAME_SIZE], frame *out,
                          const char **why_out)
{
    if (get_le(in, 4) != FRAME_MAGIC) {
        *why_out = in[0] == TLS_HANDSHAKE ? "TLS is not spoken here"
                                          : "not a frame of this protocol";
        return FANIN_ERR_PROTOCOL;
    }
    if (in[4] != FRAME_MAJOR) {
        *why_out = "the frame has another major version";
        return FANIN_ERR_VERSION;
    }
    if (in[5] != 0) {
        *why_out = "unknown frame flags";
        return FANIN_ERR_PROTOCOL;
    }
    if (get_le(in + 20, 4) != 0) {
        *why_out = "the frame's reserved field is not zero";
        return FANIN_ERR_PROTOCOL;
    }
    out->type = (message_type)get_le(in + 6, 2);
    out->request = get_le(in + 8, 8);
    out->length = (uint32_t)get_le(in + 16, 4);
    return FANIN_OK;
}
