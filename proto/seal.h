/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file
 * Checksums of frames (PROTOCOL.md, "Checksums"). A sealed frame has a checksum of its header in the
 * header's reserved field, and 8 bytes behind its body: the checksum of header and body.
 */
#ifndef SEAL_H
#define SEAL_H

#include "checksum.h"
#include "frame.h"

#define SEAL_SIZE 8 /**< behind the body; not counted in the header's length */

/** What a peer is told of whom a frame does not fit. */
#define SEAL_BROKEN "a checksum does not fit: what came is not what was sent"

/** Bytes behind a body. */
static inline size_t seal_size(bool sealed)
{
    return sealed ? SEAL_SIZE : 0;
}

/** Fills in the reserved field of a header that is otherwise complete. */
void seal_header(uint8_t header[FRAME_SIZE]);
void seal_encode(uint64_t sum, uint8_t out[SEAL_SIZE]);

/** frame_decode() of a header that is @p sealed or not. FANIN_ERR_TRANSPORT: its checksum does not
    fit. */
fanin_status seal_decode(const uint8_t header[FRAME_SIZE], bool sealed, frame *out,
                         const char **why_out);
/** Whether the 8 bytes are those of this sum. */
bool seal_fits(uint64_t sum, const uint8_t in[SEAL_SIZE]);
/** Whether a frame of @p size bytes, with header and without seal, fits the seal behind it. */
bool seal_check(const uint8_t *frame, size_t size);

#endif
