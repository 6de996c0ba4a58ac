/* SPDX-License-Identifier: Apache-2.0 */
/* Threads that cannot be had. */
#include "testing.h"
#include "thread.h"

int __wrap_pthread_create(pthread_t *thread, const pthread_attr_t *attributes,
                          void *(*run)(void *), void *cookie);
int __wrap_pthread_create(pthread_t *thread, const pthread_attr_t *attributes,
                          void *(*run)(void *), void *cookie)
{
    return EAGAIN;
}

static void *run(void *cookie)
{
    return cookie;
}

TEST(limits_of_threads_are_the_remedy)
{
    fanin_error error = FANIN_ERROR_INIT;
    pthread_t thread;
    assert_int_equal(thread_start(&thread, "fanin-data", run, NULL, &error),
                     FANIN_ERR_LIMIT);
    assert_int_equal(error.sys_errno, EAGAIN);
    assert_says(error.message, "cannot start the thread fanin-data");
    assert_says(error.remedy, "ulimit -u");
    assert_says(error.remedy, "--pids-limit");
}

TEST(helpers_that_cannot_be_had_are_none)
{
    pthread_t threads[2];
    assert_int_equal(worker_threads_start(threads, 2, run, NULL), 0);
}
