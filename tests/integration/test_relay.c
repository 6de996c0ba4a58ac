/* SPDX-License-Identifier: Apache-2.0 */
/* Readers that hand on what they have read: who brings what, and what they survive. */
#include "testing.h"
#include "clock.h"
#include "ends.h"
#include "handing.h"
#include "pull/pull_session.h"
#include "rank_proxy.h"
#include "relay_readers.h"
#include "relay_strikes.h"
#include "secrets.h"
#include <fanin/trace.h>
#include <semaphore.h>
#include <signal.h>
#include <stdatomic.h>

#define READERS 3
#define READERS_MOST 5

static world w;
static reader readers[READERS_MOST];

static int tear_down(void **state)
{
    falsify_landed(NULL);
    turn_versions_back(false);
    refuse_threads(NULL);
    for (size_t i = 0; i < READERS_MOST; i++)
        relay_reader_close(&readers[i]);
    world_stop(&w);
    return 0;
}

#define CASE(name) TEST_WITH(name, NULL, tear_down)

static void begin_readers(size_t n)
{
    world_begin(&w, 2, CUT_CHUNK0, 1);
    ways_reset(&w);
    for (size_t i = 0; i < n; i++)
        relay_reader_open(&readers[i], 0);
}

static uint64_t all_bytes(void)
{
    uint64_t sum = 0;
    for (size_t i = 0; i < w.n_tensors; i++)
        sum += world_bytes(&w.tensors[i]);
    return sum;
}

CASE(who_is_alone_reads_the_trainer)
{
    begin_readers(1);
    expect_pull(&readers[0], 1);
    fanin_relay_stats s = stats_of(&readers[0]);
    assert_int_equal(s.bytes_from_origin, all_bytes());
    assert_int_equal(s.landed, s.units);
    world_commit(&w, 2);
    expect_pull(&readers[0], 2);
    assert_int_equal(readers[0].info.bytes, all_bytes());
}

/* The memory is lent until its next writing begins: readers of the last step have it meanwhile. */
CASE(a_next_pull_into_the_same_memory_needs_no_release)
{
    begin_readers(2);
    for (uint64_t step = 1; step < 5; step++) {
        if (step > 1)
            world_commit(&w, step);
        for (size_t i = 0; i < 2; i++) {
            reader *r = &readers[i];
            assert_ok(fanin_relay_pull_into(r->relay, &r->options, r->tensors,
                                            w.n_tensors, NULL, &r->error),
                      r->error);
            for (size_t j = 0; j < w.n_tensors; j++)
                world_check(&w, j, step, r->boxes[j].address);
        }
    }
}

CASE(a_late_joiner_reads_the_others)
{
    begin_readers(3);
    expect_pull(&readers[0], 1);
    expect_pull(&readers[1], 1);
    expect_pull_of_others(&readers[2], 1);
    fanin_relay_stats s = stats_of(&readers[2]);
    assert_int_equal((s.bytes_from_origin + s.bytes_from_relays) % all_bytes(), 0);
    assert_int_equal(s.holders, 2);
    assert_non_null(strstr(readers[2].how, "relays"));
}

/* Else the duties of one that does not come again are waited for, as of each copy of a cache. */
CASE(who_comes_in_the_place_of_another_is_enough)
{
    begin_readers(2);
    expect_pull(&readers[0], 1);
    expect_pull_of_others(&readers[1], 1);
    relay_reader_close(&readers[0]);
    world_commit(&w, 2);
    relay_reader_open(&readers[2], 0);
    expect_pull(&readers[2], 2);
    expect_pull(&readers[1], 2);
    assert_int_equal(stats_of(&readers[1]).holders, 1);
}

/* It is dealt duties, which others have. Of a busy machine they are late now and then. */
CASE(a_late_joiner_spares_the_trainer)
{
    int spared = 0;
    begin_readers(2);
    expect_pull(&readers[0], 1);
    expect_pull(&readers[1], 1);
    for (int tries = 0; spared < 3 && tries < 20; tries++) {
        relay_reader_open(&readers[2], 0);
        expect_pull(&readers[2], 1);
        spared += stats_of(&readers[2]).bytes_from_origin == 0;
        relay_reader_close(&readers[2]);
    }
    assert_int_equal(spared, 3);
}

CASE(all_at_once_share_each_step)
{
    begin_readers(3);
    for (uint64_t step = 1; step < 6; step++) {
        if (step > 1)
            world_commit(&w, step);
        for (size_t i = 0; i < READERS; i++)
            call_start(&readers[i].call, relay_pull, &readers[i]);
        for (size_t i = 0; i < READERS; i++)
            assert_ok(call_end(&readers[i].call), readers[i].error);
        for (size_t i = 0; i < READERS; i++)
            check_bytes(&readers[i], step);
    }
}

/* ------------------------------------------------------------------------- traces */

static uint64_t number_behind(const char *text, const char *words)
{
    text = strstr(text, words);
    assert_non_null(text);
    return strtoull(text + strlen(words), NULL, 10);
}

static uint64_t ns_behind(const char *text, const char *words)
{
    uint64_t us = number_behind(text, words);
    return 1000 * us + number_behind(strstr(text, words), ".");
}

/* Viewers drop a span that begins within another one of its row and ends behind it. */
static void expect_nested(const char *text)
{
    for (const char *a = text; (a = strstr(a, "{\"ph\":\"X\"")); a++) {
        uint64_t began = ns_behind(a, "\"ts\":"),
                 ended = began + ns_behind(a, "\"dur\":");
        for (const char *b = text; (b = strstr(b, "{\"ph\":\"X\"")); b++) {
            uint64_t from = ns_behind(b, "\"ts\":"),
                     to = from + ns_behind(b, "\"dur\":");
            if (number_behind(a, "\"tid\":") == number_behind(b, "\"tid\":"))
                assert_true(to <= began || from >= ended ||
                            (from <= began && to >= ended) ||
                            (from >= began && to <= ended));
        }
    }
}

