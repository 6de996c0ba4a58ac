/* SPDX-License-Identifier: Apache-2.0 */
#include "trainer/rank_board.h"
#include "fetch/progress.h"

#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

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

static bool is_past(const rank_board *board, uint64_t end_ns)
{
    (void)board;
    return progress_now_ns() >= end_ns;
}

/* Until @p done says so of @p what, which it looks at anew with each event and at @p end_ns;
   false: the world is to end. */
static bool wait_until(rank_board *board, bool (*done)(const rank_board *, uint64_t),
                       uint64_t what, uint64_t end_ns)
{
    for (;;) {
        uint32_t seen = atomic_load(&board->wake);
        if (atomic_load(&board->stop) != 0) {
            return false;
        }
        if (done(board, what)) {
            return true;
        }
        uint64_t now = progress_now_ns(), left = end_ns > now ? end_ns - now : 0;
        const struct timespec timeout = {(time_t)(left / 1000000000),
                                         (long)(left % 1000000000)};
        /* Not the private kind: the word is shared between processes. */
        syscall(SYS_futex, &board->wake, FUTEX_WAIT, seen,
                end_ns != UINT64_MAX ? &timeout : NULL, NULL, 0);
    }
}

bool rank_board_barrier(rank_board *board, uint32_t rank)
{
    uint64_t generation = atomic_fetch_add(&board->slots[rank].arrived, 1) + 1;
    if (all_arrived(board, generation)) {
        rank_board_wake(board);
    }
    return wait_until(board, all_arrived, generation, UINT64_MAX);
}

bool rank_board_pause(rank_board *board, int64_t ms)
{
    uint64_t end_ns = ms < 0 ? UINT64_MAX : progress_in_ms((uint64_t)ms);
    return wait_until(board, is_past, end_ns, end_ns);
}
