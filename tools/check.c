/* SPDX-License-Identifier: Apache-2.0 */
#include "check.h"
#include "failure.h"
#include "interrupt.h"
#include "pattern.h"

#include <errno.h>
#include <fanin/safetensors.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { PIECE = 1 << 20, STEPS_AROUND = 256, KEY_SIZE = FANIN_MAX_NAME + 128 };

static bool on_pair(void *cookie, const char *key, const char *value)
{
    bool *follows = cookie;
    if (strcmp(key, PATTERN_PAIR_KEY) == 0 && strcmp(value, PATTERN_PAIR_VALUE) == 0) {
        *follows = true;
    }
    return true;
}

fanin_status check_follows_pattern(fanin_client *client, const char *publication,
                                   uint32_t timeout_ms, bool *follows_out,
                                   fanin_error *error)
{
    *follows_out = false;
    return fanin_client_metadata(client, publication, timeout_ms, on_pair, follows_out,
                                 error);
}

/* Which step near @p step the bytes at @p offset are of; false: none. */
static bool find_step(uint64_t seed, uint64_t step, uint64_t offset,
                      const uint8_t *bytes, size_t size, uint64_t *found)
{
    for (uint64_t i = 1; size >= 4 && i <= 2 * STEPS_AROUND; i++) {
        uint64_t distance = (i + 1) / 2;
        uint64_t other = i % 2 != 0 ? step - distance : step + distance;
        if (pattern_compare(bytes, pattern_start(seed, other), offset, size) == size) {
            *found = other;
            return true;
        }
    }
    return false;
}

static fanin_status tell_wrong(const char *key, uint64_t seed, uint64_t step,
                               uint64_t offset, const uint8_t *bytes, size_t size,
                               fanin_error *error)
{
    uint64_t other;
    char origin[64] = "of no step near it";
    if (find_step(seed, step, offset, bytes, size < 16 ? size : 16, &other)) {
        snprintf(origin, sizeof(origin), "of step %llu", (unsigned long long)other);
    }
    failure_set(error, FANIN_ERR_MISMATCH,
                "the ranks hold other bytes than they say, or the pull is broken: keep "
                "the file and report it",
                "byte %llu of %s is not that of step %llu but %s",
                (unsigned long long)offset, key, (unsigned long long)step, origin);
    snprintf(error->key, sizeof(error->key), "%s", key);
    return FANIN_ERR_MISMATCH;
}

/* One piece that is in memory; FANIN_OK: it is the pattern's. */
static fanin_status check_piece(const char *key, uint64_t seed, uint64_t step,
                                uint64_t offset, const uint8_t *bytes, size_t size,
                                fanin_error *error)
{
    size_t wrong = pattern_compare(bytes, pattern_start(seed, step), offset, size);
    if (wrong == size) {
        return FANIN_OK;
    }
    return tell_wrong(key, seed, step, offset + wrong, bytes + wrong, size - wrong,
                      error);
}

fanin_status check_tensor(const char *publication, const char *name, uint64_t step,
                          uint64_t bytes, check_read_fn read_fn, void *cookie,
                          fanin_error *error)
{
    static uint8_t piece[PIECE];
    char key[KEY_SIZE];
    snprintf(key, sizeof(key), "%s:%s", publication, name);
    uint64_t seed = pattern_seed(key);
    for (uint64_t done = 0; done < bytes; done += PIECE) {
        size_t size = bytes - done < PIECE ? (size_t)(bytes - done) : PIECE;
        if (!read_fn(cookie, done, piece, size)) {
            return failure_set(error, FANIN_ERR_IO, "check the disk, pull again",
                               "%s cannot be read back: %s", key,
                               errno != 0 ? strerror(errno) : "the file is too short");
        }
        fanin_status status = check_piece(key, seed, step, done, piece, size, error);
        if (status != FANIN_OK) {
            return status;
        }
    }
    return FANIN_OK;
}

fanin_status check_memory(const char *publication, const char *name, uint64_t step,
                          const uint8_t *memory, uint64_t bytes, fanin_error *error)
{
    char key[KEY_SIZE];
    snprintf(key, sizeof(key), "%s:%s", publication, name);
    return check_piece(key, pattern_seed(key), step, 0, memory, bytes, error);
}

typedef struct file_place {
    int descriptor;
    uint64_t offset;
} file_place;

static bool read_file(void *cookie, uint64_t offset, uint8_t *to, size_t size)
{
    const file_place *place = cookie;
    for (size_t done = 0; done < size;) {
        errno = 0;
        ssize_t n = pread(place->descriptor, to + done, size - done,
                          (off_t)(place->offset + offset + done));
        if (n <= 0 && errno != EINTR) {
            return false;
        }
        done += n > 0 ? (size_t)n : 0;
    }
    return true;
}

fanin_status check_directory(const char *directory, const char *publication,
                             uint64_t step, uint64_t *bytes_out, fanin_error *error)
{
    char path[4096];
    fanin_safetensors *file = NULL;
    *bytes_out = 0;
    snprintf(path, sizeof(path), "%s/adapter_model.safetensors", directory);
    fanin_status status = fanin_safetensors_open(path, &file, error);
    size_t count = status == FANIN_OK ? fanin_safetensors_count(file) : 0;
    for (size_t i = 0; status == FANIN_OK && i < count; i++) {
        fanin_safetensors_entry entry = {.struct_size = sizeof(entry)};
        if (!fanin_safetensors_get(file, i, &entry)) {
            break;
        }
        file_place place = {fanin_safetensors_descriptor(file), entry.offset};
        status = check_tensor(publication, entry.name, step, entry.bytes, read_file,
                              &place, error);
        *bytes_out += entry.bytes;
        if (status == FANIN_OK && interrupt_requested()) {
            status =
                failure_set(error, FANIN_ERR_CANCELLED, "", "interrupted in the check");
        }
    }
    fanin_safetensors_close(&file);
    return status;
}