/* Marks the units of a span, "...: units 0-7 9-9". Each comes once. */
static void mark_units(const char *span, bool *units, size_t n)
{
    char *at = strstr(span, ": units ");
    assert_non_null(at);
    for (at += strlen(": units"); *at == ' ';) {
        size_t first = strtoull(at + 1, &at, 10);
        assert_int_equal(*at, '-');
        size_t last = strtoull(at + 1, &at, 10);
        assert_true(first <= last && last < n);
        for (size_t u = first; u <= last; u++) {
            assert_false(units[u]);
            units[u] = true;
        }
    }
}

/* What the trace in @p text says that holders and the trainer brought. */
static void read_brought(char *text, uint64_t bytes[2], bool *units, size_t n)
{
    char *line = NULL, *rest = text;
    while ((line = strtok_r(rest, "\n", &rest))) {
        if (!strstr(line, "\"name\":\"bring\""))
            continue;
        bool by_trainer = strstr(line, "\"about\":\"trainer: ") != NULL;
        assert_true(by_trainer || strstr(line, "\"about\":\"127.0.0.1:"));
        assert_int_equal(number_behind(line, "\"step\":"), 1);
        bytes[by_trainer] += number_behind(line, "\"bytes\":");
        mark_units(line, units, n);
    }
}

CASE(a_trace_tells_who_brought_which_units)
{
    char folder[] = "/tmp/relay-trace-XXXXXX", path[sizeof folder + 16];
    static char text[4 << 20];
    uint64_t bytes[2] = {0};
    begin_readers(2);
    expect_pull(&readers[0], 1);
    assert_non_null(mkdtemp(folder));
    snprintf(path, sizeof path, "%s/one.json", folder);
    assert_ok(fanin_trace_start(path, &readers[1].error), readers[1].error);
    expect_pull(&readers[1], 1);
    assert_ok(fanin_trace_stop(&readers[1].error), readers[1].error);
    FILE *file = fopen(path, "r");
    assert_non_null(file);
    text[fread(text, 1, sizeof text - 1, file)] = '\0';
    fclose(file);
    unlink(path);
    rmdir(folder);
    fanin_relay_stats s = stats_of(&readers[1]);
    bool *units = calloc(s.units, sizeof *units);
    assert_non_null(units);
    expect_nested(text);
    read_brought(text, bytes, units, s.units);
    assert_int_equal(bytes[false], s.bytes_from_relays);
    assert_int_equal(bytes[true], s.bytes_from_origin);
    for (size_t u = 0; u < s.units; u++)
        assert_true(units[u]);
    free(units);
}

/* ------------------------------------------------------------------------- sites */

static void open_at(size_t i, const char *where)
{
    ways.place = where;
    relay_reader_open(&readers[i], 0);
}

CASE(sites_hand_nothing_on_to_each_other)
{
    begin_readers(0);
    open_at(0, "east/r1");
    open_at(1, "west/r1");
    open_at(2, NULL);
    for (size_t i = 0; i < 3; i++) {
        expect_pull(&readers[i], 1);
        fanin_relay_stats s = stats_of(&readers[i]);
        assert_int_equal(s.holders, 0);
        assert_int_equal(s.bytes_from_relays, 0);
        assert_int_equal(s.bytes_from_origin, all_bytes());
    }
    open_at(3, "west/r2");
    expect_pull_of_others(&readers[3], 1);
    assert_int_equal(stats_of(&readers[0]).bytes_handed_on, 0);
    assert_true(stats_of(&readers[1]).bytes_handed_on > 0);
    assert_int_equal(stats_of(&readers[2]).bytes_handed_on, 0);
}

static uint64_t from_origin(size_t first, size_t n)
{
    uint64_t sum = 0;
    for (size_t i = first; i < first + n; i++)
        sum += stats_of(&readers[i]).bytes_from_origin;
    return sum;
}

/* Duties that are late on a busy machine are read twice now and then. */
CASE(each_site_takes_a_step_of_the_trainer_once)
{
    enum { EAST = 2, WEST = 3 };
    static const char *const places[] = {"east/r1", "east/r1", "west/r1", "west/r1",
                                         "west/r2"};
    bool once = false;
    begin_readers(0);
    for (size_t i = 0; i < EAST + WEST; i++)
        open_at(i, places[i]);
    for (uint64_t step = 1; !once && step < 20; step++) {
        uint64_t east = from_origin(0, EAST), west = from_origin(EAST, WEST);
        if (step > 1)
            world_commit(&w, step);
        for (size_t i = 0; i < EAST + WEST; i++)
            call_start(&readers[i].call, relay_pull, &readers[i]);
        for (size_t i = 0; i < EAST + WEST; i++)
            assert_ok(call_end(&readers[i].call), readers[i].error);
        for (size_t i = 0; i < EAST + WEST; i++)
            check_bytes(&readers[i], step);
        east = from_origin(0, EAST) - east;
        west = from_origin(EAST, WEST) - west;
        assert_true(east >= all_bytes() && west >= all_bytes());
        once = east == all_bytes() && west == all_bytes();
        for (size_t i = 0; i < EAST + WEST; i++)
            assert_true(stats_of(&readers[i]).holders < (i < EAST ? EAST : WEST));
    }
    assert_true(once);
}

/* ------------------------------------------------------------------------- faults */

