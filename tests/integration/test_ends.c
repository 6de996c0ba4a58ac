/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Between a pull's last byte and its end the rank, a process of its own, updates, takes its memory
 * away, dies or becomes another. Nothing counts then.
 */
#include "cma/cma.h"
#include "core/server_state.h"
#include "ends.h"
#include "local_world.h"
#include "obedient_rank.h"
#include "testing.h"
#include <poll.h>
#include <signal.h>
#include <sys/wait.h>

#define RUN "lora:0"
#define BYTES ((size_t)4 << 20)
#define PULLS 150

/* ------------------------------------------------------------------- the rank */

/* Writes and publishes until the next word comes. At times a read fits in between. */
static void update_on_and_on(obedience *o)
{
    struct pollfd next = {.fd = STDIN_FILENO, .events = POLLIN};
    for (int pause_ms = 0; poll(&next, 1, pause_ms) == 0;
         pause_ms = (pause_ms + 1) % 16)
        obedient_obey(o, 'c');
}

/* A copy of this process with all its memory, until the test closes the pipe. */
static void leave_a_child(obedience *o)
{
    if (fork() != 0)
        return;
    char none;
    close(o->answers);
    while (read(STDIN_FILENO, &none, 1) > 0)
        ;
    _exit(0);
}

static bool obey(obedience *o, char word)
{
    switch (word) {
    case 'o':
        update_on_and_on(o);
        return true;
    case 'p':
        obedient_need(fanin_server_pause(o->server, RUN, NULL, NULL) == FANIN_OK);
        return true;
    case 'b': /* back again */
        obedient_need(fanin_server_resume(o->server, RUN, NULL) == FANIN_OK);
        return true;
    case 'd':
        fanin_server_destroy(&o->server, 0);
        memset(o->memory, OVERWRITTEN, BYTES);
        return true;
    case 'f':
        leave_a_child(o);
        return true;
    case 'x':
        execlp("cat", "cat", (char *)NULL);
        return false;
    default:
        return false;
    }
}

static void live(obedience *o)
{
    o->size = BYTES;
    o->lease_ms = 1; /* updates do not wait for readers */
    o->memory = o->bytes = malloc(BYTES);
    o->more = obey;
    obedient_serve(o);
}

/* ------------------------------------------------------------------ this side */

static obedient_rank rank;
static fanin_client *client;
static fanin_session *session;
static fanin_error error = FANIN_ERROR_INIT;
static uint8_t *into;
static fanin_box box;
static fanin_tensor tensor;

static int set_up(void **state)
{
    char address[OBEDIENT_ADDRESS];
    fanin_client_config config = make_client_config();
    obedient_fork(&rank, 0, live);
    obedient_address(&rank, address);
    config.path = FANIN_PATH_CMA;
    config.threads = 1;
    const char *list[] = {address};
    client = connect_client(&config, list, 1);
    into = malloc(BYTES);
    tensor = make_tensor("a", FANIN_DTYPE_U8, BYTES, 0, &box, into);
    return 0;
}

static int tear_down(void **state)
{
    fanin_session_abandon(&session);
    fanin_client_destroy(&client);
    obedient_end(&rank);
    free(into);
    error = (fanin_error)FANIN_ERROR_INIT;
    return 0;
}

#define CASE(name) TEST_WITH(name, set_up, tear_down)

static void expect_step(uint64_t step)
{
    for (size_t i = 0; i < BYTES; i++)
        if (into[i] != (uint8_t)step)
            fail_msg("byte %zu is of step %u, not %u", i, (unsigned)into[i],
                     (unsigned)step);
}

/* All bytes are in place, and the lease's time is over or will be. */
static void read_all(void)
{
    const fanin_pull_options options = make_options(FANIN_STEP_NEWEST, 0);
    assert_ok(fanin_client_begin(client, &options, &tensor, 1, &session, &error),
              error);
    assert_ok(fanin_session_read(session, 0, 1, &error), error);
    expect_step(fanin_session_step(session));
}

static fanin_status end(void)
{
    return fanin_session_end(&session, NULL, &error);
}

/* What happened before the end makes what was read worthless, to a session and to the rank. */
static void expect_stale_after(const char *words)
{
    read_all();
    obedient_tell(&rank, words);
    assert_int_equal(end(), FANIN_ERR_STALE);
}

static void expect_lost(void)
{
    fanin_status status = end();
    if (status != FANIN_ERR_CLOSED && status != FANIN_ERR_UNREACHABLE)
        fail_msg("the end is %d: %s", (int)status, error.message);
}

/* ---------------------------------------------------------------------- tests */

CASE(updates_make_it_stale)
{
    expect_stale_after("c");
    expect_stale_after("cc");
    expect_stale_after("u");
}

CASE(pauses_make_it_stale)
{
    expect_stale_after("pb");
    expect_stale_after("p");
}

CASE(removals_make_it_stale)
{
    expect_stale_after("ra");
    expect_stale_after("r");
}

CASE(a_server_that_ended_confirms_nothing)
{
    read_all();
    obedient_tell(
        &rank, "d"); /* the process lives, and what it has freed may still be there */
    expect_lost();
}

CASE(a_killed_rank_confirms_nothing)
{
    read_all();
    obedient_kill(&rank);
    expect_lost();
}

CASE(another_program_confirms_nothing)
{
    char word = 'x';
    read_all();
    assert_int_equal(write(rank.to, &word, 1), 1);
    assert_int_equal(read(rank.from, &word, 1), 0); /* that program has no answers */
    expect_lost();
}

CASE(a_child_does_not_confirm_for_its_parent)
{
    read_all();
    obedient_tell(&rank, "f");
    obedient_kill(&rank);
    expect_lost();
}

/* It may have the rank's number when that is dead, and all of its memory but this page. */
TEST(a_child_lacks_the_witness)
{
    const uint8_t incarnation[16] = {1, 2, 3};
    uint8_t *witness = witness_make(incarnation);
    assert_non_null(witness);
    cma_process process = {.pid = getpid(), .witness = (uintptr_t)witness};
    memcpy(process.incarnation, incarnation, sizeof incarnation);
    assert_int_equal(cma_prove(&process), 0);
    process.pid = fork();
    if (process.pid == 0) {
        pause();
        _exit(0);
    }
    assert_int_equal(cma_prove(&process), ESTALE);
    kill(process.pid, SIGKILL);
    waitpid(process.pid, NULL, 0);
    witness_free(&witness);
}

/* Who is cancelled behind the last byte hears of it in this call, not in the next. */
CASE(a_cancel_behind_the_last_byte_counts)
{
    read_all();
    fanin_client_cancel(client);
    assert_int_equal(end(), FANIN_ERR_CANCELLED);
    read_all();
    assert_ok(end(), error);
}

CASE(what_is_accepted_among_updates_is_whole)
{
    const fanin_pull_options options = make_options(FANIN_STEP_NEWEST, 0);
    char on = 'o';
    unsigned good = 0;
    assert_int_equal(write(rank.to, &on, 1), 1);
    for (int i = 0; i < PULLS; i++) {
        fanin_result *result = NULL;
        fanin_result_info info = {.struct_size = sizeof info};
        fanin_status status =
            fanin_client_pull(client, &options, &tensor, 1, &result, &error);
        if (status != FANIN_ERR_STALE)
            assert_ok(status, error);
        if (status != FANIN_OK)
            continue;
        fanin_result_get(result, &info);
        expect_step(info.step);
        fanin_result_free(&result);
        good++;
    }
    assert_true(good > 0);
}

int main(void)
{
    if (!world_has_cma())
        return 77;
    return tests_run(NULL);
}
