/* SPDX-License-Identifier: Apache-2.0 */
/* The nice value of the server's threads, and that of nobody else. */
#include "ends.h"
#include "log_catcher.h"
#include "server_peer.h"
#include "testing.h"

#include <linux/capability.h>
#include <sys/resource.h>
#include <sys/syscall.h>

#define MORE 3

static uint8_t memory[1000];

static int nice_of(const char *thread)
{
    pid_t id = 0;
    assert_int_equal(threads_named(thread, &id), 1);
    return getpriority(PRIO_PROCESS, (id_t)id);
}

/* A reader was served, so both kinds of threads are beyond their first steps. */
static void serve_with(int32_t more)
{
    fanin_server_config c = server_config();
    c.nice = more;
    fanin_server *s = server_start(&c);
    server_put(s, RUN, "a", memory, sizeof memory);
    server_commit(s, 1);
    puller r = puller_open(s);
    puller_begin(&r);
    puller_expect(&r, 0, 0, sizeof memory);
    puller_end(&r);
}

SERVER_TEST(the_servers_threads_yield)
{
    int own = getpriority(PRIO_PROCESS, 0);
    serve_with(MORE);
    int value = own + MORE < 19 ? own + MORE : 19;
    assert_int_equal(nice_of("fanin-control"), value);
    assert_int_equal(nice_of("fanin-data"), value);
    assert_int_equal(getpriority(PRIO_PROCESS, 0), own);
}

SERVER_TEST(nothing_changes_unless_it_is_asked_for)
{
    int own = getpriority(PRIO_PROCESS, 0);
    serve_with(0);
    assert_int_equal(nice_of("fanin-control"), own);
    assert_int_equal(nice_of("fanin-data"), own);
}

/* Of this thread, and of those that it starts. */
static void take_privilege(struct __user_cap_data_struct before[2])
{
    struct __user_cap_header_struct head = {_LINUX_CAPABILITY_VERSION_3, 0};
    assert_int_equal(syscall(SYS_capget, &head, before), 0);
    struct __user_cap_data_struct less[2] = {before[0], before[1]};
    less[0].effective &= ~(1U << CAP_SYS_NICE);
    assert_int_equal(syscall(SYS_capset, &head, less), 0);
}

static void give_privilege(const struct __user_cap_data_struct before[2])
{
    struct __user_cap_header_struct head = {_LINUX_CAPABILITY_VERSION_3, 0};
    assert_int_equal(syscall(SYS_capset, &head, before), 0);
}

/* Without the privilege it goes on as it is, and says so. */
SERVER_TEST(who_may_not_go_first_is_told)
{
    int own = getpriority(PRIO_PROCESS, 0);
    struct __user_cap_data_struct before[2];
    struct rlimit limit, none;
    assert_int_equal(getrlimit(RLIMIT_NICE, &limit), 0);
    none = (struct rlimit){0, limit.rlim_max};
    assert_int_equal(setrlimit(RLIMIT_NICE, &none), 0);
    take_privilege(before);
    log_listen("nice");
    serve_with(-1);
    log_await("cannot be");
    assert_int_equal(nice_of("fanin-control"), own);
    give_privilege(before);
    assert_int_equal(setrlimit(RLIMIT_NICE, &limit), 0);
}
