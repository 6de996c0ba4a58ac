/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file
 * Status codes and the optional description of a failure.
 *
 * The hundred of a code says what the caller has to replace before trying again. Treat a code that
 * this version does not know as the first code of its hundred.
 */
#ifndef FANIN_ERROR_H
#define FANIN_ERROR_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#if defined(__GNUC__)
#define FANIN_API __attribute__((visibility("default")))
#define FANIN_MUST_CHECK __attribute__((warn_unused_result))
#else
#define FANIN_API
#define FANIN_MUST_CHECK
#endif

#ifdef __cplusplus
extern "C" {
#endif

/** 0 or one of the negative codes below. An integer of fixed size, for foreign callers. */
typedef int32_t fanin_status;

enum {
    FANIN_OK = 0,

    /* The call is wrong: fix the arguments. */
    FANIN_ERR_ARGUMENT = -100,  /**< an argument is invalid */
    FANIN_ERR_EXISTS = -101,    /**< what should be made is there already */
    FANIN_ERR_NOT_FOUND = -102, /**< no such run, key, publication or directory */
    FANIN_ERR_STATE = -103,     /**< not in a state in which the call makes sense */

    /* This pull failed: pull again. */
    FANIN_ERR_STALE = -200,      /**< the weights were rewritten while they were read */
    FANIN_ERR_TIMEOUT = -201,    /**< the caller's deadline passed */
    FANIN_ERR_CANCELLED = -202,  /**< fanin_client_cancel() was called */
    FANIN_ERR_SUPERSEDED = -203, /**< the exact step asked for has passed */
    FANIN_ERR_PAUSED = -204,     /**< the trainer's memory is away for now */

    /* The connection is unusable: connect again. */
    FANIN_ERR_UNREACHABLE = -300, /**< nobody answers at the address */
    FANIN_ERR_CLOSED = -301,      /**< the peer or this side closed the connection */
    FANIN_ERR_LIMIT = -302,       /**< a cap of the peer or of this host was reached */
    FANIN_ERR_AUTH = -303,        /**< the peer does not admit this client */

    /* The peers are wrong: fix the trainer. */
    FANIN_ERR_PROTOCOL = -400,    /**< bytes that the protocol does not allow */
    FANIN_ERR_VERSION = -401,     /**< no protocol version in common */
    FANIN_ERR_WORLD = -402,       /**< ranks of different worlds, or a rank twice */
    FANIN_ERR_INCOMPLETE = -403,  /**< the shards do not tile every tensor exactly */
    FANIN_ERR_UNSUPPORTED = -404, /**< the peer lacks a feature that is needed */
    FANIN_ERR_MISMATCH = -405,    /**< peers contradict each other or the caller */

    /* This host is wrong: fix it. */
    FANIN_ERR_IO = -500,        /**< a file or directory operation failed */
    FANIN_ERR_MEMORY = -501,    /**< out of memory */
    FANIN_ERR_TRANSPORT = -502, /**< the data path failed locally */

    /* This process is wrong: restart it. */
    FANIN_ERR_FORKED = -600,   /**< the handle belongs to the parent process */
    FANIN_ERR_INTERNAL = -601, /**< a bug in this library */
};

/**
 * Why a call failed. The caller owns it and sets struct_size to sizeof(fanin_error). Every call
 * takes NULL instead. A call writes it only on failure. It needs no clean-up and is safe to copy.
 */
typedef struct fanin_error {
    size_t struct_size;
    fanin_status status;
    int32_t rank;       /**< the trainer rank at fault, -1: none */
    int32_t sys_errno;  /**< errno of the failed system call, 0: none */
    int32_t ucx_status; /**< ucs_status_t of the failed UCX call, 0: none */
    char phase[16];   /**< connect, catalog, plan, wait, begin, read, end, write, ... */
    char address[64]; /**< of the peer, "" if none */
    char key[640];    /**< the tensor's key, "" if none */
    char message[512]; /**< what happened and why, in one sentence */
    char remedy[256];  /**< what to do about it; never "" after a failure */
} fanin_error;

/** Initializer for a fanin_error on the stack. */
#define FANIN_ERROR_INIT                                                               \
    {                                                                                  \
        sizeof(fanin_error), FANIN_OK, -1, 0, 0, "", "", "", "", ""                    \
    }

/** The code's name ("FANIN_ERR_STALE"), or "FANIN_ERR_UNKNOWN". Thread: any. Never NULL. */
FANIN_API const char *fanin_status_name(fanin_status status);

/** The code's meaning in a few words. Thread: any. Never NULL. */
FANIN_API const char *fanin_status_text(fanin_status status);

/** Whether the same pull may succeed without anybody changing anything. Thread: any. */
FANIN_API bool fanin_status_is_retryable(fanin_status status);

#ifdef __cplusplus
}
#endif
#endif
