/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file
 * Who a certificate is for: a URI among its subject's alternative names, "fanin://JOB/reader",
 * "fanin://JOB/rank/N", or with a star for N, any rank of the job (PROTOCOL.md, "Secured
 * connections"). JOB: 1 to 64 of A-Z a-z 0-9 . _ -
 */
#ifndef IDENTITY_H
#define IDENTITY_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define JOB_MOST 64
/** The longest, with its NUL. */
#define IDENTITY_URI_MOST (sizeof "fanin:///rank/4294967295" + JOB_MOST)

typedef enum identity_role {
    AS_READER,
    AS_RANK,
    AS_ANY_RANK,
} identity_role;

typedef struct identity {
    char job[JOB_MOST + 1];
    identity_role role;
    uint32_t rank; /**< of AS_RANK */
} identity;

/** False: it is none; *@p out holds nothing then. */
bool identity_parse(const char *text, size_t size, identity *out);
void identity_text(const identity *id, char out[IDENTITY_URI_MOST]);

/** Whether who has @p has may act as @p wanted: the same, or any rank for a rank. AS_ANY_RANK
    wanted: whatever rank it is. */
bool identity_suffices(const identity *has, const identity *wanted);

#endif
