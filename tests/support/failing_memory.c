/* SPDX-License-Identifier: Apache-2.0 */
#include "failing_memory.h"

#include <stddef.h>

void *__real_malloc(size_t size);
void *__real_calloc(size_t count, size_t size);
void *__real_realloc(void *old, size_t size);
void *__wrap_malloc(size_t size);
void *__wrap_calloc(size_t count, size_t size);
void *__wrap_realloc(void *old, size_t size);

static _Thread_local long left; /* allocations until one fails */
static _Thread_local bool started, all, failed;

void failing_memory_start(long after, bool all_after)
{
    left = after;
    all = all_after;
    failed = false;
    started = true;
}

bool failing_memory_stop(void)
{
    started = false;
    return failed;
}

static bool fails(void)
{
    if (!started || (failed && !all) || left-- > 0)
        return false;
    left = 0;
    failed = true;
    return true;
}

void *__wrap_malloc(size_t size)
{
    return fails() ? NULL : __real_malloc(size);
}

void *__wrap_calloc(size_t count, size_t size)
{
    return fails() ? NULL : __real_calloc(count, size);
}

void *__wrap_realloc(void *old, size_t size)
{
    return fails() ? NULL : __real_realloc(old, size);
}
