/* SPDX-License-Identifier: Apache-2.0 */
#include "digest.h"
#include "convert.h"

#include <endian.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <xxhash.h>
#ifdef FANIN_XXHASH_DISPATCH
#include <xxh_x86dispatch.h> /* the widest instructions that the CPU has */
#endif

/* ----------------------------------------------------------------------- checksum */

uint64_t checksum_of(const void *data, size_t size)
{
    return XXH3_64bits(data, size);
}

checksum *checksum_create(void)
{
    XXH3_state_t *state = XXH3_createState();
    if (state)
        XXH3_64bits_reset(state);
    return (checksum *)state;
}

void checksum_free(checksum *c)
{
    XXH3_freeState((XXH3_state_t *)c);
}

void checksum_reset(checksum *c)
{
    XXH3_64bits_reset((XXH3_state_t *)c);
}

void checksum_add(checksum *c, const void *data, size_t size)
{
    (void)XXH3_64bits_update((XXH3_state_t *)c, data, size);
}

uint64_t checksum_get(const checksum *c)
{
    return XXH3_64bits_digest((const XXH3_state_t *)c);
}

/* ------------------------------------------------------------------------- digest */

static digest canonical(XXH128_hash_t hash)
{
    XXH128_canonical_t canonical;
    XXH128_canonicalFromHash(&canonical, hash);
    digest d;
    memcpy(d.bytes, canonical.digest, sizeof d.bytes);
    return d;
}

digest digest_of(const void *data, size_t size)
{
    return canonical(XXH3_128bits(data, size));
}

digest digest_of_words(uint64_t low, uint64_t high)
{
    return canonical((XXH128_hash_t){.low64 = low, .high64 = high});
}

bool digest_equal(const digest *a, const digest *b)
{
    return memcmp(a->bytes, b->bytes, sizeof a->bytes) == 0;
}

void digest_hex(const uint8_t bytes[16], char out[33])
{
    static const char digits[] = "0123456789abcdef";
    for (int i = 0; i < 16; i++) {
        out[2 * i] = digits[bytes[i] >> 4];
        out[2 * i + 1] = digits[bytes[i] & 15];
    }
    out[32] = '\0';
}

static int hex_digit(char c)
{
    if (c >= '0' && c <= '9')
        return c - '0';
    c = (char)(c | 0x20);
    return c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
}

bool hex_read(const char *text, uint8_t *out, size_t size)
{
    for (size_t i = 0; i < size; i++) {
        int high = hex_digit(text[2 * i]);
        int low = high < 0 ? -1 : hex_digit(text[2 * i + 1]);
        if (low < 0)
            return false;
        out[i] = (uint8_t)(high << 4 | low);
    }
    return true;
}

bool random_bytes(void *out, size_t size)
{
    uint8_t *at = out;
    while (size) {
        ssize_t got = getrandom(at, size, 0);
        if (got < 0 && errno == EINTR)
            continue;
        if (got <= 0)
            return false;
        at += got;
        size -= (size_t)got;
    }
    return true;
}

/* --------------------------------------------------------------------- box digest */

struct box_digest {
    XXH3_state_t *pieces;
    uint64_t length;
    size_t filled; /* of piece */
    uint8_t piece[BOX_DIGEST_PIECE];
    size_t begun; /* bytes of an element that came in parts */
    uint8_t element[4];
};

box_digest *box_digest_create(void)
{
    box_digest *d = calloc(1, sizeof *d);
    if (!d)
        return NULL;
    d->pieces = XXH3_createState();
    if (!d->pieces) {
        free(d);
        return NULL;
    }
    XXH3_128bits_reset(d->pieces);
    return d;
}

void box_digest_free(box_digest *d)
{
    if (d)
        XXH3_freeState(d->pieces);
    free(d);
}

static void add_number(box_digest *d, uint64_t number)
{
    number = htole64(number);
    (void)XXH3_128bits_update(d->pieces, &number, sizeof number);
}

static void add_plain(box_digest *d, const uint8_t *data, size_t size)
{
    d->length += size;
    while (size > 0) {
        size_t step = sizeof d->piece - d->filled;
        if (d->filled == 0 && size >= step) {
            add_number(d, XXH3_64bits(data, step));
        } else {
            step = size < step ? size : step;
            memcpy(d->piece + d->filled, data, step);
            d->filled += step;
        }
        if (d->filled == sizeof d->piece) {
            add_number(d, XXH3_64bits(d->piece, sizeof d->piece));
            d->filled = 0;
        }
        data += step;
        size -= step;
    }
}

static void add_element(box_digest *d, const uint8_t *from, uint32_t convert)
{
    uint32_t bits;
    memcpy(&bits, from, sizeof bits);
    uint16_t half =
        convert == CONVERT_F32_BF16 ? convert_to_bf16(bits) : convert_to_f16(bits);
    add_plain(d, (const uint8_t *)&half, sizeof half);
}

void box_digest_add(box_digest *d, const void *data, size_t size, uint32_t convert)
{
    const uint8_t *from = data;
    if (convert == CONVERT_NONE) {
        add_plain(d, from, size);
        return;
    }
    for (; d->begun > 0 && size > 0; from++, size--) {
        d->element[d->begun++] = *from;
        if (d->begun < sizeof d->element)
            continue;
        add_element(d, d->element, convert);
        d->begun = 0;
    }
    for (; size >= sizeof d->element;
         from += sizeof d->element, size -= sizeof d->element)
        add_element(d, from, convert);
    if (size > 0)
        memcpy(d->element, from, size);
    d->begun += size;
}

void box_digest_add_pieces(box_digest *d, const uint64_t *pieces, uint64_t length)
{
    enum { MOST = 512 }; /* one by one takes longer than a GPU needs to make them */
    uint64_t left = box_digest_pieces(length), numbers[MOST];
    d->length += length;
    while (left > 0) {
        size_t n = left < MOST ? (size_t)left : MOST;
        for (size_t i = 0; i < n; i++)
            numbers[i] = htole64(pieces[i]);
        (void)XXH3_128bits_update(d->pieces, numbers, n * sizeof *numbers);
        pieces += n;
        left -= n;
    }
}

digest box_digest_take(box_digest *d)
{
    if (d->filled > 0) {
        memset(d->piece + d->filled, 0, sizeof d->piece - d->filled);
        add_number(d, XXH3_64bits(d->piece, sizeof d->piece));
    }
    add_number(d, d->length);
    XXH128_canonical_t canonical;
    digest out;
    XXH128_canonicalFromHash(&canonical, XXH3_128bits_digest(d->pieces));
    memcpy(out.bytes, canonical.digest, sizeof out.bytes);
    XXH3_128bits_reset(d->pieces);
    d->length = 0;
    d->filled = d->begun = 0;
    return out;
}
