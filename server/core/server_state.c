/* SPDX-License-Identifier: Apache-2.0 */
#include "core/server_state.h"
#include "core/rules.h"
#include "error_set.h"

#include <errno.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#ifdef FANIN_TEST_HOOKS
atomic_uint server_rules_off;
void (*_Atomic server_on_send)(void);
void (*_Atomic server_on_fill)(void);
#endif

fanin_status server_check(const fanin_server *s, fanin_error *error)
{
    if (!s)
        return error_set(error, FANIN_ERR_ARGUMENT, NULL, "the server is NULL");
    if (s->pid != getpid()) {
        error_place place = {.remedy = "create a server in the process that uses it"};
        return error_set(error, FANIN_ERR_FORKED, &place,
                         "the server belongs to the parent process");
    }
    return FANIN_OK;
}

/* ------------------------------------------------------------------- witness */

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

/* ------------------------------------------------------------------ yielding */

#define NICE_MOST 19

/* On Linux the nice value is a thread's, whatever POSIX says of processes. */
int yielding_value(int32_t more)
{
    int value = getpriority(PRIO_PROCESS, 0) + more;
    return value < NICE_MOST ? value : NICE_MOST;
}

void yielding_begin(const fanin_server *s)
{
    if (s->is_nice && setpriority(PRIO_PROCESS, 0, s->nice) != 0)
        log_write(&s->log, FANIN_LOG_WARNING, "nice",
                  "a thread's nice value cannot be %d (errno %d)", s->nice, errno);
}
