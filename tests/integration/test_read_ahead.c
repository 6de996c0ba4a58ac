/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Reading before there is a lease: two ranks, processes of their own, whose tensors lie in device
 * memory. What happens between the look at their words and the moment they are asked is the test's:
 * the bytes are there already then.
 */
#include "call.h"
#include "ends.h"
#include "fake_cuda.h"
#include "local_world.h"
#include "log_catcher.h"
#include "messages.h"
#include "net/client_rules.h"
#include "obedient_rank.h"
#include "testing.h"
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define RANKS 2
#define BYTES ((size_t)1 << 20) /* of each */
#define PULLS 150
#define MOST_CASES 16
#define OLD OVERWRITTEN /* what lay in the destination before */

/* Until the first word nothing is set up: CUDA in a process that was forked from one that uses it
   would not work. */
static void live(obedience *o)
{
    char word;
    if (read(STDIN_FILENO, &word, 1) != 1)
        _exit(0);
    o->ranks = RANKS;
    o->size = BYTES;
    o->lease_ms = 5000;
    o->memory = fake_cuda_alloc(0, BYTES, FAKE_CUDA_MALLOC);
    o->bytes = fake_cuda_alias(o->memory);
    o->snapshots = word == 'S';
    obedient_serve(o);
}

/* ------------------------------------------------------------------ this side */

static obedient_rank waiting[MOST_CASES][RANKS]; /* one set a case */
static obedient_rank *ranks;                     /* of the case that runs */
static fanin_client *client;
static fanin_error error = FANIN_ERROR_INIT;
static uint8_t *into, *bytes; /* the destination, as above */
static fanin_box box;
static fanin_tensor tensor;
static uint64_t pulled; /* the step of the last pull */
/* Called right before the first rank is asked for its step; NULL: nothing is done. */
static void (*before_asking)(void);

void __real_encode_wait(buffer *w, uint64_t request, const msg_wait *m);
void __wrap_encode_wait(buffer *w, uint64_t request, const msg_wait *m);
void __wrap_encode_wait(buffer *w, uint64_t request, const msg_wait *m)
{
    void (*hook)(void) = before_asking;
    before_asking = NULL;
    if (hook)
        hook();
    __real_encode_wait(w, request, m);
}

static void tell(const char *words)
{
    for (unsigned i = 0; i < RANKS; i++)
        obedient_tell(&ranks[i], words);
}

static void start(const char *word)
{
    static unsigned next;
    char addresses[RANKS][OBEDIENT_ADDRESS];
    const char *list[RANKS];
    assert_true(next < MOST_CASES);
    ranks = waiting[next++];
    for (unsigned i = 0; i < RANKS; i++) {
        assert_int_equal(write(ranks[i].to, word, 1), 1);
        obedient_address(&ranks[i], addresses[i]);
        list[i] = addresses[i];
    }
    /* What was read ahead counts, however long this process was not let run. */
    atomic_store(&client_rules_off, CLIENT_RULE_HASTE);
    fanin_client_config config = make_client_config();
    config.path = FANIN_PATH_CUDA_IPC;
    config.log = log_catch;
    client = connect_client(&config, list, RANKS);
    into = fake_cuda_alloc(1, RANKS * BYTES, FAKE_CUDA_MALLOC);
    bytes = fake_cuda_alias(into);
    tensor = make_tensor("a", FANIN_DTYPE_U8, RANKS * BYTES, 0, &box, into);
    tensor.memory = (fanin_memory){FANIN_MEMORY_DETECT, -1};
}

static int set_up(void **state)
{
    start("s");
    return 0;
}

static int tear_down(void **state)
{
    fake_cuda_counts counts;
    atomic_store(&client_rules_off, 0);
    before_asking = NULL;
    fanin_client_destroy(&client);
    for (unsigned i = 0; i < RANKS; i++)
        obedient_end(&ranks[i]);
    fake_cuda_free(into);
    fake_cuda_count(&counts);
    assert_int_equal(counts.mappings, 0);
    assert_int_equal(counts.allocations, 0);
    error = (fanin_error)FANIN_ERROR_INIT;
    return 0;
}

/* ------------------------------------------------------------------- pulling */

static bool holds(uint64_t step)
{
    for (size_t i = 0; i < RANKS * BYTES; i++)
        if (bytes[i] != (uint8_t)step)
            return false;
    return true;
}

static fanin_status pull_by(fanin_step_rule rule, uint64_t step, uint32_t timeout_ms)
{
    fanin_pull_options options = make_options(rule, step);
    fanin_result_info info = {.struct_size = sizeof info};
    fanin_result *result = NULL;
    options.timeout_ms = timeout_ms;
    fanin_status status =
        fanin_client_pull(client, &options, &tensor, 1, &result, &error);
    if (status == FANIN_OK)
        fanin_result_get(result, &info);
    pulled = info.step;
    fanin_result_free(&result);
    return status;
}

