/* SPDX-License-Identifier: Apache-2.0 */
#include "trainer/rank_board.h"
#include "fetch/progress.h"

#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

/* Not the private kind: the word is shared between processes. */
static void futex_wait(_Atomic uint32_t *word, uint32_t seen,
                       const struct timespec *timeout)
{
    syscall(SYS_futex, word, FUTEX_WAIT, seen, timeout, NULL, 0);
}

void rank_board_wake(rank_board *board)
{
    int saved = errno;
    atomic_fetch_add(&board->wake, 1);
    syscall(SYS_futex, &board->wake, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
    errno = saved;
}

void rank_board_stop(rank_board *board)
{
    atomic_store(&board->stop, 1);
    rank_board_wake(board);
}

static bool all_arrived(const rank_board *board, uint64_t generation)
{
    for (uint32_t i = 0; i < board->world_size; i++) {
        const rank_slot *slot = &board->slots[i];
        if (atomic_load(&slot->alive) != 0 &&
            atomic_load(&slot->arrived) < generation) {
            return false;
        }
    }
    return true;
}

bool rank_board_barrier(rank_board *board, uint32_t rank)
{
    uint64_t generation = atomic_fetch_add(&board->slots[rank].arrived, 1) + 1;
    if (all_arrived(board, generation)) {
        rank_board_wake(board);
    }
    for (;;) {
        uint32_t seen = atomic_load(&board->wake);
        if (atomic_load(&board->stop) != 0) {
            return false;
        }
        if (all_arrived(board, generation)) {
            return true;
        }
        futex_wait(&board->wake, seen, NULL);
    }
}

bool rank_board_work(rank_board *board)
{
    for (;;) {
        uint32_t seen = atomic_load(&board->wake);
        if (atomic_load(&board->stop) != 0) {
            return false;
        }
        if (atomic_load(&board->phase) != 0) {
            return true;
        }
        futex_wait(&board->wake, seen, NULL);
    }
}

bool rank_board_pause(rank_board *board, int64_t ms)
{
    uint64_t end = progress_now_ns() + (ms > 0 ? (uint64_t)ms * 1000000 : 0);
    for (;;) {
        uint32_t seen = atomic_load(&board->wake);
        if (atomic_load(&board->stop) != 0) {
            return false;
        }
        if (ms < 0) {
            futex_wait(&board->wake, seen, NULL);
            continue;
        }
        uint64_t now = progress_now_ns();
        if (now >= end) {
            return true;
        }
        struct timespec left = {(time_t)((end - now) / 1000000000),
                                (long)((end - now) % 1000000000)};
        futex_wait(&board->wake, seen, &left);
    }
}