/* A read costs about as much whatever it brings. */
CASE(a_reader_of_memory_reads_few_batches)
{
    if (!world_has_cma())
        skip();
    begin_readers(0);
    ways.path = FANIN_PATH_CMA;
    relay_reader_open(&readers[0], 0);
    relay_reader_open(&readers[1], 0);
    strike_after(0, NULL);
    expect_pull(&readers[0], 1);
    assert_true(stats_of(&readers[0]).units > 16);
    assert_in_range(-strike_left(), 1, 4);
    expect_pull(&readers[1], 1);
}

static void pause_ranks(void)
{
    for (size_t i = 0; i < w.size; i++)
        assert_int_equal(
            fanin_server_pause(w.ranks[i].server, "lora:0", "a test", NULL), FANIN_OK);
}

/* What others hold of the step is all of it, so that the pull ends with it. */
CASE(an_update_meanwhile_is_no_matter_where_others_hold_all)
{
    w.lease_ms = 1;
    begin_readers(2);
    expect_pull(&readers[0], 1);
    readers[1].options.rule =
        FANIN_STEP_EXACT; /* else it may begin anew, with step 2 */
    readers[1].options.step = 1;
    expect_pull_without_trainer(&readers[1], commit_2);
    readers[1].options.rule = FANIN_STEP_NEWEST;
    expect_pull(&readers[0], 2);
    expect_pull(&readers[1], 2);
}

CASE(who_is_alone_begins_again_after_an_update)
{
    w.lease_ms = 1;
    begin_readers(1);
    strike_after(2, commit_2);
    assert_ok(relay_pull(&readers[0]), readers[0].error);
    check_bytes(&readers[0], 2);
    assert_int_equal(readers[0].info.restarts, 1);
}

CASE(a_pause_meanwhile_leaves_the_others)
{
    begin_readers(2);
    expect_pull(&readers[0], 1);
    expect_pull_without_trainer(&readers[1], pause_ranks);
}

static void remove_run(void)
{
    fanin_error error = FANIN_ERROR_INIT;
    for (size_t i = 0; i < w.size; i++)
        assert_ok(fanin_server_remove(w.ranks[i].server, "lora:0", NULL, &error),
                  error);
}

/* What others hold of the step is what was committed. */
CASE(a_run_that_is_removed_meanwhile_leaves_the_others)
{
    w.lease_ms = 1;
    begin_readers(2);
    expect_pull(&readers[0], 1);
    strike_after(2, remove_run);
    expect_pull(&readers[1], 1);
    assert_true(strike_left() <= 0);
}

CASE(a_trainer_that_goes_meanwhile_leaves_the_others)
{
    begin_readers(2);
    expect_pull(&readers[0], 1);
    expect_pull_without_trainer(&readers[1], stop_ranks);
}

/* As a plain client's: who is gone is not waited for to the deadline. */
CASE(a_trainer_that_goes_meanwhile_is_told_where_nobody_holds_the_rest)
{
    begin_readers(1);
    strike_after(2, stop_ranks);
    assert_int_equal(relay_pull(&readers[0]), FANIN_ERR_UNREACHABLE);
    assert_true(readers[0].error.rank >= 0);
}

/* The trainer's thread may find that before the calling one does. */
CASE(a_pull_whose_time_runs_out_between_two_reads_fails)
{
    begin_readers(1);
    end_time_at_read(2);
    assert_int_equal(relay_pull(&readers[0]), FANIN_ERR_TIMEOUT);
    assert_says(readers[0].error.message,
                " units of step 1 missing (the trainer was to bring them)");
    expect_pull(&readers[0], 1);
}

static sem_t held;

static void hold(void *cookie)
{
    (void)cookie;
    sem_wait(&held);
}

CASE(a_rank_that_falls_silent_is_named)
{
    rank_proxy proxy;
    sem_init(&held, 0, 0);
    begin_readers(0);
    rank_proxy_start(&proxy, fanin_server_port(w.ranks[1].server), MSG_READ, hold,
                     NULL);
    w.address_list[1] = proxy.address;
    ways.lost_ms = 60000;
    relay_reader_open(&readers[0], 0);
    atomic_store(&proxy.triggered, true); /* not by the first pull, which connects */
    expect_pull(&readers[0], 1);
    atomic_store(&proxy.triggered, false);
    readers[0].options.timeout_ms = 2000;
    assert_int_equal(relay_pull(&readers[0]), FANIN_ERR_TIMEOUT);
    assert_int_equal(readers[0].error.rank, 1);
    assert_string_equal(readers[0].error.address, proxy.address);
    assert_non_null(strstr(readers[0].error.message, "last heard of"));
    sem_post(&held);
    relay_reader_close(&readers[0]);
    rank_proxy_stop(&proxy);
}

static void withdraw_step(void)
{
    for (size_t i = 0; i < w.size; i++)
        (void)!fanin_server_withdraw(w.ranks[i].server, "lora:0", NULL);
}

/* Its bytes were wrong, also those that others hold. */
CASE(a_step_that_is_taken_back_is_not_had_of_others)
{
    begin_readers(2);
    expect_pull(&readers[0], 1);
    strike_after(2, withdraw_step);
    readers[1].options.rule = FANIN_STEP_EXACT;
    readers[1].options.step = 1;
    assert_int_equal(relay_pull(&readers[1]), FANIN_ERR_STALE);
    assert_non_null(strstr(readers[1].error.message, "has taken step 1 back"));
    readers[1].options.rule = FANIN_STEP_NEWEST;
    world_commit(&w, 2);
    expect_pull(&readers[1], 2);
}

static void nap(void *cookie)
{
    (void)cookie;
    usleep(1500000);
}

