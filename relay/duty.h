/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file
 * Which reader takes which unit from the trainer. Each reader finds it out by itself, from the one
 * list of readers that want the same: by hashes of their ids. No reader has more than one unit more
 * than another. Pure.
 */
#ifndef DUTY_H
#define DUTY_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/** A reader: the incarnation of the server by which it hands on. */
typedef struct member {
    uint8_t id[16];
} member;

/** How far away another reader is. Where no racks are said, all are as far as the site. */
typedef enum nearness { NEAR_HOST, NEAR_RACK, NEAR_SITE } nearness;

/** @p owner[unit]: a number of @p members, whose ids ascend and differ. @p load has room for
    @p n_members numbers; afterwards how many units each has. */
void duty_deal(const member *members, size_t n_members, uint32_t *owner, size_t n_units,
               uint32_t *load);

/** How many of the members other than @p but stand before @p self when somebody else than its owner
    has to take the unit. */
size_t duty_rank(const member *members, size_t n_members, size_t self, size_t but,
                 size_t unit);

/** Ascending order of ids, as for qsort(). */
int member_compare(const void *a, const void *b);

#endif
