/* SPDX-License-Identifier: Apache-2.0 */
/* A process that is forked while another thread loads a library, or is within it. */
#include "load_lock.h"
#include "testing.h"
#include <semaphore.h>
#include <sys/wait.h>
#include <time.h>

static load_lock lock = LOAD_LOCK_INIT, other = LOAD_LOCK_INIT;
static sem_t held, done;
static unsigned leave_after; /* looks of who is about to fork; 0: stays within */

int __wrap_nanosleep(const struct timespec *time, struct timespec *left);
int __real_nanosleep(const struct timespec *time, struct timespec *left);
int __wrap_nanosleep(const struct timespec *time, struct timespec *left)
{
    if (leave_after > 0 && --leave_after == 0)
        load_lock_leave(&lock);
    return __real_nanosleep(time, left);
}

static void *hold(void *cookie)
{
    assert_true(load_lock_take(&lock));
    sem_post(&held);
    sem_wait(&done);
    load_lock_give(&lock);
    return cookie;
}

/* The child has its answer, and does not wait for who is not there. */
static bool child_is_told(void)
{
    fanin_error error = FANIN_ERROR_INIT;
    bool others = load_lock_take(&other);
    load_lock_give(&other);
    return others && !load_lock_take(&lock) && !load_lock_take(&lock) &&
           load_lock_lost("it", &error) == FANIN_ERR_FORKED &&
           strstr(error.message, "while its parent loaded it");
}

static int fork_meanwhile(void)
{
    int status;
    pid_t child = fork();
    if (child == 0)
        _exit(child_is_told() ? 0 : 1);
    assert_int_equal(waitpid(child, &status, 0), child);
    return status;
}

TEST(a_child_of_a_process_that_loads_is_told)
{
    pthread_t thread;
    assert_int_equal(sem_init(&held, 0, 0), 0);
    assert_int_equal(sem_init(&done, 0, 0), 0);
    assert_true(load_lock_take(&other));
    load_lock_give(&other);
    assert_int_equal(pthread_create(&thread, NULL, hold, NULL), 0);
    sem_wait(&held);
    int status = fork_meanwhile();
    sem_post(&done);
    pthread_join(thread, NULL);
    assert_true(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    assert_true(load_lock_take(&lock)); /* the parent's is as it was */
    load_lock_give(&lock);
}

/* A library's own locks: whichever thread is within. */
TEST(a_child_of_a_process_that_is_within_is_told)
{
    assert_true(load_lock_take(&other));
    load_lock_give(&other);
    assert_true(load_lock_take(&lock));
    load_lock_give(&lock);
    load_lock_enter(&lock);
    load_lock_enter(&lock);
    load_lock_leave(&lock);
    int status = fork_meanwhile();
    load_lock_leave(&lock);
    assert_true(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    assert_true(load_lock_take(&lock));
    load_lock_give(&lock);
}

TEST(a_fork_waits_for_those_that_are_within)
{
    load_lock_enter(&lock);
    leave_after = 3;
    pid_t child = fork();
    if (child == 0)
        _exit(load_lock_take(&lock) ? 0 : 1);
    assert_int_equal(leave_after, 0);
    assert_int_equal(tests_await(child), 0);
}

TEST(a_child_of_one_that_does_not_takes_it)
{
    pid_t child = fork();
    if (child == 0)
        _exit(load_lock_take(&lock) && load_lock_take(&other) ? 0 : 1);
    assert_int_equal(tests_await(child), 0);
}