static fanin_status pull_newest(void *cookie)
{
    (void)cookie;
    return pull_by(FANIN_STEP_NEWEST, 0, 20000);
}

static void expect_step(uint64_t step)
{
    assert_ok(pull_newest(NULL), error);
    assert_int_equal(pulled, step);
    assert_true(holds(step));
}

/* Pulls of a client that knows what it reads. */
static void warm_up(void)
{
    expect_step(1);
    memset(bytes, OLD, RANKS * BYTES);
    log_listen("read-ahead");
}

/* ------------------------------------------------- what happens before asking */

static void all_is_there(void)
{
    assert_true(fake_cuda_wait_idle(1));
}

static void nothing_is_there(void)
{
    all_is_there();
    assert_true(holds(OLD));
}

static void a_rank_dies(void)
{
    obedient_kill(&ranks[1]);
}

/* ---------------------------------------------------------------------- tests */

static int set_up_snapshots(void **state)
{
    start("S");
    return 0;
}

static void step_1_is_there(void)
{
    all_is_there();
    assert_true(holds(1));
}

static void step_2_is_there(void)
{
    all_is_there();
    assert_true(holds(2));
}

static void an_update_goes_by(void)
{
    step_1_is_there();
    tell("c");
}

static void one_rank_updates(void)
{
    step_1_is_there();
    obedient_tell(&ranks[1], "u");
}

static void all_is_replaced(void)
{
    step_1_is_there();
    tell("ra");
}

static void a_rank_stops(void)
{
    step_1_is_there();
    obedient_stop(&ranks[1]);
}

static void it_is_cancelled(void)
{
    assert_true(fake_cuda_wait_kernel_held(1));
    fanin_client_cancel(client);
}

static void bytes_are_there_before_ranks_are_asked(void **state)
{
    warm_up();
    before_asking = step_1_is_there;
    expect_step(1);
    log_expect(1, "begun"); /* and nothing was dropped */
    tell("c");
    memset(bytes, OLD, RANKS * BYTES);
    before_asking = step_2_is_there;
    expect_step(2);
    log_expect(2, "begun");
}

static void what_was_overtaken_is_read_again(void **state)
{
    warm_up();
    before_asking = an_update_goes_by;
    expect_step(2);
    log_expect(2, "dropped");
}

/* That it is the comparison of epochs which keeps bytes and step together. */
static void without_the_rule_bytes_are_of_another_step(void **state)
{
    warm_up();
    atomic_store(&client_rules_off, CLIENT_RULE_AHEAD | CLIENT_RULE_HASTE);
    before_asking = an_update_goes_by;
    assert_ok(pull_newest(NULL), error);
    assert_int_equal(pulled, 2);
    assert_true(holds(1));
}

static void where_it_was_in_vain_the_next_pull_does_without(void **state)
{
    warm_up();
    before_asking = an_update_goes_by;
    expect_step(2);
    log_listen("read-ahead");
    before_asking = step_2_is_there; /* from before */
    expect_step(2);
    log_expect(0, "");
    expect_step(2);
    log_expect(1, "begun");
}

static void open_updates_are_not_read(void **state)
{
    warm_up();
    tell("u");
    before_asking = nothing_is_there;
    assert_int_equal(pull_by(FANIN_STEP_NEWEST, 0, 300), FANIN_ERR_TIMEOUT);
    log_expect(0, "");
    tell("e");
    expect_step(2);
}

static void ranks_of_two_steps_are_not_read(void **state)
{
    warm_up();
    obedient_tell(&ranks[0], "c");
    before_asking = nothing_is_there;
    assert_int_equal(pull_by(FANIN_STEP_NEWEST, 0, 300), FANIN_ERR_TIMEOUT);
    log_expect(0, "");
    obedient_tell(&ranks[1], "c");
    expect_step(2);
}

static void a_step_that_will_not_do_is_not_read(void **state)
{
    warm_up();
    before_asking = nothing_is_there;
    assert_int_equal(pull_by(FANIN_STEP_EXACT, 5, 300), FANIN_ERR_TIMEOUT);
    before_asking = nothing_is_there;
    assert_int_equal(pull_by(FANIN_STEP_AT_LEAST, 2, 300), FANIN_ERR_TIMEOUT);
    tell("c");
    before_asking = nothing_is_there;
    assert_int_equal(pull_by(FANIN_STEP_EXACT, 1, 300), FANIN_ERR_SUPERSEDED);
    log_expect(0, "");
    assert_true(holds(OLD));
    before_asking = step_2_is_there;
    assert_ok(pull_by(FANIN_STEP_AT_LEAST, 2, 20000), error);
    assert_int_equal(pulled, 2);
}

