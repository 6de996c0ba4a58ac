/* SPDX-License-Identifier: Apache-2.0 */
#include "fetch/check.h"
#include "fetch/failure.h"
#include "fetch/interrupt.h"
#include "fetch/options.h"
#include "fetch/pattern.h"
#include "fetch/tensor_directory.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

enum {
    PIECE = 1 << 20,
    STEPS_AROUND = 256,
    KEY_SIZE = FANIN_MAX_NAME + 128,
    CONVERTED = 4096, /* bytes made at once of converted tensors */
};

/* One tensor's bytes to be. */
typedef struct expected {
    const char *key;
    uint64_t seed, step;
    fanin_dtype
        half; /**< what the pattern's F32 elements became; 0: they are as they were */
} expected;

static bool check_on_pair(void *cookie, const char *key, const char *value)
{
    check_pattern *pattern = cookie;
    if (strcmp(key, PATTERN_PAIR_KEY) == 0 && strcmp(value, PATTERN_PAIR_VALUE) == 0)
        pattern->follows = true;
    if (strcmp(key, PATTERN_DTYPE_KEY) == 0)
        pattern->dtype = fanin_dtype_from_name(value);
    return true;
}

fanin_status check_ask(fanin_client *client, const char *publication,
                       uint32_t timeout_ms, check_pattern *out, fanin_error *error)
{
    *out = (check_pattern){0};
    return fanin_client_metadata(client, publication, timeout_ms, check_on_pair, out,
                                 error);
}

/* Index of the first of @p size bytes at @p offset that is wrong at @p step; @p size: none.
   Converted tensors are looked at in whole elements. */
static size_t check_compare(const expected *e, uint64_t step, uint64_t offset,
                            const uint8_t *bytes, size_t size)
{
    uint64_t start = pattern_start(e->seed, step);
    if (e->half == 0)
        return pattern_compare(bytes, start, offset, size);
    for (size_t done = 0; done < size;) {
        uint8_t whole[2 * CONVERTED];
        uint8_t half[CONVERTED];
        size_t n = size - done < CONVERTED ? size - done : CONVERTED;
        pattern_fill(whole, start, 2 * (offset + done), 2 * n);
        half_convert(e->half, half, whole, n / 2);
        if (memcmp(half, bytes + done, n) != 0) {
            size_t i = 0;
            while (half[i] == bytes[done + i])
                i++;
            return done + i / 2 * 2;
        }
        done += n;
    }
    return size;
}

/* Which step near it the bytes at @p offset are of; false: none. */
static bool find_step(const expected *e, uint64_t offset, const uint8_t *bytes,
                      size_t size, uint64_t *found)
{
    for (uint64_t i = 1; size >= 4 && i <= 2 * STEPS_AROUND; i++) {
        uint64_t distance = (i + 1) / 2;
        uint64_t other = i % 2 != 0 ? e->step - distance : e->step + distance;
        if (check_compare(e, other, offset, bytes, size) == size) {
            *found = other;
            return true;
        }
    }
    return false;
}

static fanin_status tell_wrong(const expected *e, uint64_t offset, const uint8_t *bytes,
                               size_t size, fanin_error *error)
{
    uint64_t other;
    char origin[64] = "of no step near it";
    if (find_step(e, offset, bytes, size < 16 ? size : 16, &other))
        snprintf(origin, sizeof origin, "of step %" PRIu64, other);
    failure_set(error, FANIN_ERR_MISMATCH,
                "the ranks hold other bytes than they say, or the pull is broken: keep "
                "the file and report it",
                "byte %" PRIu64 " of %s is not that of step %" PRIu64 " but %s", offset,
                e->key, e->step, origin);
    snprintf(error->key, sizeof error->key, "%s", e->key);
    return FANIN_ERR_MISMATCH;
}

/* One piece that is in memory; FANIN_OK: it is the pattern's. */
static fanin_status check_piece(const expected *e, uint64_t offset,
                                const uint8_t *bytes, size_t size, fanin_error *error)
{
    size_t wrong = check_compare(e, e->step, offset, bytes, size);
    if (wrong == size)
        return FANIN_OK;
    return tell_wrong(e, offset + wrong, bytes + wrong, size - wrong, error);
}

/* @p key has room for KEY_SIZE. */
static fanin_status expect(const check_pattern *pattern, const char *publication,
                           const char *name, fanin_dtype dtype, uint64_t step,
                           char *key, expected *out, fanin_error *error)
{
    fanin_dtype from = pattern->dtype != 0 ? pattern->dtype : dtype;
    snprintf(key, KEY_SIZE, "%s:%s", publication, name);
    *out = (expected){key, pattern_seed(key), step, from != dtype ? dtype : 0};
    if (from != dtype && !half_converts(from, dtype))
        return failure_set(error, FANIN_ERR_MISMATCH,
                           "report it: nothing asked for this conversion",
                           "%s came as %s, the pattern's elements are %s", key,
                           fanin_dtype_name(dtype), fanin_dtype_name(from));
    return FANIN_OK;
}

