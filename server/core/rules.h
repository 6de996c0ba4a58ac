/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file
 * The rules of consistency, each of which a test build can take out to prove that its test
 * notices. Without FANIN_TEST_HOOKS a rule is the constant true.
 */
#ifndef RULES_H
#define RULES_H

enum {
    RULE_DRAIN = 1 << 0,          /**< begin_update waits for leases */
    RULE_DRAIN_DEADLINE = 1 << 1, /**< ... at most the lease time from its call */
    RULE_REFUSAL = 1 << 2,        /**< no lease while draining */
    RULE_END_CHECK = 1 << 3,      /**< end confirms the epoch */
    RULE_STEP = 1 << 4,           /**< begin is conditional on the step */
    RULE_CATALOG = 1 << 5,        /**< ... and on the catalog version */
    RULE_SEND_CHECK = 1 << 6,     /**< no send under an epoch that has gone */
    RULE_SEND_WAIT = 1 << 7,      /**< begin_update waits for a running send */
    RULE_LATE_EFFECT = 1 << 8,    /**< a commit takes effect only on its own update */
    /* Snapshots: */
    RULE_ARENA_RAISE = 1 << 9,   /**< the generation is raised before the first byte */
    RULE_ARENA_CHOICE = 1 << 10, /**< the published arena is never filled */
    RULE_ARENA_BEGIN = 1 << 11,  /**< no lease on an arena that is being filled */
    RULE_ARENA_WAIT =
        1 << 12, /**< a commit waits for leases of the arena that it fills */
    RULE_ARENA_DEADLINE = 1 << 13, /**< ... at most the lease time from its call */
    /* Patches: */
    RULE_PATCH_BASE = 1 << 14,     /**< made from the published arena */
    RULE_PATCH_ANNOUNCE = 1 << 15, /**< seen together with the step, not before */
};

#ifdef FANIN_TEST_HOOKS
#include <stdatomic.h>
extern atomic_uint server_rules_off;
/** Called by a data thread when it is about to read the tensors' memory; NULL: nothing. */
extern void (*_Atomic server_on_send)(void);
/** Called by a committing thread when it is about to fill an arena; NULL: nothing. */
extern void (*_Atomic server_on_fill)(void);
#define RULE(name) (!(atomic_load(&server_rules_off) & (name)))
static inline void run_hook(void (*_Atomic *hook)(void))
{
    void (*fn)(void) = atomic_load(hook);
    if (fn)
        fn();
}
#define ON_SEND() run_hook(&server_on_send)
#define ON_FILL() run_hook(&server_on_fill)
#else
#define RULE(name) 1
#define ON_SEND() (void)0
#define ON_FILL() (void)0
#endif

#endif
