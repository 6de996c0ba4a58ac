/* SPDX-License-Identifier: Apache-2.0 */
/** @file What a pull fills, as an interface of calls. */
#ifndef DESTINATION_H
#define DESTINATION_H

#include "adapter/adapter.h"
#include "catalog/tables.h"
#include "path/path.h"
#include "plan/plan.h"

/** Where the bytes go. All functions run in the pulling thread, but need and landed, which those
    that read call (see need_fn). */
typedef struct destination {
    void *cookie;
    bool directory; /**< not memory: its plan is kept apart */
    key_need wants; /**< mark NULL: all keys are wanted */
    /** Names the layout: equal digests and key tables have equal plans. */
    digest (*layout)(void *cookie);
    /** The key table to be pulled, for a plan that is not cached. Outputs are the
        destination's: targets, or none and to_of_key. */
    fanin_status (*prepare)(void *cookie, const key_table *keys,
                            const plan_target **targets, size_t *n_targets,
                            const uint64_t **to_of_key, fanin_error *error);
    /** The step is known, nothing begun. *base_out is added to every `to`; *skip_out: there
        is nothing to read. @p keys as in prepare (which a cached plan skips). */
    fanin_status (*agreed)(void *cookie, const key_table *keys,
                           const adapter_identity *identity, uint8_t **base_out,
                           bool *skip_out, fanin_error *error);
    /** Before anything is written there; NULL: all of the memory is there. A failure ends the
        pull */
    need_fn need;
    landed_fn landed;              /**< may be NULL */
    digested_fn digested;          /**< may be NULL */
    void (*restart)(void *cookie); /**< may be NULL: the attempt's bytes do not count */
    /** The bytes are good: make them visible. May be NULL. */
    fanin_status (*publish)(void *cookie, const adapter_identity *identity,
                            fanin_error *error);
    /** Ranges of memory that ascend and are disjoint; valid after agreed(). FANIN_ERR_ARGUMENT,
        FANIN_ERR_MEMORY. */
    fanin_status (*ranges)(void *cookie, const memory_range **ranges, size_t *n,
                           fanin_error *error);
    /** Before it is known what there is. NULL: none of it is on devices */
    void (*outline)(void *cookie, path_outline *out);
    bool lasting_ranges; /**< they follow from layout() alone */
    bool quick; /**< agreed() takes no time: leases may be had before it is called */
    fanin_dtype dtype;       /**< what F32 tensors arrive as; 0: as published */
    struct delta_base *base; /**< what the memory holds; NULL: that is not kept */
    /** Makes the memory hold what base says, unless it does; *because: it cannot. NULL: it always
        does. FANIN_ERR_IO, FANIN_ERR_MEMORY, FANIN_ERR_TIMEOUT, FANIN_ERR_CANCELLED. */
    fanin_status (*recall)(void *cookie, const char **because, fanin_error *error);
    void (*patched)(void *cookie); /**< all that was recalled has landed; may be NULL */
    const char *baseless;          /**< why base says nothing, if that is known */
    uint64_t seed;                 /**< of the plan (plan_rules); 0: the client's */
    bool pinned; /**< by agreed(): CUDA's copy engine may write the memory at base */
    uint64_t started_ns; /**< when the caller's call began; 0: now */
    /** set by the pull: reads could not be recalled, never free the memory */
    bool leak;
} destination;

#endif
