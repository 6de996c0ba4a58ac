/* SPDX-License-Identifier: Apache-2.0 */
#include "shards/patch_room.h"
#include "error_set.h"

#include <pthread.h>
#include <stdlib.h>

#define ALIGNMENT UINT64_C(64)

/* A stretch that is taken. */
typedef struct taken {
    uint64_t at, length;
    struct taken *next; /* behind it */
} taken;

struct patch_room {
    gpu *g;
    pthread_mutex_t lock; /* held for the members below */
    unsigned users;       /* and one for each block */
    uint64_t bytes;
    uint8_t *memory; /* `made` is behind it */
    taken *first;
};

patch_room *patch_room_make(gpu *g, uint64_t bytes, fanin_error *error)
{
    void *memory = NULL;
    patch_room *r = calloc(1, sizeof *r);
    bytes = (bytes + ALIGNMENT - 1) & ~(ALIGNMENT - 1);
    if ((r ? gpu_host_alloc(g, bytes + sizeof(uint64_t), &memory, error)
           : error_set_memory(error)) != FANIN_OK) {
        free(r);
        return NULL;
    }
    pthread_mutex_init(&r->lock, NULL);
    r->g = g;
    r->users = 1;
    r->bytes = bytes;
    r->memory = memory;
    return r;
}

/* Lock held, given up. */
static void unlock_and_leave_room(patch_room *r)
{
    bool last = --r->users == 0;
    pthread_mutex_unlock(&r->lock);
    if (!last)
        return;
    gpu_host_free(r->g, r->memory);
    pthread_mutex_destroy(&r->lock);
    free(r);
}

void patch_room_leave(patch_room *r)
{
    if (!r)
        return;
    pthread_mutex_lock(&r->lock);
    unlock_and_leave_room(r);
}

/* Lock held. The longest free stretch: *@p link is what follows it. */
static uint64_t find_longest(patch_room *r, taken ***link, uint64_t *at)
{
    uint64_t end = 0, longest = 0;
    for (taken **next = &r->first;; next = &(*next)->next) {
        uint64_t to = *next ? (*next)->at : r->bytes;
        if (to > end && to - end > longest) {
            longest = to - end;
            *link = next;
            *at = end;
        }
        if (!*next)
            return longest;
        end = ((*next)->at + (*next)->length + ALIGNMENT - 1) & ~(ALIGNMENT - 1);
    }
}

uint64_t patch_room_longest(patch_room *r)
{
    taken **link;
    uint64_t at;
    pthread_mutex_lock(&r->lock);
    uint64_t longest = find_longest(r, &link, &at);
    pthread_mutex_unlock(&r->lock);
    return longest;
}

uint8_t *patch_room_take(patch_room *r, uint64_t *length)
{
    taken **link = NULL, *block = malloc(sizeof *block);
    uint64_t at = 0;
    pthread_mutex_lock(&r->lock);
    *length = find_longest(r, &link, &at);
    if (!block || *length == 0) {
        pthread_mutex_unlock(&r->lock);
        free(block);
        return NULL;
    }
    *block = (taken){at, *length, *link};
    *link = block;
    r->users++;
    pthread_mutex_unlock(&r->lock);
    return r->memory + at;
}

/* Lock held. Of a block that is there. */
static taken **find_block(patch_room *r, const uint8_t *block)
{
    taken **link = &r->first;
    while (r->memory + (*link)->at != block)
        link = &(*link)->next;
    return link;
}

void patch_room_shrink(patch_room *r, const uint8_t *block, uint64_t length)
{
    pthread_mutex_lock(&r->lock);
    (*find_block(r, block))->length = length;
    pthread_mutex_unlock(&r->lock);
}

void patch_room_give(patch_room *r, const uint8_t *block)
{
    pthread_mutex_lock(&r->lock);
    taken **link = find_block(r, block), *gone = *link;
    *link = gone->next;
    free(gone);
    unlock_and_leave_room(r);
}

uint64_t *patch_room_made(patch_room *r)
{
    return (uint64_t *)(r->memory + r->bytes);
}