/* A rank that is busy is not one that is away. */
CASE(a_step_that_is_taken_back_is_found_though_the_rank_answers_late)
{
    rank_proxy proxy;
    world_begin(&w, 1, CUT_CHUNK0, 1);
    ways_reset(&w);
    ways.lost_ms = 10000;
    relay_reader_open(&readers[0], 0);
    expect_pull(&readers[0], 1);
    rank_proxy_start(&proxy, fanin_server_port(w.ranks[0].server), MSG_LIST, nap, NULL);
    w.address_list[0] = proxy.address;
    relay_reader_open(&readers[1], 0);
    readers[1].options.max_attempts = 1;
    strike_after(2, withdraw_step);
    fanin_status status = relay_pull(&readers[1]);
    relay_reader_close(&readers[1]);
    rank_proxy_stop(&proxy);
    assert_true(atomic_load(&proxy.triggered));
    assert_int_equal(status, FANIN_ERR_STALE);
}

static void abort_update(void)
{
    for (size_t i = 0; i < w.size; i++) {
        assert_works(fanin_server_begin_update(w.ranks[i].server, "lora:0", ERROR));
        assert_works(fanin_server_abort_update(w.ranks[i].server, "lora:0", ERROR));
    }
}

/* The step before is good. */
CASE(a_step_whose_next_update_is_aborted_is_had_of_others)
{
    begin_readers(2);
    expect_pull(&readers[0], 1);
    strike_after(2, abort_update);
    readers[1].options.rule = FANIN_STEP_EXACT;
    readers[1].options.step = 1;
    expect_pull(&readers[1], 1);
}

static void withdraw_and_commit_2(void)
{
    withdraw_step();
    commit_2();
}

CASE(a_step_that_was_taken_back_before_the_next_is_not_had_of_others)
{
    begin_readers(2);
    expect_pull(&readers[0], 1);
    strike_after(2, withdraw_and_commit_2);
    readers[1].options.rule = FANIN_STEP_EXACT;
    readers[1].options.step = 1;
    assert_int_not_equal(relay_pull(&readers[1]), FANIN_OK);
    readers[1].options.rule = FANIN_STEP_NEWEST;
    expect_pull(&readers[1], 2);
}

/* Who has had it, and offers it still, asks whether it stands. */
CASE(a_step_that_was_taken_back_is_not_had_of_others_again)
{
    begin_readers(2);
    expect_pull(&readers[0], 1);
    expect_pull(&readers[1], 1);
    withdraw_and_commit_2();
    readers[1].options.rule = FANIN_STEP_EXACT;
    readers[1].options.step = 1;
    assert_int_equal(relay_pull(&readers[1]), FANIN_ERR_STALE);
    readers[1].options.rule = FANIN_STEP_NEWEST;
    expect_pull(&readers[1], 2);
}

/* On the same ports, of another launch: its step 1 is another one. */
CASE(a_restarted_trainer_is_another_world)
{
    begin_readers(2);
    expect_pull(&readers[0], 1);
    stop_ranks();
    w.id[3] ^= 0x5a;
    w.salt = 9;
    for (size_t i = 0; i < w.size; i++)
        world_restart_rank(&w, i);
    world_commit(&w, 1);
    expect_pull(&readers[1], 1);
    expect_pull(&readers[0], 1);
    assert_int_equal(stats_of(&readers[0]).holders, 1);
}

/* Its ranks are other processes, though the world id and the step are those of before. */
CASE(a_trainer_that_restarts_with_its_world_id_is_another_one)
{
    begin_readers(3);
    expect_pull(&readers[0], 1);
    expect_pull(&readers[1], 1);
    stop_ranks();
    w.salt = 9;
    for (size_t i = 0; i < w.size; i++)
        world_restart_rank(&w, i);
    world_commit(&w, 1);
    usleep(700000); /* both may have looked for the ranks, twice */
    expect_pull(&readers[2], 1);
    assert_int_equal(stats_of(&readers[2]).holders, 0);
    expect_pull(&readers[0], 1);
}

CASE(what_is_released_is_read_by_nobody)
{
    begin_readers(2);
    expect_pull(&readers[0], 1);
    fanin_relay_release(readers[0].relay);
    for (size_t i = 0; i < w.n_tensors; i++)
        memset(readers[0].boxes[i].address, 0xee, world_bytes(&w.tensors[i]));
    expect_pull(&readers[1], 1);
    assert_int_equal(stats_of(&readers[1]).bytes_from_relays, 0);
    fanin_relay_release(readers[0].relay);
    fanin_relay_release(NULL);
}

CASE(others_that_want_something_else_are_let_alone)
{
    begin_readers(2);
    expect_pull(&readers[0], 1);
    w.n_tensors -= 2;
    expect_pull(&readers[1], 1);
    assert_int_equal(stats_of(&readers[1]).holders, 0);
    w.n_tensors += 2;
}

CASE(verify_asks_the_trainer_for_what_relays_brought)
{
    begin_readers(2);
    expect_pull(&readers[0], 1);
    readers[1].options.verify = true;
    expect_pull_of_others(&readers[1], 1);
    assert_true(readers[1].info.verified);
}

/* Nobody can tell a reader's own memory from what it has read: verify does. */
CASE(altered_bytes_of_a_relay_are_found)
{
    begin_readers(2);
    expect_pull(&readers[0], 1);
    for (size_t i = 0; i < w.n_tensors; i++)
        memset(readers[0].boxes[i].address, 0xee, world_bytes(&w.tensors[i]));
    readers[1].options.verify = true;
    assert_int_equal(pull_of_others(&readers[1]), FANIN_ERR_TRANSPORT);
    assert_non_null(strstr(readers[1].error.message, "the relay at 127.0.0.1:"));
    assert_non_null(strstr(readers[1].error.key, "base_model"));
    uint64_t relayed = stats_of(&readers[1]).bytes_from_relays;
    expect_pull(&readers[1], 1); /* though it is listed yet */
    assert_int_equal(stats_of(&readers[1]).bytes_from_relays, relayed);
}

