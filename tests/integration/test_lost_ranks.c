/* SPDX-License-Identifier: Apache-2.0 */
/* Pulls that wait while ranks are gone, silent or behind: when the wait ends, and whom it names. */
#include "ends.h"
#include "local_world.h"
#include "messages.h"
#include "rank_proxy.h"
#include "socket.h"
#include "testing.h"
#include <arpa/inet.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <semaphore.h>
#include <sys/socket.h>

/* More than a pull that is not in vain needs; who waits for it has failed. */
#define LONG_MS 6000

/* What a test has, and what its client said last. */
static world w;
static fanin_client *client;
static fanin_error error = FANIN_ERROR_INIT;

static int tear_down(void **state)
{
    fanin_client_destroy(&client);
    world_stop(&w);
    return 0;
}

#define CASE(name) TEST_WITH(name, NULL, tear_down)

static void begin(size_t size, world_cut cut, uint64_t step)
{
    w.flags = FANIN_SERVER_NO_UCX;
    world_begin(&w, size, cut, step);
}

static void begin_with_client(size_t size, world_cut cut, uint64_t step)
{
    begin(size, cut, step);
    client = world_client(&w, FANIN_PATH_STREAM);
}

static fanin_status pull_step(fanin_step_rule rule, uint64_t step, uint32_t timeout_ms)
{
    return world_pull_step(&w, client, rule, step, timeout_ms, &error);
}

static void expect_step(fanin_step_rule rule, uint64_t step, uint64_t wanted)
{
    assert_int_equal(world_pulled(&w, client, rule, step), wanted);
}

/* The error names one thing before the other. */
static void assert_order(const char *first, const char *second)
{
    const char *one = strstr(error.message, first);
    const char *other = strstr(error.message, second);
    assert_non_null(one);
    assert_non_null(other);
    assert_true(one < other);
}

static void *kill_seven(void *cookie)
{
    world_stop_rank(cookie, 7);
    return NULL;
}

static void assert_gone(fanin_status status)
{
    assert_true(status == FANIN_ERR_UNREACHABLE || status == FANIN_ERR_CLOSED);
}

static void assert_names_seven(fanin_status status, int32_t rank)
{
    assert_gone(status);
    assert_int_equal(error.rank, rank);
    assert_string_equal(error.address, w.addresses[7]);
    assert_non_null(strstr(error.message, w.addresses[7]));
    assert_null(strstr(error.message, "rank 0"));
}

/* Whether it is lost before, while or after the others begin to wait. */
CASE(a_lost_rank_ends_the_wait)
{
    begin_with_client(8, CUT_CHUNK0, 1);
    expect_step(FANIN_STEP_NEWEST, 0, 1);
    pthread_t thread;
    assert_int_equal(pthread_create(&thread, NULL, kill_seven, &w), 0);
    fanin_status status = pull_step(FANIN_STEP_EXACT, 2, LONG_MS);
    pthread_join(thread, NULL);
    assert_names_seven(status, 7);
    assert_names_seven(pull_step(FANIN_STEP_AT_LEAST, 2, LONG_MS), 7);
    fanin_client_destroy(&client);

    /* Of a rank that never said who it is the address is told. */
    client = world_client(&w, FANIN_PATH_STREAM);
    assert_names_seven(pull_step(FANIN_STEP_EXACT, 2, LONG_MS), -1);
}

/* ------------------------------------------------------------------- silent */

/* Takes connections at a rank's address and says nothing. */
static int be_silent(const char *address)
{
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0), one = 1;
    struct sockaddr_in at = {.sin_family = AF_INET,
                             .sin_port =
                                 htons((uint16_t)atoi(strrchr(address, ':') + 1)),
                             .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    assert_true(fd >= 0);
    assert_int_equal(setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one), 0);
    assert_int_equal(bind(fd, (struct sockaddr *)&at, sizeof at), 0);
    assert_int_equal(listen(fd, 64), 0);
    return fd;
}

static int connect_to(const char *address)
{
    socket_address at;
    int fd;
    assert_int_equal(socket_resolve(address, &at, NULL), FANIN_OK);
    fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    assert_int_equal(connect(fd, (struct sockaddr *)&at.storage, at.length), 0);
    return fd;
}

