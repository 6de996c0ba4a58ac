/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file
 * The client's rules of consistency. A test build can take each one out, to prove that its test
 * notices. Without FANIN_TEST_HOOKS a rule is the constant true.
 */
#ifndef CLIENT_RULES_H
#define CLIENT_RULES_H

enum {
    CLIENT_RULE_END_CHECK = 1 << 0, /**< an end that says "stale" discards the bytes */
    CLIENT_RULE_WORLD = 1 << 1,     /**< all ranks of a pull are of one world */
    CLIENT_RULE_WORLD_AGAIN = 1 << 2, /**< ... compared again after every reconnect */
    CLIENT_RULE_INCARNATION = 1 << 3, /**< nothing of an old incarnation is used */
    CLIENT_RULE_WORLD_ASK = 1 << 4, /**< worlds differ only if their ranks still live */
    CLIENT_RULE_BASE = 1 << 5,      /**< patches go onto the copy that they lead from */
    CLIENT_RULE_APPLY = 1 << 6,     /**< ... once all ranks have said that they count */
    CLIENT_RULE_BASE_DROP = 1 << 7, /**< what is written otherwise is no base */
};

#ifdef FANIN_TEST_HOOKS
#include <stdatomic.h>
extern atomic_uint client_rules_off;
#define CLIENT_RULE(name) (!(atomic_load(&client_rules_off) & (name)))
#else
#define CLIENT_RULE(name) 1
#endif

#endif
