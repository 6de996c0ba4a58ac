/* SPDX-License-Identifier: Apache-2.0 */
/** @file One side of a comparison: a directory's tensors, or a step of what ranks publish, pulled
    to memory. */
#ifndef DIFF_SIDE_H
#define DIFF_SIDE_H

#include "fetch/session.h"
#include "fetch/tensor_directory.h"

/** Zero is an empty one. */
typedef struct diff_side {
    const char *what;       /**< the word on the command line */
    tensor_directory files; /**< of a directory */
    uint8_t *memory;        /**< of what was pulled; NULL: it is a directory */
    size_t mapped;
    char publication[OPTIONS_PUBLICATION]; /**< "": a directory */
    uint64_t step;                         /**< of what was pulled */
    whole_tensor *tensors;                 /**< ascending by name, as files have it */
    size_t count, capacity;
    uint64_t bytes;
} diff_side;

/** Which tensors, and how they are pulled. */
typedef struct diff_request {
    const char *pattern; /**< of names; NULL: all */
    fanin_step_rule rule;
    uint64_t step;
    uint64_t max_bytes; /**< 0: what the host has left */
    bool quiet, no_color;
} diff_request;

/** Whether @p path is a directory that holds tensors, or at least no nixl_info.json. */
bool diff_side_is_directory(const char *path);

/** Opens a directory of a model or of an adapter. Errors are tensor_directory_open()'s. */
fanin_status diff_side_open(diff_side *side, const char *path,
                            const diff_request *request, fanin_error *error);

/** Pulls what the session's ranks publish. Errors are those of fanin_client_catalog() and
    fanin_client_pull(); FANIN_ERR_LIMIT: more than the request allows. */
fanin_status diff_side_pull(diff_side *side, session *s, const diff_request *request,
                            fanin_error *error);

/** Bytes [@p at, @p at + @p size) of a tensor: where they are, or read into @p room. NULL after
    filling
    @p error: FANIN_ERR_IO. */
const uint8_t *diff_side_bytes(const diff_side *side, const whole_tensor *t,
                               uint64_t at, size_t size, uint8_t *room,
                               fanin_error *error);

void diff_side_close(diff_side *side);

#endif