static void connect_in(uint32_t connect_ms, uint32_t timeout_ms)
{
    fanin_client_config config;
    fanin_client_config_init(&config, sizeof config);
    config.path = FANIN_PATH_STREAM;
    config.connect_timeout_ms = connect_ms;
    assert_ok(fanin_client_create(&config, &client, &error), error);
    assert_ok(fanin_client_connect(client, w.address_list, w.size, timeout_ms, &error),
              error);
}

static void connect_with(uint32_t timeout_ms)
{
    connect_in(LONG_MS, timeout_ms);
}

CASE(a_silent_replica_costs_no_deadline)
{
    begin(4, CUT_HSDP, 3);
    world_stop_rank(&w, 3);
    int silent = be_silent(w.addresses[3]);
    connect_with(1000);
    fanin_pull_options options = make_options(FANIN_STEP_NEWEST, 0);
    options.timeout_ms = 10000;
    for (int i = 0; i < 3; i++) {
        fanin_result_info info;
        assert_ok(world_pull(&w, client, &options, &info, &error), error);
        assert_int_equal(info.step, 3);
    }
    close(silent);
}

CASE(a_silent_rank_is_told_by_its_address)
{
    begin(4, CUT_CHUNK0, 3);
    world_stop_rank(&w, 2);
    int silent = be_silent(w.addresses[2]);
    connect_with(1000);
    assert_int_equal(pull_step(FANIN_STEP_NEWEST, 0, 2000), FANIN_ERR_UNREACHABLE);
    assert_int_equal(error.rank, -1);
    assert_non_null(strstr(error.message, "accepted but did not answer in time"));
    assert_null(strstr(error.message, "have not said where they are"));
    assert_string_equal(error.address, w.addresses[2]);
    assert_non_null(strstr(error.message, w.addresses[2]));
    /* It is back: whoever needs it waits for it. */
    close(silent);
    world_restart_rank(&w, 2);
    world_commit_rank(&w, 2, 3);
    expect_step(FANIN_STEP_NEWEST, 0, 3);
}

/* The connection that a call has just begun leads to a process that is gone by the next one, and
   another listens there: that one is asked in the same call. */
CASE(a_connection_left_half_made_is_made_again)
{
    begin_with_client(2, CUT_CHUNK0, 3);
    world_stop_rank(&w, 0);
    int silent = be_silent(w.addresses[0]);
    fanin_client_cancel(client);
    assert_int_equal(pull_step(FANIN_STEP_NEWEST, 0, LONG_MS), FANIN_ERR_CANCELLED);
    close(accept(silent, NULL, NULL));
    close(silent);
    world_restart_rank(&w, 0);
    world_commit_rank(&w, 0, 3);
    expect_step(FANIN_STEP_NEWEST, 0, 3);
}

/* One that is left half made, and that nobody answers, has its time over both calls, and is not
   made again. */
CASE(who_does_not_answer_has_one_time)
{
    begin(2, CUT_CHUNK0, 3);
    world_stop_rank(&w, 0);
    int silent = be_silent(w.addresses[0]);
    connect_in(1000, 300);
    assert_int_equal(pull_step(FANIN_STEP_NEWEST, 0, LONG_MS), FANIN_ERR_UNREACHABLE);
    assert_says(error.message, "accepted but did not answer in time");
    close(accept(silent, NULL, NULL));
    assert_int_equal(fcntl(silent, F_SETFL, O_NONBLOCK), 0);
    assert_int_equal(accept(silent, NULL, NULL), -1);
    close(silent);
}

/* Whoever listens there is no rank. */
static void *say_nonsense(void *cookie)
{
    static const char nonsense[64] = "HTTP/1.1 400 Bad Request\r\n\r\n";
    int fd = accept(*(int *)cookie, NULL, NULL);
    assert_int_equal(send(fd, nonsense, sizeof nonsense, MSG_NOSIGNAL),
                     sizeof nonsense);
    return (void *)(intptr_t)fd;
}

/* Between a connection that was taken while nobody answered and the rank that has come since, from
   when on the client says that it waits for it. */
typedef struct late_way {
    int fds[2];
    pthread_t thread;
} late_way;

static sem_t waits_again;

static void on_restart(void *cookie, fanin_log_level level, const char *event,
                       const char *message)
{
    if (strcmp(event, "restart") == 0)
        sem_post(&waits_again);
}

