/* SPDX-License-Identifier: Apache-2.0 */
#include "relay_strikes.h"

#include "ends.h"
#include "error_set.h"
#include "pull/pull_session.h"
#include "testing.h"
#include <signal.h>
#include <stdatomic.h>
#include <sys/wait.h>

static void (*strike_now)(void);
static atomic_int left, reads_left;
static pid_t holder_process;

fanin_status __real_pull_session_confirm_later(fanin_session *s, confirmed_fn fn,
                                               void *cookie, fanin_error *error);
fanin_status __wrap_pull_session_confirm_later(fanin_session *s, confirmed_fn fn,
                                               void *cookie, fanin_error *error);

fanin_status __wrap_pull_session_confirm_later(fanin_session *s, confirmed_fn fn,
                                               void *cookie, fanin_error *error)
{
    if (atomic_fetch_sub(&left, 1) == 1)
        strike_now();
    return __real_pull_session_confirm_later(s, fn, cookie, error);
}

fanin_status __real_pull_session_read(fanin_session *s, const group_run *runs, size_t n,
                                      fanin_error *error);
fanin_status __wrap_pull_session_read(fanin_session *s, const group_run *runs, size_t n,
                                      fanin_error *error);

fanin_status __wrap_pull_session_read(fanin_session *s, const group_run *runs, size_t n,
                                      fanin_error *error)
{
    if (atomic_fetch_sub(&reads_left, 1) == 1)
        return error_set(error, FANIN_ERR_TIMEOUT, NULL, "the deadline passed");
    return __real_pull_session_read(s, runs, n, error);
}

static const landed_range *false_landed;

fanin_status __real_decode_landed_ok(body *in, msg_landed_ok *out,
                                     landed_range *ranges);
fanin_status __wrap_decode_landed_ok(body *in, msg_landed_ok *out,
                                     landed_range *ranges);

fanin_status __wrap_decode_landed_ok(body *in, msg_landed_ok *out, landed_range *ranges)
{
    fanin_status status = __real_decode_landed_ok(in, out, ranges);
    if (false_landed) {
        ranges[0] = *false_landed;
        out->n_ranges = 1;
    }
    return status;
}

void falsify_landed(const landed_range *range)
{
    false_landed = range;
}

void end_time_at_read(int reads)
{
    atomic_store(&reads_left, reads);
}

void strike_after(int batches, void (*strike)(void))
{
    strike_now = strike;
    atomic_store(&left, batches);
}

int strike_left(void)
{
    return atomic_load(&left);
}

void commit_2(void)
{
    world_commit(ways.world, 2);
}

void stop_ranks(void)
{
    for (size_t i = 0; i < ways.world->size; i++)
        world_stop_rank(ways.world, i);
}

void start_holder(void)
{
    holder_process = fork_holder();
}

/* Returns once it stands: until then its threads may bring all that is left. */
void stop_holder(void)
{
    siginfo_t stopped;
    kill(holder_process, SIGSTOP);
    assert_int_equal(waitid(P_PID, (id_t)holder_process, &stopped, WSTOPPED), 0);
}

static void *go_on(void *cookie)
{
    (void)cookie;
    sleep(1);
    kill(holder_process, SIGCONT);
    return NULL;
}

void stop_holder_for_a_second(void)
{
    pthread_t thread;
    stop_holder();
    assert_int_equal(pthread_create(&thread, NULL, go_on, NULL), 0);
    pthread_detach(thread);
}

void kill_holder(void)
{
    kill(holder_process, SIGKILL);
    tests_await(holder_process);
}