CASE(a_pull_can_be_cancelled)
{
    begin_readers(1);
    readers[0].options.rule = FANIN_STEP_EXACT;
    readers[0].options.step = 7; /* nobody commits it */
    call_start(&readers[0].call, relay_pull, &readers[0]);
    assert_false(call_returns(&readers[0].call, 50));
    fanin_relay_cancel(readers[0].relay);
    assert_int_equal(call_end(&readers[0].call), FANIN_ERR_CANCELLED);
    fanin_relay_cancel(NULL);
    readers[0].options.step = 1;
    expect_pull(&readers[0], 1);
}

CASE(bad_calls_are_refused)
{
    fanin_relay *relay = NULL;
    const char *none[] = {NULL};
    begin_readers(1);
    assert_int_equal(fanin_relay_create(NULL, NULL, 1, &relay, NULL),
                     FANIN_ERR_ARGUMENT);
    assert_int_equal(fanin_relay_create(NULL, none, 1, &relay, NULL),
                     FANIN_ERR_ARGUMENT);
    assert_int_equal(fanin_relay_create(NULL, none, 1, NULL, NULL), FANIN_ERR_ARGUMENT);
    assert_null(relay);
    fanin_relay_config config;
    fanin_error error = FANIN_ERROR_INIT;
    fanin_relay_config_init(&config, sizeof config);
    config.place = "east/r1/h3";
    assert_int_equal(fanin_relay_create(&config, w.address_list, 1, &relay, &error),
                     FANIN_ERR_ARGUMENT);
    assert_says(error.message, "'east/r1/h3' is no place");
    setenv("FANIN_PLACE", "\n", 1);
    assert_int_equal(fanin_relay_create(NULL, w.address_list, 1, &relay, &error),
                     FANIN_ERR_ARGUMENT);
    assert_says(error.message, "FANIN_PLACE");
    unsetenv("FANIN_PLACE");
    reader *r = &readers[0];
    assert_int_equal(
        fanin_relay_pull_into(NULL, &r->options, r->tensors, 1, NULL, NULL),
        FANIN_ERR_ARGUMENT);
    assert_int_equal(fanin_relay_pull_into(r->relay, NULL, r->tensors, 1, NULL, NULL),
                     FANIN_ERR_ARGUMENT);
    assert_int_equal(fanin_relay_pull_into(r->relay, &r->options, NULL, 1, NULL, NULL),
                     FANIN_ERR_ARGUMENT);
    r->options.timeout_ms = 0;
    assert_int_equal(relay_pull(r), FANIN_ERR_ARGUMENT);
    r->options.timeout_ms = 20000;
    r->options.publication = "lora:other";
    assert_int_equal(relay_pull(r), FANIN_ERR_NOT_FOUND);
    r->options.publication = "lora:0";
    expect_pull(r, 1);
}

/* ------------------------------------------------------------- readers that are lost */

CASE(a_holder_in_another_process_is_read)
{
    begin_readers(1);
    start_holder();
    expect_pull_of_others(&readers[0], 1);
    kill_holder();
    world_commit(&w, 2);
    expect_pull(&readers[0], 2);
}

CASE(a_holder_that_is_killed_meanwhile_is_done_without)
{
    begin_readers(1);
    start_holder();
    strike_after(2, kill_holder);
    expect_pull(&readers[0], 1);
}

CASE(a_holder_that_is_stopped_is_done_without)
{
    begin_readers(2);
    start_holder();
    strike_after(2, stop_holder);
    expect_pull(&readers[0], 1);
    expect_pull(&readers[1], 1); /* its list has one that does not answer */
    kill_holder();
}

/* ---------------------------------------------------------------------- false relays */

static member marked(uint8_t mark)
{
    member m;
    memset(m.id, mark, sizeof m.id);
    return m;
}

CASE(entries_that_lead_to_nobody_are_done_without)
{
    fanin_client_config config;
    holders_list *lists[3];
    parts p;
    fanin_client_config_init(&config, sizeof config);
    begin_readers(2);
    assert_int_equal(
        parts_cut(&p, readers[0].tensors, w.n_tensors, UNIT, &readers[0].error),
        FANIN_OK);
    offer_falsely(&lists[0], &config, &p.holding, 1, marked(0xa1));
    offer_falsely(&lists[1], &config, &p.holding, fanin_server_port(w.ranks[0].server),
                  marked(0xa2));
    expect_pull(&readers[0], 1);
    assert_int_equal(stats_of(&readers[0]).bytes_from_relays, 0);
    assert_int_equal(stats_of(&readers[0]).holders, 2);
    offer_falsely(&lists[2], &config, &p.holding, fanin_server_port(w.ranks[1].server),
                  marked(0x01));
    expect_pull(&readers[1], 1);
    for (size_t i = 0; i < 3; i++)
        list_destroy(&lists[i]);
    parts_free(&p);
}

static atomic_uint twins_told;

static void count_twins(void *cookie, fanin_log_level level, const char *event,
                        const char *message)
{
    (void)cookie;
    (void)event;
    if (strstr(message, "another relay listens") && strstr(message, "behind NAT"))
        atomic_fetch_add(&twins_told, level <= FANIN_LOG_WARNING);
}

