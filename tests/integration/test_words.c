/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Ends that nobody waits for: between a pull's last byte and its end the rank, a process of its own, updates, takes its
 * memory away, dies or becomes another. Nothing counts then; and a rank that merely does not answer is not asked.
 */
#include "ends.h"
#include "local_world.h"
#include "testing.h"
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#define RUN "lora:0"
#define BYTES ((size_t)4 << 20)
#define PULLS 150

/* ------------------------------------------------------------------- the rank */

static int to_rank[2], from_rank[2];

/* In the rank's process. */
static struct {
    fanin_server *server;
    uint8_t *memory;
    uint64_t step;
} here;

static void need(bool good)
{
    if (!good)
        _exit(1);
}

static void put_shard(void)
{
    fanin_box box;
    const fanin_tensor tensor =
        make_tensor("a", FANIN_DTYPE_U8, BYTES, 0, &box, here.memory);
    need(fanin_server_put(here.server, RUN, &tensor, 1, false, NULL) == FANIN_OK);
}

static void begin_update(void)
{
    need(fanin_server_begin_update(here.server, RUN, NULL) == FANIN_OK);
}

static void commit_next(void)
{
    memset(here.memory, (int)(++here.step & 0xff), BYTES);
    need(fanin_server_commit(here.server, RUN, here.step, NULL, NULL) == FANIN_OK);
}

/* Writes and publishes as fast as it can, until the next word comes. */
static void update_on_and_on(void)
{
    struct pollfd next = {.fd = STDIN_FILENO, .events = POLLIN};
    while (poll(&next, 1, 0) == 0) {
        begin_update();
        commit_next();
    }
}

/* A copy of this process with all its memory, until the test closes the pipe. */
static void leave_a_child(void)
{
    if (fork() != 0)
        return;
    char none;
    close(from_rank[1]);
    while (read(STDIN_FILENO, &none, 1) > 0)
        ;
    _exit(0);
}

static void obey(char word)
{
    switch (word) {
    case 'u': /* an update is open */
        begin_update();
        memset(here.memory, 0xee, BYTES);
        break;
    case 'c': /* one went by */
        begin_update();
        commit_next();
        break;
    case 'o':
        update_on_and_on();
        break;
    case 'p':
        need(fanin_server_pause(here.server, RUN, NULL, NULL) == FANIN_OK);
        break;
    case 'b': /* back again */
        need(fanin_server_resume(here.server, RUN, NULL) == FANIN_OK);
        break;
    case 'r':
        need(fanin_server_remove(here.server, RUN, NULL, NULL) == FANIN_OK);
        break;
    case 'a': /* added again */
        put_shard();
        commit_next();
        break;
    case 'd':
        fanin_server_destroy(&here.server, 0);
        memset(here.memory, 0xee, BYTES);
        break;
    case 'f':
        leave_a_child();
        break;
    case 'x':
        execlp("cat", "cat", (char *)NULL);
        break;
    default:
        _exit(0);
    }
}

static void serve(void)
{
    char address[64], word;
    fanin_server_config config = make_server_config();
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    config.lease_ms = 1;
    here.server = make_server(&config, address, sizeof address);
    here.memory = malloc(BYTES);
    put_shard();
    commit_next();
    need(write(from_rank[1], address, sizeof address) == sizeof address);
    while (read(STDIN_FILENO, &word, 1) == 1) {
        obey(word);
        need(write(from_rank[1], &word, 1) == 1);
    }
    _exit(0);
}

/* ------------------------------------------------------------------ this side */

static pid_t rank;
static fanin_client *client;
static fanin_session *session;
static fanin_error error = FANIN_ERROR_INIT;
static uint8_t *into;
static fanin_box box;
static fanin_tensor tensor;

static int set_up(void **state)
{
    char address[64];
    fanin_client_config config = make_client_config();
    assert_int_equal(pipe2(to_rank, O_CLOEXEC), 0);
    assert_int_equal(pipe2(from_rank, O_CLOEXEC), 0);
    rank = fork();
    assert_true(rank >= 0);
    if (rank == 0) {
        dup2(to_rank[0], STDIN_FILENO);
        close(to_rank[0]);
        close(to_rank[1]);
        close(from_rank[0]);
        serve();
    }
    close(to_rank[0]);
    close(from_rank[1]);
    assert_int_equal(read(from_rank[0], address, sizeof address), sizeof address);
    config.path = FANIN_PATH_CMA;
    config.threads = 1;
    const char *list[] = {address};
    client = connect_client(&config, list, 1);
    into = malloc(BYTES);
    tensor = make_tensor("a", FANIN_DTYPE_U8, BYTES, 0, &box, into);
    return 0;
}

