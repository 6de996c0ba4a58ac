/* SPDX-License-Identifier: Apache-2.0 */
/* How long the client's loop looks for what is due within moments, before it sleeps. */
#include "net/loop.h"
#include "testing.h"

#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

/* What an answer may take that no look finds. */
#define SLEEP_MS 1

static struct {
    loop loop;
    loop_source source; /* an eventfd */
    unsigned looks, sleeps, ready;
} s;

int __real_epoll_wait(int epoll, struct epoll_event *events, int n, int timeout);
int __wrap_epoll_wait(int epoll, struct epoll_event *events, int n, int timeout);
int __wrap_epoll_wait(int epoll, struct epoll_event *events, int n, int timeout)
{
    s.looks += timeout == 0;
    s.sleeps += timeout != 0;
    return __real_epoll_wait(epoll, events, n, timeout);
}

static void on_ready(loop_source *source, uint32_t events)
{
    uint64_t count;
    (void)events;
    s.ready++;
    assert_int_equal(read(source->fd, &count, sizeof count), sizeof count);
}

static int set_up(void **state)
{
    fanin_error error = FANIN_ERROR_INIT;
    (void)state;
    memset(&s, 0, sizeof s);
    assert_ok(loop_init(&s.loop, &error), error);
    s.source = (loop_source){
        .fd = eventfd(0, EFD_CLOEXEC), .events = EPOLLIN, .ready = on_ready};
    assert_true(s.source.fd >= 0);
    assert_ok(loop_add(&s.loop, &s.source, &error), error);
    return 0;
}

static int tear_down(void **state)
{
    (void)state;
    loop_remove(&s.loop, &s.source);
    close(s.source.fd);
    loop_finish(&s.loop);
    return 0;
}

static void answer(void)
{
    const uint64_t one = 1;
    assert_int_equal(write(s.source.fd, &one, sizeof one), sizeof one);
}

static void wait_in_vain(void)
{
    s.looks = s.sleeps = 0;
    loop_step_soon(&s.loop, deadline_in_ms(SLEEP_MS));
    assert_int_equal(s.ready, 0);
}

static void what_is_there_is_taken_without_sleep(void **state)
{
    (void)state;
    answer();
    loop_step_soon(&s.loop, deadline_in_ms(10000));
    assert_int_equal(s.ready, 1);
    assert_int_equal(s.looks, 1);
    assert_int_equal(s.sleeps, 0);
}

static void it_sleeps_when_looking_finds_nothing(void **state)
{
    (void)state;
    wait_in_vain();
    assert_in_range(s.looks, 1, 256);
    assert_int_equal(s.sleeps, 1);
}

/* Ranks of another host do not answer so soon: it stops looking, but for a try now and then. */
static void it_stops_looking_in_vain(void **state)
{
    unsigned tries = 0;
    (void)state;
    for (int i = 0; i < 4; i++)
        wait_in_vain();
    for (int i = 0; i < 128; i++) {
        wait_in_vain();
        tries += s.looks > 0;
    }
    assert_in_range(tries, 1, 3);
    /* What a try finds makes it look again. */
    answer();
    for (int i = 0; i < 64 && s.ready == 0; i++)
        loop_step_soon(&s.loop, deadline_in_ms(10000));
    assert_int_equal(s.ready, 1);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(what_is_there_is_taken_without_sleep, set_up,
                                        tear_down),
        cmocka_unit_test_setup_teardown(it_sleeps_when_looking_finds_nothing, set_up,
                                        tear_down),
        cmocka_unit_test_setup_teardown(it_stops_looking_in_vain, set_up, tear_down),
    };
    return cmocka_run_group_tests_name("loop", tests, NULL, NULL);
}
