/* SPDX-License-Identifier: Apache-2.0 */
/* Pulls that wait while ranks are gone, silent or behind: when the wait ends, and whom it names. */
#include "local_world.h"
#include "messages.h"
#include "rank_proxy.h"
#include "testing.h"
#include <arpa/inet.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

/* More than a pull that is not in vain needs; who waits for it has failed. */
#define LONG_MS 6000

/* The rank that dies as soon as it has announced this step. */
static struct {
    world *of;
    size_t rank;
    uint64_t step;
} dies;

fanin_status __real_decode_wait_ok(body *in, msg_wait_ok *out);
fanin_status __wrap_decode_wait_ok(body *in, msg_wait_ok *out);
fanin_status __wrap_decode_wait_ok(body *in, msg_wait_ok *out)
{
    fanin_status status = __real_decode_wait_ok(in, out);
    if (status == FANIN_OK && dies.of && out->step == dies.step) {
        world_stop_rank(dies.of, dies.rank);
        dies.of = NULL;
    }
    return status;
}

static void start(world *w, size_t size, world_cut cut)
{
    *w = (world){.flags = FANIN_SERVER_NO_UCX};
    world_start(w, size, cut, world_lora, world_lora_count);
}

static void *kill_seven(void *cookie)
{
    world_stop_rank(cookie, 7);
    return NULL;
}

static void assert_names_seven(const world *w, fanin_status status,
                               const fanin_error *error)
{
    assert_true(status == FANIN_ERR_UNREACHABLE || status == FANIN_ERR_CLOSED);
    assert_string_equal(error->address, w->addresses[7]);
    assert_non_null(strstr(error->message, w->addresses[7]));
    assert_null(strstr(error->message, "rank 0"));
}

/* Whether it is lost before, while or after the others begin to wait. */
static void a_lost_rank_ends_the_wait(void **state)
{
    world w;
    uint64_t got;
    fanin_error error = FANIN_ERROR_INIT;
    start(&w, 8, CUT_CHUNK0);
    world_commit(&w, 1);
    fanin_client *client = world_client(&w, FANIN_PATH_STREAM);
    assert_ok(world_pull_step(&w, client, FANIN_STEP_NEWEST, 0, LONG_MS, &got, &error),
              error);
    pthread_t thread;
    assert_int_equal(pthread_create(&thread, NULL, kill_seven, &w), 0);
    fanin_status status =
        world_pull_step(&w, client, FANIN_STEP_EXACT, 2, LONG_MS, &got, &error);
    pthread_join(thread, NULL);
    assert_names_seven(&w, status, &error);
    assert_int_equal(error.rank, 7);
    status = world_pull_step(&w, client, FANIN_STEP_AT_LEAST, 2, LONG_MS, &got, &error);
    assert_names_seven(&w, status, &error);
    assert_int_equal(error.rank, 7);
    fanin_client_destroy(&client);

    /* Of a rank that never said who it is the address is told. */
    client = world_client(&w, FANIN_PATH_STREAM);
    status = world_pull_step(&w, client, FANIN_STEP_EXACT, 2, LONG_MS, &got, &error);
    assert_names_seven(&w, status, &error);
    assert_int_equal(error.rank, -1);
    fanin_client_destroy(&client);
    world_stop(&w);
}

static void *commit_three(void *cookie)
{
    for (size_t i = 0; i < 3; i++)
        world_commit_rank(cookie, i, 2);
    return NULL;
}

static void a_lost_replica_does_not(void **state)
{
    world w;
    uint64_t got;
    fanin_error error = FANIN_ERROR_INIT;
    start(&w, 4, CUT_HSDP);
    world_commit(&w, 1);
    fanin_client *client = world_client(&w, FANIN_PATH_STREAM);
    world_stop_rank(&w, 3);
    assert_int_equal(
        world_pull_step(&w, client, FANIN_STEP_EXACT, 2, 400, &got, &error),
        FANIN_ERR_TIMEOUT);
    assert_int_equal(error.rank, 3); /* gone, which is worse than behind */
    assert_string_equal(error.address, w.addresses[3]);
    pthread_t thread;
    assert_int_equal(pthread_create(&thread, NULL, commit_three, &w), 0);
    assert_ok(world_pull_step(&w, client, FANIN_STEP_EXACT, 2, LONG_MS, &got, &error),
              error);
    pthread_join(thread, NULL);
    assert_int_equal(got, 2);
    fanin_client_destroy(&client);
    world_stop(&w);
}