/* The port of the one reader that has offered anything. */
static uint16_t port_of_reader(const fanin_client_config *config, const digest *holding)
{
    holders_list *list;
    member self = marked(0xa3);
    uint64_t seen = 0;
    holder *all;
    size_t n, port = 0;
    offer_falsely(&list, config, holding, 1, self);
    assert_true(list_copy(list, &self, &seen, &all, &n));
    assert_int_equal(n, 1);
    port = strtoul(strrchr(all->address, ':') + 1, NULL, 10);
    free(all);
    list_destroy(&list);
    return (uint16_t)port;
}

/* As of two hosts behind one NAT. Whoever answers there is read as itself alone. */
CASE(of_two_readers_at_one_address_the_other_is_told)
{
    fanin_client_config config;
    holders_list *twins[2];
    parts p;
    fanin_client_config_init(&config, sizeof config);
    begin_readers(1);
    ways.log = count_twins;
    atomic_store(&twins_told, 0);
    relay_reader_open(&readers[1], 0);
    assert_int_equal(
        parts_cut(&p, readers[0].tensors, w.n_tensors, UNIT, &readers[0].error),
        FANIN_OK);
    expect_pull(&readers[0], 1);
    uint16_t port = port_of_reader(&config, &p.holding);
    offer_falsely(&twins[0], &config, &p.holding, port, marked(0x01));
    offer_falsely(&twins[1], &config, &p.holding, port, marked(0xfe));
    expect_pull_of_others(&readers[1], 1);
    deadline until = deadline_in_ms(20000);
    while (atomic_load(&twins_told) < 2 && !deadline_passed(until))
        expect_pull(&readers[1], 1);
    expect_pull(&readers[1], 1);
    assert_int_equal(atomic_load(&twins_told), 2);
    for (size_t i = 0; i < 2; i++)
        list_destroy(&twins[i]);
    parts_free(&p);
}

static void nothing(void *cookie)
{
    (void)cookie;
}

/* A relay whose publication is not what its offer says. */
CASE(a_relay_that_publishes_something_else_is_done_without)
{
    false_relay x;
    begin_readers(1);
    false_relay_cut(&x, &readers[0]);
    false_relay_open(&x, 2, 2);
    expect_pull(&readers[0], 1);
    assert_int_equal(stats_of(&readers[0]).bytes_from_relays, 0);
    false_relay_close(&x);
}

/* It says at once that it has nothing. Else readers that have all lost the trainer wait for each
   other. */
CASE(a_relay_that_has_nothing_is_not_waited_for)
{
    false_relay x;
    w.lease_ms = 1;
    begin_readers(1);
    false_relay_cut(&x, &readers[0]);
    false_relay_open(&x, x.parts.n, 0);
    strike_after(1, commit_2);
    readers[0].options.rule = FANIN_STEP_EXACT;
    readers[0].options.step = 1;
    uint64_t began = clock_ns();
    assert_int_equal(relay_pull(&readers[0]), FANIN_ERR_SUPERSEDED);
    assert_true(clock_ns() - began < UINT64_C(4500000000));
    false_relay_close(&x);
}

/* It has proven nothing, and says that it has all, or more than there is. */
CASE(a_relay_that_has_not_what_it_says_is_done_without)
{
    false_relay x;
    begin_readers(1);
    false_relay_cut(&x, &readers[0]);
    false_relay_open(&x, x.parts.n, 0);
    const landed_range lies[] = {{0, (uint32_t)x.parts.n},
                                 {0, (uint32_t)x.parts.n + 1},
                                 {UINT32_MAX, 1},
                                 {1, UINT32_MAX}};
    for (size_t i = 0; i < sizeof lies / sizeof *lies; i++) {
        falsify_landed(&lies[i]);
        expect_pull(&readers[0], 1);
        assert_int_equal(stats_of(&readers[0]).bytes_from_relays, 0);
    }
    false_relay_close(&x);
}

/* It is alive, so that nobody gives its connection up. */
CASE(a_relay_that_answers_and_sends_nothing_is_done_without)
{
    false_relay x;
    rank_proxy proxy;
    begin_readers(1);
    false_relay_cut(&x, &readers[0]);
    false_relay_serve(&x, x.parts.n, x.parts.n);
    rank_proxy_start(&proxy, fanin_server_port(x.server), MSG_READ, nothing, NULL);
    atomic_store(&proxy.drops, true);
    false_relay_offer(&x, (uint16_t)atoi(strchr(proxy.address, ':') + 1));
    fanin_status status = FANIN_OK;
    for (int tries = 0; status == FANIN_OK && tries < 20; tries++) {
        status = relay_pull(&readers[0]);
        if (atomic_load(&proxy.triggered))
            break;
    }
    assert_ok(status, readers[0].error);
    check_bytes(&readers[0], 1);
    assert_true(atomic_load(&proxy.triggered));
    assert_int_equal(stats_of(&readers[0]).bytes_from_relays, 0);
    false_relay_close(&x);
    rank_proxy_stop(&proxy);
}

/* Who has the secret is believed, by those that do not verify. */
CASE(a_relay_that_has_the_secret_and_forges_is_found)
{
    false_relay x;
    if (openssl_is_missing())
        skip();
    setenv("FANIN_SECRET_FILE", secret_of('1'), 1);
    begin_readers(0);
    ways.no_unix = true;
    relay_reader_open(&readers[0], 0);
    relay_reader_open(&readers[1], 0);
    false_relay_cut(&x, &readers[0]);
    for (size_t i = 0; i < w.n_tensors; i++)
        memset(readers[0].boxes[i].address, 0xee, world_bytes(&w.tensors[i]));
    false_relay_open(&x, x.parts.n, x.parts.n);
    readers[1].options.verify = true;
    assert_int_equal(pull_of_others(&readers[1]), FANIN_ERR_TRANSPORT);
    assert_says(readers[1].error.message, "brought other bytes than the trainer holds");
    uint64_t relayed = stats_of(&readers[1]).bytes_from_relays;
    expect_pull(&readers[1], 1);
    assert_true(readers[1].info.verified);
    assert_int_equal(stats_of(&readers[1]).bytes_from_relays, relayed);
    false_relay_close(&x);
    unsetenv("FANIN_SECRET_FILE");
    secrets_remove();
}

