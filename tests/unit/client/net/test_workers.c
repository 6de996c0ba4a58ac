/* SPDX-License-Identifier: Apache-2.0 */
/* Parts of a call's work in several threads: each once, whatever else happens. */
#include "net/threads.h"
#include "error_set.h"
#include "testing.h"
#include "thread.h"

#include <sched.h>
#include <stdatomic.h>

#define PARTS 64

static struct {
    fanin_client *client;
    workers *workers;
    fanin_error error;
    atomic_uint runs[PARTS];
    atomic_uint started;
    bool fails[PARTS];
} s;

static int set_up(void **state)
{
    fanin_client_config config;
    (void)state;
    memset(&s, 0, sizeof s);
    s.error = (fanin_error)FANIN_ERROR_INIT;
    fanin_client_config_init(&config, sizeof config);
    config.no_ucx = true;
    assert_ok(fanin_client_create(&config, &s.client, &s.error), s.error);
    return 0;
}

static int tear_down(void **state)
{
    workers_close(&s.workers);
    fanin_client_destroy(&s.client);
    return 0;
}

#define CASE(name) TEST_WITH(name, set_up, tear_down)

/* ------------------------------------------------------------------- parts */

static fanin_status count(void *cookie, size_t part, work_stop *stop,
                          fanin_error *error)
{
    (void)stop;
    assert_ptr_equal(cookie, &s);
    atomic_fetch_add(&s.runs[part], 1);
    if (!s.fails[part])
        return FANIN_OK;
    error_place place = {.phase = "catalog", .rank_plus_1 = (int32_t)part + 1};
    return error_set(error, FANIN_ERR_PROTOCOL, &place, "part %zu", part);
}

/* Never ends by itself. */
static fanin_status turn(void *cookie, size_t part, work_stop *stop, fanin_error *error)
{
    (void)cookie;
    atomic_fetch_add(&s.runs[part], 1);
    atomic_fetch_add(&s.started, 1);
    while (!work_stopped(stop))
        ;
    return work_broken_off(stop, "plan", "it turned", error);
}

static void open_crew(deadline at, bool worth, workers_fn fn)
{
    s.workers = workers_open(s.client, at, PARTS, worth, fn, &s);
    assert_non_null(s.workers);
}

static void begin(size_t first, size_t end)
{
    for (size_t i = first; i < end; i++)
        workers_begin(s.workers, i);
}

/* ------------------------------------------------------------------- tests */

CASE(each_part_runs_once)
{
    for (int threads = 0; threads < 2; threads++) {
        open_crew(UINT64_MAX, threads, count);
        begin(0, PARTS / 2);
        assert_ok(workers_finish(s.workers, NULL, &s.error), s.error);
        begin(PARTS / 2, PARTS - 1);
        assert_ok(workers_finish(s.workers, NULL, &s.error), s.error);
        workers_close(&s.workers);
        assert_null(s.workers);
        for (size_t i = 0; i < PARTS; i++)
            assert_int_equal(s.runs[i], (i < PARTS - 1) * (1 + threads));
    }
    workers_close(&s.workers);
}

CASE(the_first_by_number_that_failed_decides)
{
    size_t failed = PARTS;
    s.fails[PARTS - 1] = s.fails[5] = s.fails[40] = true;
    open_crew(UINT64_MAX, true, count);
    for (size_t i = PARTS; i-- > 0;)
        workers_begin(s.workers, i);
    assert_int_equal(workers_finish(s.workers, &failed, &s.error), FANIN_ERR_PROTOCOL);
    assert_int_equal(failed, 5);
    assert_int_equal(s.error.rank, 5);
    assert_string_equal(s.error.message, "part 5");
    for (size_t i = 0; i < PARTS; i++)
        assert_int_equal(s.runs[i], 1);
    workers_close(&s.workers);
    open_crew(UINT64_MAX, true, count);
    workers_begin(s.workers, 40); /* no other one was begun */
    assert_int_equal(workers_finish(s.workers, &failed, NULL), FANIN_ERR_PROTOCOL);
    assert_int_equal(failed, 40);
}

CASE(the_deadline_stops_all)
{
    open_crew(deadline_in_ms(20), true, turn);
    begin(0, PARTS);
    assert_int_equal(workers_finish(s.workers, NULL, &s.error), FANIN_ERR_TIMEOUT);
    assert_string_equal(s.error.phase, "plan");
}

static void *cancel_when_started(void *cookie)
{
    (void)cookie;
    while (atomic_load(&s.started) == 0)
        sched_yield();
    fanin_client_cancel(s.client);
    return NULL;
}

CASE(cancel_stops_all)
{
    pthread_t thread;
    open_crew(deadline_in_ms(20000), true, turn);
    begin(0, 4);
    assert_int_equal(pthread_create(&thread, NULL, cancel_when_started, NULL), 0);
    assert_int_equal(workers_finish(s.workers, NULL, &s.error), FANIN_ERR_CANCELLED);
    assert_int_equal(pthread_join(thread, NULL), 0);
    assert_false(atomic_load(&s.client->cancelled)); /* it was this call's */
}

/* What was not finished is stopped, or not begun: none waits for the deadline. */
CASE(closing_waits_for_no_deadline)
{
    open_crew(UINT64_MAX, true, turn);
    begin(0, PARTS);
    while (usable_cpus() > 1 && atomic_load(&s.started) == 0)
        sched_yield();
    workers_close(&s.workers);
    for (size_t i = 0; i < PARTS; i++)
        assert_true(s.runs[i] <= 1);
}