static void kill_rank(void)
{
    int status;
    kill(rank, SIGKILL);
    assert_int_equal(waitpid(rank, &status, 0), rank);
    rank = 0;
}

static int tear_down(void **state)
{
    fanin_session_abandon(&session);
    fanin_client_destroy(&client);
    if (rank)
        kill_rank();
    close(to_rank[1]);
    close(from_rank[0]);
    free(into);
    error = (fanin_error)FANIN_ERROR_INIT;
    return 0;
}

/* Returns when the rank has done each; of another program it hears no more. */
static void tell(const char *words)
{
    for (; *words; words++) {
        char done;
        assert_int_equal(write(to_rank[1], words, 1), 1);
        assert_int_equal(read(from_rank[0], &done, 1), *words != 'x');
    }
}

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
    tell(words);
    assert_int_equal(end(), FANIN_ERR_STALE);
}

static void expect_lost(void)
{
    fanin_status status = end();
    if (status != FANIN_ERR_CLOSED && status != FANIN_ERR_UNREACHABLE)
        fail_msg("the end is %d: %s", (int)status, error.message);
}

/* ---------------------------------------------------------------------- tests */

static void a_rank_that_stands_still_is_not_waited_for(void **state)
{
    int status;
    read_all();
    kill(rank, SIGSTOP);
    assert_int_equal(waitpid(rank, &status, WUNTRACED), rank);
    assert_true(WIFSTOPPED(status));
    assert_ok(end(), error);
    kill(rank, SIGCONT);
    for (int i = 0; i < 3; i++) { /* nor is the next pull confused */
        read_all();
        assert_ok(end(), error);
    }
    tell("c"); /* no lease is left */
    read_all();
    assert_int_equal(fanin_session_step(session), 2);
    assert_ok(end(), error);
}

static void updates_make_it_stale(void **state)
{
    expect_stale_after("c");
    expect_stale_after("cc");
    expect_stale_after("u");
}

static void pauses_make_it_stale(void **state)
{
    expect_stale_after("pb");
    expect_stale_after("p");
}

static void removals_make_it_stale(void **state)
{
    expect_stale_after("ra");
    expect_stale_after("r");
}

static void a_server_that_ended_confirms_nothing(void **state)
{
    read_all();
    tell("d"); /* the process lives, and what it has freed may still be there */
    expect_lost();
}

static void a_killed_rank_confirms_nothing(void **state)
{
    read_all();
    kill_rank();
    expect_lost();
}

static void another_program_confirms_nothing(void **state)
{
    read_all();
    tell("x");
    expect_lost();
}

static void a_child_does_not_confirm_for_its_parent(void **state)
{
    read_all();
    tell("f");
    kill_rank();
    expect_lost();
}

/* Who is cancelled behind the last byte hears of it in this call, not in the next. */
static void a_cancel_behind_the_last_byte_counts(void **state)
{
    read_all();
    fanin_client_cancel(client);
    assert_int_equal(end(), FANIN_ERR_CANCELLED);
    read_all();
    assert_ok(end(), error);
}

static void what_is_accepted_among_updates_is_whole(void **state)
{
    const fanin_pull_options options = make_options(FANIN_STEP_NEWEST, 0);
    char on = 'o';
    unsigned good = 0;
    assert_int_equal(write(to_rank[1], &on, 1), 1);
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

#define CASE(name) cmocka_unit_test_setup_teardown(name, set_up, tear_down)

int main(void)
{
    const struct CMUnitTest tests[] = {
        CASE(a_rank_that_stands_still_is_not_waited_for),
        CASE(updates_make_it_stale),
        CASE(pauses_make_it_stale),
        CASE(removals_make_it_stale),
        CASE(a_server_that_ended_confirms_nothing),
        CASE(a_killed_rank_confirms_nothing),
        CASE(another_program_confirms_nothing),
        CASE(a_child_does_not_confirm_for_its_parent),
        CASE(a_cancel_behind_the_last_byte_counts),
        CASE(what_is_accepted_among_updates_is_whole),
    };
    if (!world_has_cma())
        return 77;
    return cmocka_run_group_tests_name("words", tests, NULL, NULL);
}
