/* SPDX-License-Identifier: Apache-2.0 */
/** @file Proof that bytes are the pattern's. */
#ifndef CHECK_H
#define CHECK_H

#include <fanin/client.h>

/** What a publication's bytes are to be. */
typedef struct check_pattern {
    bool follows;      /**< the publication says that it follows the pattern */
    fanin_dtype dtype; /**< of the pattern's elements; 0: that of each tensor */
} check_pattern;

/** Asks the ranks. Errors are fanin_client_metadata()'s. */
fanin_status check_ask(fanin_client *client, const char *publication,
                       uint32_t timeout_ms, check_pattern *out, fanin_error *error);

/**
 * Compares a part of tensor @p t of @p step, whose first element is at @p at; its strides as a pull
 * takes them. Elements of whole bytes. FANIN_ERR_MISMATCH names key, offset and, where it can be
 * told, the step that the wrong bytes are of; or says that the tensor's dtype cannot be made of the
 * pattern's.
 */
fanin_status check_box(const check_pattern *pattern, const char *publication,
                       const fanin_tensor *t, const fanin_box *box, uint64_t step,
                       const uint8_t *at, fanin_error *error);

/** The same of every tensor that a pull of @p publication wrote into @p directory.
    FANIN_ERR_MISMATCH, FANIN_ERR_IO, FANIN_ERR_CANCELLED (the user interrupted). */
fanin_status check_directory(const check_pattern *pattern, const char *directory,
                             const char *publication, uint64_t step,
                             uint64_t *bytes_out, fanin_error *error);

/** Reads @p size bytes of a file; false: errno says why not, 0: it is too short. */
bool check_read(int descriptor, uint64_t offset, uint8_t *to, size_t size);

#endif
