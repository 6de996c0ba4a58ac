/* SPDX-License-Identifier: Apache-2.0 */
#include "trainer/ranks.h"
#include "fetch/failure.h"
#include "trainer/serve_rank.h"
#include "clock.h"

#include <errno.h>
#include <inttypes.h>
#include <limits.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/wait.h>
#include <unistd.h>

struct ranks {
    const rank_options *options;
    rank_board *board;
    rank_extent *extents; /**< world_size times the tensors, NULL: not wanted */
    size_t board_size, extents_size;
    int signals, ready;
    bool stopped;
    int signal; /**< that asked to end, 0: none */
    bool told;  /**< of a rank's death; others often follow for the same reason */
};

enum { STOP_MARGIN_MS = 3000 };

static int no_resources(const char *what)
{
    return failure_local(
        "cannot start ranks", FANIN_ERR_IO,
        "raise the limits of this shell (ulimit -a), or start fewer ranks", "%s: %s",
        what, strerror(errno));
}

static void *shared_memory(size_t size)
{
    void *memory = mmap(NULL, size, PROT_READ | PROT_WRITE,
                        MAP_SHARED | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return memory == MAP_FAILED ? NULL : memory;
}

static int open_resources(ranks *r)
{
    const rank_options *o = r->options;
    sigset_t set;
    sigemptyset(&set);
    sigaddset(&set, SIGINT);
    sigaddset(&set, SIGTERM);
    sigaddset(&set, SIGCHLD);
    sigprocmask(SIG_BLOCK, &set, NULL);
    r->signals = signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK);
    r->ready = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (r->signals < 0 || r->ready < 0)
        return no_resources("descriptors");
    r->board_size = sizeof(rank_board) + o->world_size * sizeof(rank_slot);
    r->board = shared_memory(r->board_size);
    if (r->board == NULL)
        return no_resources("shared memory");
    r->board->world_size = o->world_size;
    if (o->extents) {
        r->extents_size = o->world_size * o->tensors->count * sizeof(rank_extent) + 1;
        r->extents = shared_memory(r->extents_size);
        if (r->extents == NULL)
            return no_resources("shared memory");
    }
    return 0;
}

static _Noreturn void child(ranks *r, uint32_t rank, pid_t parent)
{
    /* A rank must never outlive the trainer, not even one that is stopped. */
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != parent)
        _exit(1);
    char name[32];
    snprintf(name, sizeof name, "nixl-rank-%u", rank);
    prctl(PR_SET_NAME, name);
    output_use_json(false); /* its parent tells what becomes of it */
    rank_extent *extents =
        r->extents != NULL ? r->extents + rank * r->options->tensors->count : NULL;
    exit(serve_rank(r->options, r->board, rank, r->ready, extents));
}

int ranks_start(const rank_options *options, ranks **ranks_out)
{
    *ranks_out = NULL;
    ranks *r = output_require(calloc(1, sizeof *r));
    r->options = options;
    r->signals = r->ready = -1;
    int code = open_resources(r);
    pid_t parent = getpid();
    fflush(NULL);
    for (uint32_t rank = 0; code == 0 && r->board != NULL && rank < options->world_size;
         rank++) {
        rank_slot *slot = &r->board->slots[rank];
        atomic_store(&slot->alive, 1);
        pid_t pid = fork();
        if (pid == 0)
            child(r, rank, parent);
        slot->pid = pid > 0 ? pid : 0;
        if (pid < 0) {
            atomic_store(&slot->alive, 0);
            code = no_resources("fork");
        }
    }
    if (code != 0) {
        ranks_free(&r);
        return code;
    }
    *ranks_out = r;
    return 0;
}

