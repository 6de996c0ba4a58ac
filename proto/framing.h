/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file
 * Frames out of the bytes that come on a connection (PROTOCOL.md, "Frames"), their limits and
 * checksums. No I/O: who has the socket asks for room, receives into it, says how much came, and
 * takes frames until bytes are missing.
 */
#ifndef FRAMING_H
#define FRAMING_H

#include "messages.h"

typedef struct framing {
    buffer bytes;
    size_t used;      /**< of it, by frames that were taken */
    size_t need;      /**< bytes of what comes next, as far as that is known */
    size_t hello;     /**< bytes of the hello, in front of its answer; 0: none is due */
    uint32_t longest; /**< body that is taken */
    /** room is for `need` bytes only: the body behind a header may belong elsewhere */
    bool exact;
    bool sealed; /**< frames have checksums */
    bool agreed; /**< ... from the answer to the hello on, whatever it says */
} framing;

typedef enum framing_result {
    FRAMING_MORE, /**< bytes are missing */
    FRAMING_WHOLE,
    FRAMING_BAD, /**< nothing is to be taken any more; why is in the other's words */
} framing_result;

typedef struct framed {
    /** of a bad one: zero unless the header is fine and announces too long a body */
    frame head;
    body body; /**< until there is room again */
    /** of a bad one: FANIN_ERR_PROTOCOL, FANIN_ERR_VERSION, or FANIN_ERR_TRANSPORT: a checksum does
        not fit */
    fanin_status status;
    const char *why; /**< a static sentence for who sent it */
} framed;

/** Forgets what came and keeps the memory: a connection begins, without checksums. */
void framing_start(framing *f, uint32_t longest);
/** What comes next answers this hello, which asks for checksums. hello_ok says whether there are
    any; @p agreed: it must. Its own covers the hello as well. Directly after framing_start(); no
    memory: there is no room later. */
void framing_expect_hello_ok(framing *f, const void *hello, size_t size, bool agreed);
/** For who answers: adds the checksum of a hello_ok, which begins at @p answer in @p out, to a
    hello that was taken. Frames have checksums from now on, also those that proto appends to @p
    out. */
void framing_seal_hello_ok(framing *f, const body *hello, buffer *out, size_t answer);
/** Whether bytes have come that were not taken: of a frame that has begun, after FRAMING_MORE. */
static inline bool framing_has_begun(const framing *f)
{
    return f->bytes.size > f->used;
}
/** Drops what has come and was not taken. */
void framing_drop(framing *f);
void framing_free(framing *f);

/** Where the next bytes go, at most *room_out; never more than one longest frame waits. NULL: no
    memory. */
uint8_t *framing_room(framing *f, size_t *room_out);
/** So many came there. */
void framing_add(framing *f, size_t bytes);

/** The next frame, and takes it. */
framing_result framing_take(framing *f, framed *out);
/** The next frame once its header has come; its body may be missing. Takes nothing. */
framing_result framing_peek(framing *f, framed *out);
/** Takes only the header of the frame that framing_peek() found: its body comes elsewhere. */
void framing_take_header(framing *f, uint8_t header[FRAME_SIZE]);
/** Takes what stands behind such a body if frames have checksums. Does not check it. */
framing_result framing_take_seal(framing *f, uint8_t seal[SEAL_SIZE]);

#endif