static void a_rank_that_has_begun_to_write_is_waited_for(void **state)
{
    warm_up();
    before_asking = one_rank_updates;
    assert_int_equal(pull_by(FANIN_STEP_NEWEST, 0, 300), FANIN_ERR_TIMEOUT);
    log_expect(2, "dropped");
    obedient_tell(&ranks[0], "c");
    obedient_tell(&ranks[1], "e");
    expect_step(2);
}

static void what_was_replaced_is_read_anew(void **state)
{
    warm_up();
    before_asking = all_is_replaced;
    expect_step(2);
}

/* Its words say that all stands, and it grants nothing. The same client goes on when the rank does.
   */
static void a_rank_that_stops_is_told_and_read_again(void **state)
{
    warm_up();
    before_asking = a_rank_stops;
    assert_int_equal(pull_by(FANIN_STEP_NEWEST, 0, 2000), FANIN_ERR_TIMEOUT);
    assert_int_equal(error.rank, 1);
    log_expect(2, "dropped");
    kill(ranks[1].pid, SIGCONT);
    expect_step(1);
    tell("c");
    expect_step(2);
}

/* The destination may be given back as soon as the call has returned. */
static void nothing_is_written_after_the_return(void **state)
{
    call pulling;
    warm_up();
    fake_cuda_hold_kernel(1, 0);
    before_asking = it_is_cancelled;
    call_start(&pulling, pull_newest, NULL);
    assert_false(call_returns(&pulling, 50));
    fake_cuda_release(1);
    assert_int_equal(call_end(&pulling), FANIN_ERR_CANCELLED);
    memset(bytes, OLD, RANKS * BYTES);
    all_is_there();
    assert_true(holds(OLD));
    expect_step(1);
}

static void snapshots_are_read_from_their_arena(void **state)
{
    warm_up();
    before_asking = step_1_is_there;
    expect_step(1);
    for (uint64_t step = 2; step < 6; step++) {
        tell("c");
        expect_step(step);
    }
}

static void a_rank_that_dies_is_told(void **state)
{
    warm_up();
    before_asking = a_rank_dies;
    fanin_status status = pull_by(FANIN_STEP_NEWEST, 0, 2000);
    assert_int_equal(status, FANIN_ERR_UNREACHABLE);
    assert_int_equal(error.rank, 1);
}

/* All ranks write and publish as fast as they can, step by step. */
static void *update_on_and_on(void *stop)
{
    while (!atomic_load((atomic_bool *)stop))
        tell("c");
    return NULL;
}

static void what_is_accepted_among_updates_is_whole(void **state)
{
    atomic_bool stop = false;
    pthread_t trainer;
    unsigned good = 0;
    warm_up();
    atomic_store(&client_rules_off, 0);
    assert_int_equal(pthread_create(&trainer, NULL, update_on_and_on, &stop), 0);
    for (int i = 0; i < PULLS; i++) {
        fanin_status status = pull_by(FANIN_STEP_NEWEST, 0, 200);
        if (status == FANIN_ERR_STALE || status == FANIN_ERR_TIMEOUT)
            continue;
        assert_ok(status, error);
        good++;
        if (!holds(pulled))
            fail_msg("pull %d is not of step %u", i, (unsigned)pulled);
    }
    atomic_store(&stop, true);
    pthread_join(trainer, NULL);
    assert_true(good > 0);
}

#define CASE(name) cmocka_unit_test_setup_teardown(name, set_up, tear_down)

int main(void)
{
    const struct CMUnitTest tests[] = {
        CASE(bytes_are_there_before_ranks_are_asked),
        CASE(what_was_overtaken_is_read_again),
        CASE(without_the_rule_bytes_are_of_another_step),
        CASE(where_it_was_in_vain_the_next_pull_does_without),
        CASE(open_updates_are_not_read),
        CASE(ranks_of_two_steps_are_not_read),
        CASE(a_step_that_will_not_do_is_not_read),
        CASE(a_rank_that_has_begun_to_write_is_waited_for),
        CASE(what_was_replaced_is_read_anew),
        CASE(nothing_is_written_after_the_return),
        cmocka_unit_test_setup_teardown(snapshots_are_read_from_their_arena,
                                        set_up_snapshots, tear_down),
        CASE(a_rank_that_dies_is_told),
        CASE(a_rank_that_stops_is_told_and_read_again),
        CASE(what_is_accepted_among_updates_is_whole),
    };
    const char *library = getenv("FANIN_TEST_CUDA_LIBRARY");
    if (!library || !world_has_cma())
        return 77;
    setenv("FANIN_CUDA_LIBRARY", library, 1);
    for (size_t i = 0; i < sizeof tests / sizeof *tests; i++)
        for (unsigned j = 0; j < RANKS; j++)
            obedient_fork(&waiting[i][j], j, live);
    return cmocka_run_group_tests_name("read-ahead", tests, NULL, NULL);
}