/* A rank has ended although nobody asked it to. */
static int tell_death(ranks *r, uint32_t rank, int wait_status)
{
    const rank_slot *slot = &r->board->slots[rank];
    if (r->told)
        return slot->failed ? exit_code_of(slot->error.status)
                            : exit_code_of(FANIN_ERR_CLOSED);
    r->told = true;
    if (slot->failed)
        return failure_report("a rank failed", &slot->error);
    if (WIFSIGNALED(wait_status))
        return failure_local("the ranks ended", FANIN_ERR_CLOSED,
                             "start them again (--keep-going lets the others live)",
                             "rank %u (process %d) was ended by signal %d", rank,
                             (int)slot->pid, WTERMSIG(wait_status));
    return failure_local("the ranks ended", FANIN_ERR_INTERNAL, "start them again",
                         "rank %u (process %d) ended with status %d", rank,
                         (int)slot->pid, WEXITSTATUS(wait_status));
}

/* Collects ranks that ended; the exit status of the first that did so unasked. */
static int ranks_reap(ranks *r)
{
    int code = 0;
    for (uint32_t rank = 0; rank < r->options->world_size; rank++) {
        rank_slot *slot = &r->board->slots[rank];
        int status;
        if (atomic_load(&slot->alive) == 0 || slot->pid <= 0 ||
            waitpid(slot->pid, &status, WNOHANG) != slot->pid)
            continue;
        atomic_store(&slot->alive, 0);
        bool asked = atomic_load(&r->board->stop) != 0;
        bool clean = WIFEXITED(status) && WEXITSTATUS(status) == 0;
        if (clean || (asked && WIFSIGNALED(status)))
            continue;
        if (r->options->keep_going && !asked && !slot->failed) {
            failure_warn("rank %u (process %d) died, the others go on", rank,
                         (int)slot->pid);
            rank_board_wake(r->board);
        } else if (code == 0) {
            code = tell_death(r, rank, status);
        }
    }
    return code;
}

static uint32_t count_living(const ranks *r)
{
    uint32_t living = 0;
    for (uint32_t rank = 0; rank < r->options->world_size; rank++)
        living += atomic_load(&r->board->slots[rank].alive) != 0;
    return living;
}

/* Waits for something to happen; the signals that came as a set of SIGINT, SIGTERM. */
static bool wait_event(ranks *r, int timeout_ms)
{
    struct pollfd descriptors[2] = {{r->signals, POLLIN, 0}, {r->ready, POLLIN, 0}};
    struct signalfd_siginfo info;
    uint64_t ready;
    bool asked = false;
    poll(descriptors, 2, timeout_ms);
    while (read(r->signals, &info, sizeof info) == (ssize_t)sizeof info) {
        if (info.ssi_signo != SIGCHLD) {
            asked = true;
            r->signal = (int)info.ssi_signo;
        }
    }
    if (read(r->ready, &ready, sizeof ready) < 0)
        ready = 0; /* nobody became ready; the slots say who is */
    return asked;
}

static bool all_ready(const ranks *r)
{
    for (uint32_t rank = 0; rank < r->options->world_size; rank++)
        if (atomic_load(&r->board->slots[rank].ready) == 0)
            return false;
    return true;
}

static int interrupted(const ranks *r)
{
    failure_warn("interrupted");
    return EXIT_SIGNAL + (r->signal != 0 ? r->signal : SIGINT);
}

/* Waits at most @p ms for something to happen. 0, or the exit status of an end. */
static int ranks_look(ranks *r, uint32_t ms)
{
    if (wait_event(r, ms < INT_MAX ? (int)ms : INT_MAX) ||
        atomic_load(&r->board->stop) != 0)
        return interrupted(r);
    return ranks_reap(r);
}

int ranks_wait_ready(ranks *r, uint32_t timeout_ms)
{
    uint64_t end = deadline_in_ms(timeout_ms);
    while (!all_ready(r)) {
        uint32_t left_ms = (uint32_t)deadline_poll_ms(end);
        if (left_ms == 0)
            return failure_local("cannot start ranks", FANIN_ERR_TIMEOUT,
                                 "give a longer --timeout or fewer bytes",
                                 "not all ranks were ready in %u ms", timeout_ms);
        int code = ranks_look(r, left_ms);
        if (code != 0)
            return code;
    }
    return 0;
}