static void a_dead_rank_sets_no_target(void **state)
{
    world w;
    uint64_t got;
    fanin_error error = FANIN_ERROR_INIT;
    start(&w, 4, CUT_HSDP);
    world_commit(&w, 4);
    world_commit_rank(&w, 3, 5);
    fanin_client *client = world_client(&w, FANIN_PATH_STREAM);
    dies.rank = 3;
    dies.step = 5;
    dies.of = &w;
    assert_ok(world_pull_step(&w, client, FANIN_STEP_NEWEST, 0, LONG_MS, &got, &error),
              error);
    assert_null(dies.of);
    assert_int_equal(got, 4);
    fanin_client_destroy(&client);
    world_stop(&w);
}

static void the_slowest_is_named_first(void **state)
{
    world w;
    uint64_t got;
    fanin_error error = FANIN_ERROR_INIT;
    start(&w, 8, CUT_CHUNK0);
    for (size_t i = 0; i < 8; i++)
        world_commit_rank(&w, i, i == 5 ? 3 : 4);
    world_commit_rank(&w, 2, 5);
    fanin_client *client = world_client(&w, FANIN_PATH_STREAM);
    assert_int_equal(
        world_pull_step(&w, client, FANIN_STEP_EXACT, 5, 1000, &got, &error),
        FANIN_ERR_TIMEOUT);
    assert_int_equal(error.rank, 5);
    assert_string_equal(error.address, w.addresses[5]);
    const char *first = strstr(error.message, "rank 5 at");
    const char *others = strstr(error.message, "ranks 0-1, 3-4, 6-7 are at step 4");
    assert_non_null(first);
    assert_non_null(others);
    assert_true(first < others);
    fanin_client_destroy(&client);
    world_stop(&w);
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
    assert_int_equal(setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof(one)), 0);
    assert_int_equal(bind(fd, (struct sockaddr *)&at, sizeof(at)), 0);
    assert_int_equal(listen(fd, 64), 0);
    return fd;
}

static fanin_client *connect_with(const world *w, uint32_t timeout_ms)
{
    fanin_error error = FANIN_ERROR_INIT;
    fanin_client_config config;
    fanin_client_config_init(&config, sizeof(config));
    config.path = FANIN_PATH_STREAM;
    config.connect_timeout_ms = LONG_MS;
    fanin_client *client = NULL;
    assert_ok(fanin_client_create(&config, &client, &error), error);
    assert_ok(
        fanin_client_connect(client, w->address_list, w->size, timeout_ms, &error),
        error);
    return client;
}

static void a_silent_replica_costs_no_deadline(void **state)
{
    world w;
    uint64_t got;
    fanin_error error = FANIN_ERROR_INIT;
    start(&w, 4, CUT_HSDP);
    world_commit(&w, 3);
    world_stop_rank(&w, 3);
    int silent = be_silent(w.addresses[3]);
    fanin_client *client = connect_with(&w, 400);
    for (int i = 0; i < 3; i++) {
        assert_ok(world_pull_step(&w, client, FANIN_STEP_NEWEST, 0, 1500, &got, &error),
                  error);
        assert_int_equal(got, 3);
    }
    close(silent);
    fanin_client_destroy(&client);
    world_stop(&w);
}

static void a_silent_rank_is_told_by_its_address(void **state)
{
    world w;
    uint64_t got;
    fanin_error error = FANIN_ERROR_INIT;
    start(&w, 4, CUT_CHUNK0);
    world_commit(&w, 3);
    world_stop_rank(&w, 2);
    int silent = be_silent(w.addresses[2]);
    fanin_client *client = connect_with(&w, 200);
    assert_int_equal(
        world_pull_step(&w, client, FANIN_STEP_NEWEST, 0, 400, &got, &error),
        FANIN_ERR_UNREACHABLE);
    assert_int_equal(error.rank, -1);
    assert_non_null(strstr(error.message, "accepted but did not answer in time"));
    assert_null(strstr(error.message, "have not said where they are"));
    assert_string_equal(error.address, w.addresses[2]);
    assert_non_null(strstr(error.message, w.addresses[2]));
    /* It is back: whoever needs it waits for it. */
    close(silent);
    world_restart_rank(&w, 2);
    world_commit_rank(&w, 2, 3);
    assert_ok(world_pull_step(&w, client, FANIN_STEP_NEWEST, 0, LONG_MS, &got, &error),
              error);
    fanin_client_destroy(&client);
    world_stop(&w);
}

