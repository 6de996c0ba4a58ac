/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file
 * Patches: what differs between two copies of a rank's published bytes (PROTOCOL.md, "Patches").
 *
 * A copy is one region, cut into segments of 65,536 words of two bytes, whatever the dtypes. A
 * patch is a directory, the number of changed words of each segment as a little-endian u32, and
 * the changes: for each segment its places (u16, ascending, in words from the segment's start),
 * then as many new words. A region of an odd length ends with half a word: its other half is 0.
 */
#ifndef PATCH_H
#define PATCH_H

#include "messages.h"

#include <endian.h>
#include <string.h>

#define PATCH_WORDS 65536
#define PATCH_SEGMENT (UINT64_C(2) * PATCH_WORDS) /**< bytes of the region */
#define PATCH_CHANGE 4                            /**< bytes of a changed word */
#define PATCH_BOXES 2   /**< a patch is two boxes: its directory and its changes */
#define PATCHES_MOST 16 /**< that a rank tells of one publication */

/** Segments of a region of @p length bytes. */
static inline uint64_t patch_segments(uint64_t length)
{
    return length / PATCH_SEGMENT + (length % PATCH_SEGMENT > 0);
}

static inline uint64_t patch_directory_bytes(uint64_t length)
{
    return 4 * patch_segments(length);
}

/** The place of change @p index of a segment. */
static inline uint32_t patch_place(const uint8_t *changes, uint64_t index)
{
    uint16_t place;
    memcpy(&place, changes + 2 * index, sizeof place);
    return le16toh(place);
}

/**
 * Reads the directory of a patch for a region of @p length bytes, whose changes have @p bytes:
 * @p first gets, for each segment and the end, how many changes lie before it, patch_segments() + 1
 * numbers. False: more changes than words in a segment, or another sum.
 */
bool patch_directory_read(const uint8_t *directory, uint64_t length, uint64_t bytes,
                          uint64_t *first);
/** Whether the places of a segment ascend and lie inside of it. @p changes: @p count places, then
    words; @p length: of the segment in bytes. */
bool patch_segment_is_sound(const uint8_t *changes, uint64_t count, uint64_t length);

/** The patches that lead to an announced step, as msg_wait_ok tells them. */
typedef struct patch_offers {
    uint64_t generation;      /**< of the announced step's copy */
    uint64_t directory_bytes; /**< of each patch */
    /** box numbers first_box + 2k and + 1 are directory and changes of patch k */
    uint64_t first_box;
    uint32_t count;
    struct patch_offer {
        /** patch 0 leads from there to `generation`, the others to where the one before begins */
        uint64_t from;
        uint64_t bytes; /**< of its changes */
    } patches[PATCHES_MOST];
} patch_offers;

#define PATCH_OFFERS_BYTES (3 * 8 + 2 * 8 * PATCHES_MOST)

/** @p out: PATCH_OFFERS_BYTES; how many of them are used. */
size_t patch_offers_encode(const patch_offers *offers, uint8_t *out);
/** Of bytes that decode_wait_ok() has let pass. False: nothing is told, and *out is empty. */
bool patch_offers_decode(bytes_view bytes, patch_offers *out);

#endif