int ranks_wait_step(ranks *r, uint64_t step, uint32_t timeout_ms)
{
    enum { LOOK_MS = 5 };
    uint64_t end = deadline_in_ms(timeout_ms);
    for (uint32_t rank = 0; rank < r->options->world_size;) {
        if (r->board->slots[rank].step >= step) {
            rank++;
            continue;
        }
        if (deadline_passed(end))
            return failure_local("the ranks do not go on", FANIN_ERR_TIMEOUT,
                                 "give a longer --timeout or fewer bytes",
                                 "rank %u has not committed step %" PRIu64 " in %u ms",
                                 rank, step, timeout_ms);
        int code = ranks_look(r, LOOK_MS);
        if (code != 0)
            return code;
    }
    return 0;
}

int ranks_serve(ranks *r)
{
    for (;;) {
        int code = ranks_reap(r);
        if (code != 0 || atomic_load(&r->board->stop) != 0)
            return code;
        if (count_living(r) == 0)
            return failure_local("the ranks ended", FANIN_ERR_CLOSED,
                                 "start them again", "no rank is left");
        if (wait_event(r, -1))
            return 0;
    }
}

static void kill_all(ranks *r)
{
    for (uint32_t rank = 0; rank < r->options->world_size; rank++) {
        rank_slot *slot = &r->board->slots[rank];
        if (atomic_load(&slot->alive) != 0 && slot->pid > 0)
            kill(slot->pid, SIGKILL);
    }
}

int ranks_stop(ranks *r)
{
    uint64_t end = deadline_in_ms((uint64_t)r->options->lease_ms + STOP_MARGIN_MS);
    int code = 0;
    r->stopped = true;
    rank_board_stop(r->board);
    for (;;) {
        int one = ranks_reap(r);
        code = code != 0 ? code : one;
        if (count_living(r) == 0)
            return code;
        uint32_t left_ms = (uint32_t)deadline_poll_ms(end);
        if (left_ms == 0 || wait_event(r, (int)left_ms)) {
            kill_all(r);
            end = deadline_in_ms(1000);
        }
    }
}

void ranks_free(ranks **r_inout)
{
    ranks *r = r_inout != NULL ? *r_inout : NULL;
    if (r == NULL)
        return;
    if (r->board != NULL) {
        if (!r->stopped)
            ranks_stop(r);
        munmap(r->board, r->board_size);
    }
    if (r->extents != NULL)
        munmap(r->extents, r->extents_size);
    if (r->signals >= 0)
        close(r->signals);
    if (r->ready >= 0)
        close(r->ready);
    free(r);
    *r_inout = NULL;
}

const rank_slot *ranks_slot(const ranks *r, uint32_t rank)
{
    return &r->board->slots[rank];
}

const char *ranks_host(const ranks *r)
{
    return r->options->bind != NULL ? r->options->bind : "127.0.0.1";
}

output_text ranks_address(const ranks *r, uint32_t rank)
{
    output_text text;
    const char *host = ranks_host(r);
    snprintf(text.s, sizeof text.s,
             strchr(host, ':') != NULL ? "[%.180s]:%u" : "%.180s:%u", host,
             r->board->slots[rank].port);
    return text;
}

char *ranks_target(const ranks *r)
{
    char *text = NULL;
    size_t size = 0;
    FILE *stream = output_require(open_memstream(&text, &size));
    for (uint32_t rank = 0; rank < r->options->world_size; rank++)
        fprintf(stream, "%s%s", rank > 0 ? "," : "", ranks_address(r, rank).s);
    fclose(stream);
    return output_require(text);
}

const rank_extent *ranks_extents(const ranks *r, uint32_t rank)
{
    return r->extents + rank * r->options->tensors->count;
}

uint32_t ranks_commits(const ranks *r, uint32_t rank, uint64_t out[RANK_COMMITS])
{
    const rank_slot *slot = &r->board->slots[rank];
    uint32_t count = atomic_load(&slot->commits);
    memcpy(out, slot->commit_ns, sizeof slot->commit_ns);
    return count < RANK_COMMITS ? count : RANK_COMMITS;
}