/* Entries are told again and again then. */
CASE(versions_of_the_list_that_go_back_do_no_harm)
{
    begin_readers(3);
    turn_versions_back(true);
    expect_pull(&readers[0], 1);
    expect_pull(&readers[1], 1);
    expect_pull_of_others(&readers[2], 1);
    assert_int_equal(stats_of(&readers[2]).holders, 2);
    relay_reader_close(&readers[0]);
    deadline until = deadline_in_ms(20000);
    do
        expect_pull(&readers[2], 1);
    while (stats_of(&readers[2]).holders != 1 && !deadline_passed(until));
    assert_int_equal(stats_of(&readers[2]).holders, 1);
}

static atomic_uint deaf_lists;

static void count_deaf(void *cookie, fanin_log_level level, const char *event,
                       const char *message)
{
    (void)cookie;
    (void)level;
    (void)event;
    if (strstr(message, "parked requests"))
        atomic_fetch_add(&deaf_lists, 1);
}

/* The rank parks 16 requests of a session, for ten seconds. */
CASE(who_tries_a_step_again_and_again_hears_of_others)
{
    begin_readers(1);
    expect_pull(&readers[0], 1);
    ways.log = count_deaf;
    atomic_store(&deaf_lists, 0);
    relay_reader_open(&readers[1], 0);
    for (int i = 0; i < 20; i++)
        expect_pull(&readers[1], 1);
    assert_int_equal(atomic_load(&deaf_lists), 0);
    for (int i = 0; i < 20; i++) {
        reader *r = &readers[1];
        assert_ok(fanin_relay_pull_into(r->relay, &r->options, r->tensors, w.n_tensors,
                                        NULL, &r->error),
                  r->error);
    }
    assert_int_equal(atomic_load(&deaf_lists), 0);
}

/* ------------------------------------------------------------------------ no threads */

CASE(without_threads_for_others_the_trainer_is_read)
{
    begin_readers(2);
    expect_pull(&readers[0], 1);
    refuse_threads("fanin-holder");
    expect_pull(&readers[1], 1);
    assert_int_equal(stats_of(&readers[1]).bytes_from_relays, 0);
    refuse_threads(NULL);
    expect_pull_of_others(&readers[1], 1);
}

CASE(without_a_thread_for_the_trainer_a_pull_fails)
{
    begin_readers(1);
    refuse_threads("fanin-origin");
    assert_int_equal(relay_pull(&readers[0]), FANIN_ERR_LIMIT);
    assert_says(readers[0].error.message, "fanin-origin");
    refuse_threads(NULL);
    expect_pull(&readers[0], 1);
}

CASE(without_a_thread_for_the_list_there_is_no_relay)
{
    fanin_relay *relay = NULL;
    fanin_error error = FANIN_ERROR_INIT;
    begin_readers(0);
    refuse_threads("fanin-list");
    assert_int_equal(fanin_relay_create(NULL, w.address_list, w.size, &relay, &error),
                     FANIN_ERR_LIMIT);
    assert_null(relay);
    assert_says(error.message, "fanin-list");
}

/* A rollback: the trainer holds one step, and others may hold earlier ones. */
CASE(a_step_that_the_trainer_has_passed_is_had_of_others)
{
    begin_readers(3);
    expect_pull(&readers[0], 1);
    world_commit(&w, 2);
    expect_pull(&readers[1], 2);
    readers[2].options.rule = FANIN_STEP_EXACT;
    readers[2].options.step = 1;
    expect_pull(&readers[2], 1);
    assert_int_equal(stats_of(&readers[2]).bytes_from_origin, 0);
    readers[2].options.verify = true;
    assert_int_equal(relay_pull(&readers[2]), FANIN_ERR_SUPERSEDED);
    assert_non_null(strstr(readers[2].error.message, "cannot compare any more"));
    readers[2].options.verify = false;
    fanin_relay_release(readers[0].relay);
    assert_int_equal(relay_pull(&readers[2]), FANIN_ERR_SUPERSEDED);
}

/* When a rollback is wanted most. A plain pull would wait for the trainer to be stable. */
CASE(a_passed_step_is_had_whatever_the_trainer_does)
{
    begin_readers(3);
    expect_pull(&readers[0], 1);
    world_commit(&w, 2);
    readers[1].options.rule = readers[2].options.rule = FANIN_STEP_EXACT;
    readers[1].options.step = readers[2].options.step = 1;
    pause_ranks();
    expect_pull(&readers[1], 1);
    fanin_relay_release(readers[0].relay);
    fanin_relay_release(readers[1].relay);
    uint64_t began = clock_ns();
    assert_int_equal(relay_pull(&readers[2]), FANIN_ERR_SUPERSEDED);
    assert_true(clock_ns() - began < UINT64_C(4500000000));
}

CASE(a_step_that_was_taken_back_is_had_of_nobody)
{
    begin_readers(2);
    expect_pull(&readers[0], 1);
    withdraw_step();
    world_commit(&w, 2);
    readers[1].options.rule = FANIN_STEP_EXACT;
    readers[1].options.step = 1;
    assert_int_equal(relay_pull(&readers[1]), FANIN_ERR_SUPERSEDED);
}