/* Three are gone, and one of them has a replica that is there: it is not to blame. */
static void a_lost_replica_is_not_to_blame(void **state)
{
    static const size_t lost[] = {0, 1, 3};
    world w;
    uint64_t got;
    fanin_error error = FANIN_ERROR_INIT;
    start(&w, 4, CUT_HSDP); /* ranks 0 and 2 hold one half, 1 and 3 the other */
    world_commit(&w, 1);
    fanin_client *client = world_client(&w, FANIN_PATH_STREAM);
    assert_ok(world_pull_step(&w, client, FANIN_STEP_NEWEST, 0, LONG_MS, &got, &error),
              error);
    for (size_t i = 0; i < 3; i++)
        world_stop_rank(&w, lost[i]);
    fanin_status status =
        world_pull_step(&w, client, FANIN_STEP_EXACT, 1, LONG_MS, &got, &error);
    assert_true(status == FANIN_ERR_UNREACHABLE || status == FANIN_ERR_CLOSED);
    assert_true(error.rank == 1 || error.rank == 3);
    assert_non_null(strstr(error.message, "no other rank holds"));
    fanin_pull_options options;
    fanin_pull_options_init(&options, sizeof(options));
    options.publication = "lora:0";
    options.rule = FANIN_STEP_EXACT;
    options.step = 2;
    options.timeout_ms = LONG_MS;
    status = fanin_client_wait(client, &options, &got, &error);
    assert_true(status == FANIN_ERR_UNREACHABLE || status == FANIN_ERR_CLOSED);
    assert_true(error.rank == 1 || error.rank == 3);
    fanin_client_destroy(&client);
    world_stop(&w);
}

static void hold(void *gate)
{
    sem_wait(gate);
}

/* A rank that is connected and stops: it is asked for the step, and nothing of it comes any more. */
static void a_rank_that_stops_is_named_first(void **state)
{
    world w;
    uint64_t got;
    rank_proxy proxy;
    sem_t gate;
    fanin_error error = FANIN_ERROR_INIT;
    start(&w, 4, CUT_CHUNK0);
    world_commit(&w, 3);
    assert_int_equal(sem_init(&gate, 0, 0), 0);
    rank_proxy_start(&proxy, fanin_server_port(w.ranks[2].server), MSG_WAIT, hold,
                     &gate);
    w.address_list[2] = proxy.address;
    fanin_client *client = connect_with(&w, LONG_MS);
    assert_int_equal(
        world_pull_step(&w, client, FANIN_STEP_EXACT, 9, 400, &got, &error),
        FANIN_ERR_TIMEOUT);
    assert_int_equal(error.rank, 2);
    assert_string_equal(error.address, proxy.address);
    const char *silent = strstr(error.message, "has not answered, last heard of");
    const char *others = strstr(error.message, "ranks 0-1, 3 are at step 3");
    assert_non_null(silent);
    assert_non_null(others);
    assert_true(silent < others);
    sem_post(&gate);
    fanin_client_destroy(&client);
    rank_proxy_stop(&proxy);
    sem_destroy(&gate);
    world_stop(&w);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_lost_rank_ends_the_wait),
        cmocka_unit_test(a_lost_replica_does_not),
        cmocka_unit_test(a_dead_rank_sets_no_target),
        cmocka_unit_test(the_slowest_is_named_first),
        cmocka_unit_test(a_silent_replica_costs_no_deadline),
        cmocka_unit_test(a_silent_rank_is_told_by_its_address),
        cmocka_unit_test(a_rank_that_stops_is_named_first),
        cmocka_unit_test(a_lost_replica_is_not_to_blame),
    };
    return cmocka_run_group_tests_name("lost ranks", tests, NULL, NULL);
}
