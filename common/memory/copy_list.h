/* SPDX-License-Identifier: Apache-2.0 */
/** @file Making copy entries from blocks, and carrying them out on the host. Pure. */
#ifndef COPY_LIST_H
#define COPY_LIST_H

#include "block.h"
#include "copy_entry.h"
#include <stdbool.h>
#include <stddef.h>

/** A growing list. Zeroed: empty. */
typedef struct copy_list {
    copy_entry *entries;
    uint64_t n, capacity;
    bool failed;     /**< out of memory or stopped: what was added since is lost */
    work_stop *stop; /**< NULL: never stops */
} copy_list;

void copy_list_free(copy_list *list);
/** @p length contiguous bytes on both sides. */
void copy_list_add(copy_list *list, uint32_t base, uint64_t from, uint64_t to,
                   uint64_t length);
/** A view, from its first source element to its first destination one; the two innermost
    dimensions make one entry, the others as many as they have elements. */
void copy_list_add_view(copy_list *list, uint32_t base, uint64_t from, uint64_t to,
                        const strided *view);

/** What the kernel does, in the calling thread, for host memory. */
void copy_entries_run(const copy_entry *entries, uint64_t n, const uint64_t *bases,
                      uint64_t from_add, uint64_t to_add);

#endif