/* A box as runs of bytes that follow each other in the tensor and in memory. */
typedef struct box_runs {
    uint64_t bytes; /* of a run */
    uint32_t outer; /* dimensions that are walked */
    int64_t stride[FANIN_MAX_DIMS];
    uint64_t row[FANIN_MAX_DIMS]; /* bytes between neighbours in the tensor */
} box_runs;

static box_runs runs_of(const fanin_tensor *t, const fanin_box *box)
{
    box_runs r = {.bytes = fanin_dtype_bits(t->dtype) / 8, .outer = t->n_dims};
    bool packed = true, joined = true;
    uint64_t in_tensor = r.bytes, in_box = r.bytes;
    for (uint32_t d = 0; d < t->n_dims; d++)
        packed = packed && box->stride[d] == 0;
    for (uint32_t d = t->n_dims; d-- > 0;) {
        r.row[d] = in_tensor;
        r.stride[d] = packed ? (int64_t)in_box : box->stride[d];
        joined = joined && r.row[d] == r.bytes &&
                 (r.stride[d] == (int64_t)r.bytes || box->extent[d] == 1);
        if (joined) {
            r.bytes *= box->extent[d];
            r.outer = d;
        }
        in_tensor *= t->shape[d];
        in_box *= box->extent[d];
    }
    return r;
}

fanin_status check_box(const check_pattern *pattern, const char *publication,
                       const fanin_tensor *t, const fanin_box *box, uint64_t step,
                       const uint8_t *at, fanin_error *error)
{
    char key[KEY_SIZE];
    expected e;
    const box_runs r = runs_of(t, box);
    uint64_t index[FANIN_MAX_DIMS] = {0};
    fanin_status status =
        expect(pattern, publication, t->name, t->dtype, step, key, &e, error);
    for (bool more = true; more && status == FANIN_OK;) {
        uint64_t offset = 0;
        int64_t place = 0;
        for (uint32_t d = 0; d < t->n_dims; d++) {
            offset += (box->offset[d] + index[d]) * r.row[d];
            place += (int64_t)index[d] * r.stride[d];
        }
        status = check_piece(&e, offset, at + place, r.bytes, error);
        more = false;
        for (uint32_t d = r.outer; d-- > 0 && !more;) {
            index[d] = index[d] + 1 < box->extent[d] ? index[d] + 1 : 0;
            more = index[d] != 0;
        }
    }
    return status;
}

bool check_read(int descriptor, uint64_t offset, uint8_t *to, size_t size)
{
    for (size_t done = 0; done < size;) {
        errno = 0;
        ssize_t n = pread(descriptor, to + done, size - done, (off_t)(offset + done));
        if (n <= 0 && errno != EINTR)
            return false;
        done += n > 0 ? (size_t)n : 0;
    }
    return true;
}

/* A whole tensor of the file, read in pieces. */
static fanin_status check_entry(const check_pattern *pattern, const char *publication,
                                const fanin_safetensors_entry *entry, uint64_t step,
                                int descriptor, fanin_error *error)
{
    static uint8_t piece[PIECE];
    char key[KEY_SIZE];
    expected e;
    fanin_status status =
        expect(pattern, publication, entry->name, entry->dtype, step, key, &e, error);
    for (uint64_t done = 0; status == FANIN_OK && done < entry->bytes; done += PIECE) {
        uint64_t left = entry->bytes - done;
        size_t size = left < PIECE ? (size_t)left : PIECE;
        if (!check_read(descriptor, entry->offset + done, piece, size))
            return failure_set(error, FANIN_ERR_IO, "check the disk, pull again",
                               "%s cannot be read back: %s", key,
                               errno != 0 ? strerror(errno) : "the file is too short");
        status = check_piece(&e, done, piece, size, error);
    }
    return status;
}

fanin_status check_directory(const check_pattern *pattern, const char *directory,
                             const char *publication, uint64_t step,
                             uint64_t *bytes_out, fanin_error *error)
{
    tensor_directory d;
    *bytes_out = 0;
    fanin_status status =
        tensor_directory_open(directory, options_is_model(publication), &d, error);
    if (status != FANIN_OK)
        return status;
    for (size_t i = 0; status == FANIN_OK && i < d.count; i++) {
        const tensor_place *place = &d.tensors[i];
        status = check_entry(pattern, publication, &place->entry, step,
                             fanin_safetensors_descriptor(d.files[place->file]), error);
        *bytes_out += place->entry.bytes;
        if (status == FANIN_OK && interrupt_requested())
            status =
                failure_set(error, FANIN_ERR_CANCELLED, "", "interrupted in the check");
    }
    tensor_directory_close(&d);
    return status;
}