/* A replica that is stopped says nothing of its step, and is done without. */
CASE(a_step_of_now_is_had_though_a_rank_answers_no_look)
{
    rank_proxy proxy;
    sem_init(&held, 0, 0);
    world_begin(&w, 2, CUT_REPLICATE, 1);
    ways_reset(&w);
    rank_proxy_start(&proxy, fanin_server_port(w.ranks[1].server), MSG_LIST, hold,
                     NULL);
    w.address_list[1] = proxy.address;
    relay_reader_open(&readers[0], 0);
    expect_pull(&readers[0], 1); /* connects, and asks for no list */
    readers[0].options.rule = FANIN_STEP_EXACT;
    readers[0].options.step = 1;
    uint64_t began = clock_ns();
    fanin_status status = relay_pull(&readers[0]);
    assert_true(clock_ns() - began < UINT64_C(10000000000));
    sem_post(&held);
    assert_ok(status, readers[0].error);
    check_bytes(&readers[0], 1);
    relay_reader_close(&readers[0]);
    rank_proxy_stop(&proxy);
}

/* Who looks, and then begins, has one deadline for both. */
CASE(a_rank_that_is_stopped_costs_no_more_than_the_time)
{
    rank_proxy proxy;
    sem_init(&held, 0, 0);
    begin_readers(0);
    rank_proxy_start(&proxy, fanin_server_port(w.ranks[1].server), MSG_LIST, hold,
                     NULL);
    w.address_list[1] = proxy.address;
    ways.lost_ms = 60000;
    relay_reader_open(&readers[0], 0);
    expect_pull(&readers[0], 1); /* connects, and asks for no list */
    readers[0].options.rule = FANIN_STEP_EXACT;
    readers[0].options.step = 1;
    readers[0].options.timeout_ms = 2000;
    fanin_status status = FANIN_OK;
    uint64_t took = UINT64_MAX;
    /* Two times would be four seconds. On a busy machine one may take as long: once more, then. */
    for (int tries = 0; tries < 4 && took >= UINT64_C(3500000000); tries++) {
        uint64_t began = clock_ns();
        status = relay_pull(&readers[0]);
        took = clock_ns() - began;
    }
    sem_post(&held);
    relay_reader_close(&readers[0]);
    rank_proxy_stop(&proxy);
    assert_int_not_equal(status, FANIN_OK);
    assert_in_range(took, UINT64_C(1900000000), UINT64_C(3500000000));
}

/* A reader asks who held its last step before it has heard the list. */
CASE(a_step_that_was_taken_back_before_another_one_was_is_had_of_nobody)
{
    begin_readers(2);
    expect_pull(&readers[0], 1);
    readers[1].options.rule = FANIN_STEP_EXACT;
    readers[1].options.step = 1;
    expect_pull_of_others(&readers[1], 1);
    for (uint64_t step = 2; step < 4; step++) {
        withdraw_step();
        world_commit(&w, step);
    }
    assert_int_not_equal(relay_pull(&readers[1]), FANIN_OK);
}

/* Nobody else has it, so that to break the holder off is of no use. */
CASE(a_holder_of_a_passed_step_may_take_its_time)
{
    begin_readers(1);
    start_holder();
    world_commit(&w, 2);
    readers[0].options.rule = FANIN_STEP_EXACT;
    readers[0].options.step = 1;
    strike_after(2, stop_holder_for_a_second);
    fanin_status status = relay_pull(&readers[0]);
    kill_holder();
    assert_ok(status, readers[0].error);
    check_bytes(&readers[0], 1);
}

CASE(a_holder_that_stops_is_named_where_the_trainer_has_passed_the_step)
{
    begin_readers(0);
    ways.lost_ms = 60000;
    relay_reader_open(&readers[0], 0);
    start_holder();
    world_commit(&w, 2);
    readers[0].options.rule = FANIN_STEP_EXACT;
    readers[0].options.step = 1;
    readers[0].options.timeout_ms = 4000; /* the two batches come before */
    strike_after(2, stop_holder);
    fanin_status status = relay_pull(&readers[0]);
    kill_holder();
    assert_int_equal(status, FANIN_ERR_TIMEOUT);
    assert_non_null(strstr(readers[0].error.message, "the relay at "));
}

CASE(the_rank_that_has_taken_a_step_back_is_named)
{
    world_begin(&w, 2, CUT_REPLICATE, 1);
    ways_reset(&w);
    relay_reader_open(&readers[0], 0);
    relay_reader_open(&readers[1], 0);
    expect_pull(&readers[0], 1);
    readers[1].options.rule = FANIN_STEP_EXACT;
    readers[1].options.step = 1;
    expect_pull_of_others(&readers[1], 1);
    for (uint64_t step = 2; step < 4; step++) {
        withdraw_step();
        world_commit(&w, step);
    }
    world_stop_rank(&w, 0); /* the other one keeps the list now */
    assert_int_equal(relay_pull(&readers[1]), FANIN_ERR_STALE);
    assert_int_equal(readers[1].error.rank, 1);
}

/* Steps come while readers read: each has one whole step, whichever. */
CASE(steps_come_while_readers_read)
{
    w.lease_ms = 5;
    begin_readers(3);
    uint64_t step = 1;
    for (size_t round = 0; round < 10; round++) {
        for (size_t i = 0; i < READERS; i++)
            call_start(&readers[i].call, relay_pull, &readers[i]);
        for (size_t i = 0; i < 1 + round % 3; i++)
            world_commit(&w, ++step);
        for (size_t i = 0; i < READERS; i++)
            assert_ok(call_end(&readers[i].call), readers[i].error);
        for (size_t i = 0; i < READERS; i++)
            check_bytes(&readers[i], readers[i].info.step);
    }
}
