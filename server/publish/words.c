/* SPDX-License-Identifier: Apache-2.0 */
#include "publish/words.h"
#include "core/rules.h"

#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

_Static_assert(sizeof(atomic_uint_fast64_t) == sizeof(uint64_t),
               "a word is what the protocol says");

static void store(epoch_words *w, unsigned which, uint64_t number)
{
    atomic_store_explicit(&w->at[which], number, memory_order_relaxed);
}

/* What is written after this comes after the words for everybody who reads in the other order: the
   writer's side of a seqlock. A store with release order would hold back what came before it only.
   */
static void before_writes(void)
{
    __sync_synchronize();
}

void words_stand(epoch_words *w, uint64_t epoch)
{
    store(w, w->current, epoch);
}

void words_keep(epoch_words *w)
{
    w->current = 1 - w->current;
}

void words_turn_previous(epoch_words *w, uint64_t odd)
{
    if (RULE(RULE_WORDS))
        store(w, 1 - w->current, odd);
    before_writes();
}

void words_turn(epoch_words *w, uint64_t odd)
{
    if (RULE(RULE_WORDS))
        store(w, w->current, odd);
    words_turn_previous(w, odd);
}

uint64_t words_address(const epoch_words *w)
{
    return (uintptr_t)&w->at[w->current];
}

/* ----------------------------------------------------------------- witness */

static size_t page_size(void)
{
    return (size_t)sysconf(_SC_PAGESIZE);
}

uint8_t *witness_make(const uint8_t incarnation[16])
{
    void *page = mmap(NULL, page_size(), PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (page == MAP_FAILED)
        return NULL;
    if (madvise(page, page_size(), MADV_DONTFORK) != 0) {
        munmap(page, page_size());
        return NULL;
    }
    memcpy(page, incarnation, 16);
    return page;
}

void witness_free(uint8_t **witness)
{
    if (*witness)
        munmap(*witness, page_size());
    *witness = NULL;
}
