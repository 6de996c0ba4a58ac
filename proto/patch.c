/* SPDX-License-Identifier: Apache-2.0 */
#include "patch.h"

static void put_number(uint8_t *out, uint64_t value)
{
    value = htole64(value);
    memcpy(out, &value, sizeof value);
}

static uint64_t get_number(const uint8_t *in)
{
    uint64_t value;
    memcpy(&value, in, sizeof value);
    return le64toh(value);
}

/* Of a segment of so many bytes. */
static uint64_t words_of(uint64_t length)
{
    return (length + 1) / 2;
}

bool patch_directory_read(const uint8_t *directory, uint64_t length, uint64_t bytes,
                          uint64_t *first)
{
    uint64_t n = patch_segments(length), sum = 0;
    for (uint64_t i = 0; i < n; i++) {
        uint64_t left = length - i * PATCH_SEGMENT;
        uint32_t count;
        memcpy(&count, directory + 4 * i, sizeof count);
        count = le32toh(count);
        if (count > words_of(left < PATCH_SEGMENT ? left : PATCH_SEGMENT))
            return false;
        first[i] = sum;
        sum += count;
    }
    first[n] = sum;
    return bytes % PATCH_CHANGE == 0 && sum == bytes / PATCH_CHANGE;
}

bool patch_segment_is_sound(const uint8_t *changes, uint64_t count, uint64_t length)
{
    int64_t before = -1;
    bool sound = true;
    for (uint64_t i = 0; i < count; i++) {
        int64_t place = patch_place(changes, i);
        sound = sound && place > before;
        before = place;
    }
    return sound && before < (int64_t)words_of(length);
}

/* ---------------------------------------------------------------------- offers */

#define OFFERS_HEAD 24
#define OFFER 16

size_t patch_offers_encode(const patch_offers *offers, uint8_t *out)
{
    put_number(out, offers->generation);
    put_number(out + 8, offers->directory_bytes);
    put_number(out + 16, offers->first_box);
    size_t size = OFFERS_HEAD;
    for (uint32_t i = 0; i < offers->count; i++, size += OFFER) {
        put_number(out + size, offers->patches[i].from);
        put_number(out + size + 8, offers->patches[i].bytes);
    }
    return size;
}

bool patch_offers_decode(bytes_view bytes, patch_offers *out)
{
    memset(out, 0, sizeof *out);
    if (bytes.size < OFFERS_HEAD)
        return false;
    out->generation = get_number(bytes.data);
    out->directory_bytes = get_number(bytes.data + 8);
    out->first_box = get_number(bytes.data + 16);
    out->count = (uint32_t)((bytes.size - OFFERS_HEAD) / OFFER);
    for (uint32_t i = 0; i < out->count; i++) {
        const uint8_t *at = bytes.data + OFFERS_HEAD + OFFER * (size_t)i;
        out->patches[i] = (struct patch_offer){get_number(at), get_number(at + 8)};
    }
    return true;
}
