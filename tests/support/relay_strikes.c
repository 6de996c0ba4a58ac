/* SPDX-License-Identifier: Apache-2.0 */
#include "relay_strikes.h"

#include "clock.h"
#include "ends.h"
#include "error_set.h"
#include "pull/pull_session.h"
#include "schedule.h"
#include "testing.h"
#include <signal.h>
#include <stdatomic.h>
#include <sys/wait.h>
#include <unistd.h>

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

/* Longer than a relay hopes for what others may just have got, and shorter than it waits for who
   has not said yet what it has. */
#define SEEN_NS UINT64_C(700000000)

enum { HOLD_NONE, HOLD_READS, HOLD_NEWS }; /* in falling order */
static atomic_int holds;
/* Since when the calling thread sees it; 0: it does not. */
static _Atomic uint64_t seen_ns;

bool __real_schedule_without_origin(const schedule *s);
bool __wrap_schedule_without_origin(const schedule *s);

bool __wrap_schedule_without_origin(const schedule *s)
{
    uint64_t unseen = 0;
    if (atomic_load(&holds) > 0)
        atomic_compare_exchange_strong(&seen_ns, &unseen, clock_ns());
    return __real_schedule_without_origin(s);
}

static void hold_while(int held)
{
    deadline until = deadline_in_ms(20000);
    if (atomic_load(&holds) != held)
        return;
    while (!deadline_passed(until)) {
        uint64_t seen = atomic_load(&seen_ns);
        if (seen > 0 && clock_ns() - seen > SEEN_NS) {
            atomic_store(&seen_ns, 0);
            atomic_fetch_sub(&holds, 1);
            return;
        }
        usleep(1000);
    }
}

/* After two batches the trainer has brought a part, and no more than a half. */
void expect_pull_without_trainer(reader *r, void (*strike)(void))
{
    strike_after(2, strike);
    atomic_store(&seen_ns, 0);
    atomic_store(&holds, HOLD_NEWS);
    expect_pull(r, 1);
    assert_int_equal(atomic_load(&holds), 0);
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
    hold_while(HOLD_READS);
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
    hold_while(HOLD_NEWS);
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

static atomic_bool versions_go_back;

fanin_status __real_decode_holders_ok(body *in, msg_holders_ok *out);
fanin_status __wrap_decode_holders_ok(body *in, msg_holders_ok *out);

fanin_status __wrap_decode_holders_ok(body *in, msg_holders_ok *out)
{
    fanin_status status = __real_decode_holders_ok(in, out);
    if (atomic_load(&versions_go_back))
        out->version = 1;
    return status;
}

void turn_versions_back(bool all)
{
    atomic_store(&versions_go_back, all);
}

static const char *_Atomic refused_thread;

fanin_status __real_thread_start(pthread_t *thread, const char *name,
                                 void *(*run)(void *), void *cookie,
                                 fanin_error *error);
fanin_status __wrap_thread_start(pthread_t *thread, const char *name,
                                 void *(*run)(void *), void *cookie,
                                 fanin_error *error);

fanin_status __wrap_thread_start(pthread_t *thread, const char *name,
                                 void *(*run)(void *), void *cookie, fanin_error *error)
{
    const char *refused = atomic_load(&refused_thread);
    if (refused && strcmp(refused, name) == 0)
        return error_set(error, FANIN_ERR_LIMIT, NULL, "cannot start the thread %s",
                         name);
    return __real_thread_start(thread, name, run, cookie, error);
}

void refuse_threads(const char *name)
{
    atomic_store(&refused_thread, name);
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
