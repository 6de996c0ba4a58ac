/* SPDX-License-Identifier: Apache-2.0 */
/* Frames of a hostile peer: those that come in pieces are those that come at once. First byte: bit
   0: sealed, bit 1: no bytes behind a frame are received with it; the others: size of the pieces.
   */
#include "digest.h"
#include "framing.h"
#include "fuzz.h"
#include <string.h>

/* The sum of what came of it, and how many frames. */
typedef struct outcome {
    uint64_t sum;
    size_t frames;
    fanin_status status;
} outcome;

static void note(outcome *o, const framed *got)
{
    o->frames++;
    uint64_t head[] = {(uint64_t)got->head.type, got->head.request, got->head.length};
    o->sum = 31 * (o->sum + checksum_of(head, sizeof head)) +
             checksum_of(got->body.data, got->body.size);
}

static outcome receive(uint8_t mode, size_t step, const uint8_t *data, size_t size)
{
    outcome o = {0};
    framing f = {0};
    framed got;
    framing_result result = FRAMING_MORE;
    framing_start(&f, LIMIT_REQUEST);
    f.sealed = mode & 1;
    f.exact = mode & 2;
    while (size > 0 && result != FRAMING_BAD) {
        size_t room;
        uint8_t *to = framing_room(&f, &room);
        check(to != NULL && room > 0);
        size_t n = room < step ? room : step;
        n = n < size ? n : size;
        memcpy(to, data, n);
        framing_add(&f, n);
        data += n;
        size -= n;
        while ((result = framing_take(&f, &got)) == FRAMING_WHOLE)
            note(&o, &got);
        o.status = got.status;
        check((result == FRAMING_BAD) == (got.why != NULL));
    }
    framing_free(&f);
    return o;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    if (size == 0)
        return 0;
    outcome a = receive(data[0], SIZE_MAX, data + 1, size - 1);
    outcome b = receive(data[0] ^ 2, 1u + (data[0] >> 2), data + 1, size - 1);
    check(a.sum == b.sum && a.frames == b.frames && a.status == b.status);
    return 0;
}
