/* SPDX-License-Identifier: Apache-2.0 */
#include "framing.h"
#include "digest.h"
#include "frame.h"

#include <string.h>

/* -------------------------------------------------------------------------- frame */

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

/* ------------------------------------------------------------------------ framing */

/* Bytes of the buffer at first: a longer frame, once it comes, doubles it. */
#define FIRST 4096

void framing_start(framing *f, uint32_t longest)
{
    framing_drop(f);
    buffer_clear(&f->bytes);
    f->longest = longest;
    f->sealed = false;
}

void framing_expect_hello_ok(framing *f, const void *hello, size_t size, bool agreed)
{
    if (!buffer_reserve(&f->bytes, FIRST))
        return;
    buffer_append(&f->bytes, hello, size);
    f->used = f->hello = size;
    f->agreed = agreed;
}

void framing_seal_hello_ok(framing *f, const body *hello, buffer *out, size_t answer)
{
    buffer both = {0};
    uint8_t seal[SEAL_SIZE];
    buffer_append(&both, hello->data - FRAME_SIZE, FRAME_SIZE + hello->size);
    buffer_append(&both, out->data + answer, out->size - answer);
    seal_encode(both.failed ? 0 : checksum_of(both.data, both.size), seal);
    buffer_append(out, seal, sizeof seal);
    out->failed = out->failed || both.failed;
    out->sealed = f->sealed = true;
    buffer_free(&both);
}

void framing_drop(framing *f)
{
    f->bytes.size = f->used = f->hello = 0;
    f->need = FRAME_SIZE;
}

void framing_free(framing *f)
{
    framing_drop(f);
    buffer_free(&f->bytes);
}

uint8_t *framing_room(framing *f, size_t *room_out)
{
    buffer *in = &f->bytes;
    if (f->used > 0 && f->hello == 0) {
        memmove(in->data, in->data + f->used, in->size - f->used);
        in->size -= f->used;
        f->used = 0;
    }
    if (in->size == in->capacity &&
        !buffer_reserve(in, in->capacity > 0 ? in->capacity : FIRST))
        return NULL;
    size_t have = in->size - f->used;
    size_t most = f->exact ? f->need : FRAME_SIZE + (size_t)f->longest + SEAL_SIZE;
    size_t room = in->capacity - in->size;
    if (have + room > most)
        room = most > have ? most - have : 0;
    *room_out = room;
    return in->data + in->size;
}

void framing_add(framing *f, size_t bytes)
{
    f->bytes.size += bytes;
}

static bool has_come(framing *f, size_t bytes)
{
    f->need = bytes;
    return f->bytes.size - f->used >= bytes;
}

static framing_result framing_refuse(framed *out, fanin_status status, const char *why)
{
    out->status = status;
    out->why = why;
    return FRAMING_BAD;
}

framing_result framing_peek(framing *f, framed *out)
{
    const char *why;
    *out = (framed){.status = FANIN_OK};
    if (!has_come(f, FRAME_SIZE))
        return FRAMING_MORE;
    const uint8_t *start = f->bytes.data + f->used;
    fanin_status status = seal_decode(start, f->sealed, &out->head, &why);
    if (status != FANIN_OK)
        return framing_refuse(out, status, why);
    if (out->head.length > f->longest)
        return framing_refuse(out, FANIN_ERR_PROTOCOL, "the request is too long");
    out->body = (body){.data = start + FRAME_SIZE, .size = out->head.length};
    return FRAMING_WHOLE;
}

/* Whether the answer to a hello, which is whole, has a checksum. */
static bool has_seal(const framing *f, const framed *answer)
{
    msg_hello_ok m;
    body b = answer->body;
    if (answer->head.type != MSG_HELLO_OK || f->agreed)
        return answer->head.type == MSG_HELLO_OK;
    return decode_hello_ok(&b, &m) == FANIN_OK && (m.features & FEATURE_SEALS);
}

framing_result framing_take(framing *f, framed *out)
{
    framing_result result = framing_peek(f, out);
    size_t whole = FRAME_SIZE + (size_t)out->head.length;
    if (result != FRAMING_WHOLE)
        return result;
    if (!has_come(f, whole + seal_size(f->sealed)))
        return FRAMING_MORE;
    bool sealed = f->hello > 0 ? has_seal(f, out) : f->sealed;
    if (!has_come(f, whole + seal_size(sealed)))
        return FRAMING_MORE;
    if (sealed && !seal_check(f->bytes.data + f->used - f->hello, f->hello + whole)) {
        out->head = (frame){0};
        return framing_refuse(out, FANIN_ERR_TRANSPORT, SEAL_BROKEN);
    }
    f->sealed = sealed;
    f->hello = 0;
    f->used += whole + seal_size(sealed);
    f->need = FRAME_SIZE;
    return FRAMING_WHOLE;
}

void framing_take_header(framing *f, uint8_t header[FRAME_SIZE])
{
    memcpy(header, f->bytes.data + f->used, FRAME_SIZE);
    f->used += FRAME_SIZE;
    f->need = f->sealed ? SEAL_SIZE : FRAME_SIZE;
}

framing_result framing_take_seal(framing *f, uint8_t seal[SEAL_SIZE])
{
    if (!has_come(f, SEAL_SIZE))
        return FRAMING_MORE;
    memcpy(seal, f->bytes.data + f->used, SEAL_SIZE);
    f->used += SEAL_SIZE;
    f->need = FRAME_SIZE;
    return FRAMING_WHOLE;
}
