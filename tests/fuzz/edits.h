/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file
 * What lying_link.h does to frames (or TLS records), as bytes. An edit has six bytes, and as many
 * behind them as it says:
 *
 *   0     bit 0: of a frame to the rank or to the reader; the others: of which one in that
 *   direction
 *   1     bits 0-3: what is done (edit_kind), the others: how many bytes follow, or are meant
 *   2, 3  where in the frame's body, little-endian; modulo its size
 *   4, 5  a number
 */
#ifndef EDITS_H
#define EDITS_H

#include "array.h"
#include "frame.h"

enum { TO_RANK, TO_READER };

typedef enum edit_kind {
    EDIT_OVERWRITE, /**< bytes of the body by those that follow */
    EDIT_INSERT,    /**< them into the body */
    EDIT_REMOVE,    /**< so many bytes of the body */
    EDIT_TYPE,      /**< it becomes that of the number */
    EDIT_REQUEST,   /**< the request's number, xor the number */
    EDIT_LENGTH,    /**< that the header tells, xor the number */
    EDIT_TWICE,     /**< the frame comes twice */
    EDIT_CLOSE,     /**< the frame is the last one of the connection */
    /* no lies; what happens before the frame goes on */
    EDIT_ACT,    /**< the trainer acts by the number */
    EDIT_CANCEL, /**< the reader's call is cancelled */
    EDIT_STALL,  /**< nothing goes on for so many milliseconds, at most 63 */
    EDIT_LATER,  /**< a lie: the frame comes behind the next one */
} edit_kind;

typedef struct edits {
    const uint8_t *data;
    size_t size;
} edits;

/** A frame that is being altered. */
typedef struct altered {
    frame head;
    buffer body;
    uint32_t lie; /**< xor the length */
    bool twice, last, later;
} altered;

/** Does all that is meant for frame @p number to @p to; what is no lie by @p happens. */
void edits_apply(edits all, int to, unsigned number, altered *a,
                 void (*happens)(void *cookie, edit_kind kind, uint16_t number),
                 void *cookie);
/** Whether one of them is a lie. */
bool edits_lie(edits all);

#endif
