/* SPDX-License-Identifier: Apache-2.0 */
#include "core/witness.h"

#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

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
