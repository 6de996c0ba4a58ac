/* SPDX-License-Identifier: Apache-2.0 */
/** @file Filling a fanin_error. */
#ifndef ERROR_SET_H
#define ERROR_SET_H

#include <fanin/error.h>

/** What a message is about; fields left 0/NULL are unknown. Without a remedy it is the usual one of
    the status. */
typedef struct error_place {
    const char *phase; /**< "connect", "catalog", "plan", "wait", "begin", ... */
    const char *address;
    const char *key;
    const char *remedy;
    int32_t rank_plus_1; /**< 0: no rank */
    int32_t sys_errno;
    int32_t ucx_status;
} error_place;

/**
 * Fills @p error (may be NULL; respects its struct_size; strings are cut, never overrun)
 * and returns @p status, so that a caller can write `return error_set(...)`.
 * @p place may be NULL.
 */
fanin_status error_set(fanin_error *error, fanin_status status,
                       const error_place *place, const char *format, ...)
    __attribute__((format(printf, 4, 5)));

/** What is to be done first where a descriptor (EMFILE, ENFILE) or memory (ENOMEM, ENOBUFS) is
    lacking; else
    @p otherwise. */
const char *error_remedy(int sys_errno, const char *otherwise);

/** error_set() for a failed system call: appends ": <strerror>" and sets sys_errno; without a
    remedy it is error_remedy()'s, if that has one. */
fanin_status error_set_errno(fanin_error *error, fanin_status status, int sys_errno,
                             const error_place *place, const char *format, ...)
    __attribute__((format(printf, 5, 6)));

/** FANIN_ERR_MEMORY with the usual sentence. */
fanin_status error_set_memory(fanin_error *error);

/** Copies @p from to @p to (either may be NULL), minding to->struct_size. Returns from's status, so
    that a caller can write `return error_copy(...)`; FANIN_OK if it is NULL. */
fanin_status error_copy(fanin_error *to, const fanin_error *from);

#endif