static void *pass_on(void *cookie)
{
    late_way *l = cookie;
    char bytes[65536];
    struct pollfd ends[2] = {{l->fds[0], POLLIN, 0}, {l->fds[1], POLLIN, 0}};
    sem_wait(&waits_again);
    while (poll(ends, 2, -1) > 0) {
        for (int i = 0; i < 2; i++) {
            ssize_t n = ends[i].revents ? read(l->fds[i], bytes, sizeof bytes) : -1;
            if (n == 0)
                return NULL;
            if (n > 0)
                (void)!write(l->fds[1 - i], bytes, (size_t)n);
        }
    }
    return NULL;
}

/* A rank is lost by what it says, another one takes long to come, and is not waited for at first:
   that the one
   before was no rank is no reason to fail. */
CASE(who_comes_late_is_waited_for_whatever_was_there_before)
{
    pthread_t other;
    void *left;
    late_way l;
    fanin_client_config config;
    begin(2, CUT_CHUNK0, 3);
    fanin_client_config_init(&config, sizeof config);
    config.path = FANIN_PATH_STREAM;
    config.no_unix = true;
    config.connect_timeout_ms = 60000;
    config.log = on_restart;
    client = connect_client(&config, w.address_list, w.size);
    assert_int_equal(sem_init(&waits_again, 0, 0), 0);
    world_stop_rank(&w, 0);
    int listener = be_silent(w.addresses[0]);
    assert_int_equal(pthread_create(&other, NULL, say_nonsense, &listener), 0);
    assert_int_equal(pull_step(FANIN_STEP_NEWEST, 0, LONG_MS), FANIN_ERR_PROTOCOL);
    assert_int_equal(pthread_join(other, &left), 0);
    close((int)(intptr_t)left);
    assert_true(pull_step(FANIN_STEP_NEWEST, 0, 200) != FANIN_OK);
    l.fds[0] = accept(listener, NULL, NULL);
    close(listener);
    world_restart_rank(&w, 0);
    world_commit_rank(&w, 0, 3);
    l.fds[1] = connect_to(w.addresses[0]);
    while (sem_trywait(&waits_again) == 0)
        ;
    assert_int_equal(pthread_create(&l.thread, NULL, pass_on, &l), 0);
    expect_step(FANIN_STEP_NEWEST, 0, 3);
    fanin_client_destroy(&client);
    pthread_join(l.thread, NULL);
    close(l.fds[0]);
    close(l.fds[1]);
    sem_destroy(&waits_again);
}

/* All that are left have announced the step, and do not hold all of it: no pull can get that. */
CASE(nobody_waits_for_what_is_in_vain)
{
    uint64_t got = 0;
    const fanin_pull_options second = make_options(FANIN_STEP_EXACT, 2);
    begin_with_client(2, CUT_CHUNK0, 1);
    expect_step(FANIN_STEP_NEWEST, 0, 1);
    world_stop_rank(&w, 1);
    world_commit_rank(&w, 0, 2);
    assert_gone(fanin_client_wait(client, &second, &got, &error));
    assert_int_equal(error.rank, 1);
    assert_int_equal(got, 0);
    fanin_client_destroy(&client);
    world_stop(&w);

    begin_with_client(4, CUT_HSDP, 1);
    expect_step(FANIN_STEP_NEWEST, 0, 1);
    world_stop_rank(&w, 3); /* a replica of rank 1 */
    for (size_t i = 0; i < 3; i++)
        world_commit_rank(&w, i, 2);
    assert_ok(fanin_client_wait(client, &second, &got, &error), error);
    assert_int_equal(got, 2);
}

static void hold(void *gate)
{
    sem_wait(gate);
}

/* A rank that is connected and stops: it is asked for the step, and nothing of it comes any more.
   */
CASE(a_rank_that_stops_is_named_first)
{
    rank_proxy proxy;
    sem_t gate;
    begin(4, CUT_CHUNK0, 3);
    assert_int_equal(sem_init(&gate, 0, 0), 0);
    rank_proxy_start(&proxy, fanin_server_port(w.ranks[2].server), MSG_WAIT, hold,
                     &gate);
    w.address_list[2] = proxy.address;
    connect_with(LONG_MS);
    assert_int_equal(pull_step(FANIN_STEP_EXACT, 9, 2000), FANIN_ERR_TIMEOUT);
    assert_int_equal(error.rank, 2);
    assert_string_equal(error.address, proxy.address);
    assert_order("has not answered, last heard of", "ranks 0-1, 3 are at step 3");
    sem_post(&gate);
    fanin_client_destroy(&client);
    rank_proxy_stop(&proxy);
    sem_destroy(&gate);
}
