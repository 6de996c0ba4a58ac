/* SPDX-License-Identifier: Apache-2.0 */
/* Many ranks with a secret: threads share the handshakes with them, and what is refused is told as
   without threads. */
#include "clock.h"
#include "ends.h"
#include "local_world.h"
#include "secrets.h"
#include "socket.h"
#include "testing.h"
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <unistd.h>

#define RANKS 16
#define ODD 11    /* the rank that is not like the others */
#define THREADS 5 /* four beside the calling one */
#define CALL_MS 20000
#define SHORT_MS 300
#define LONG_MS 3600000 /* nobody waits for that */

static world w;
static fanin_client *client;
static fanin_error error;
static int silent = -1; /* a listener that nobody accepts from */

/* Handshakes of this thread, and of others that a client started; a rank's are its control
   thread's. */
static pthread_t caller;
static atomic_uint by_caller, by_threads;
static unsigned cancel_after; /* so many of threads; 0: never */

tls_step __real_tls_handshake(tls *t);
tls_step __wrap_tls_handshake(tls *t);
tls_step __wrap_tls_handshake(tls *t)
{
    char name[16] = "";
    pthread_getname_np(pthread_self(), name, sizeof name);
    if (pthread_equal(pthread_self(), caller))
        atomic_fetch_add(&by_caller, 1);
    else if (strcmp(name, "fanin-work") == 0 &&
             atomic_fetch_add(&by_threads, 1) + 1 == cancel_after)
        fanin_client_cancel(client);
    return __real_tls_handshake(t);
}

/* Ranks with the secret; the odd one has @p other. */
static void begin(const char *other)
{
    setenv("FANIN_SECRET_FILE", secret_of('1'), 1);
    world_begin(&w, RANKS, CUT_CHUNK0, 1);
    if (other) {
        world_stop_rank(&w, ODD);
        setenv("FANIN_SECRET_FILE", other, 1);
        world_restart_rank(&w, ODD);
        world_commit_rank(&w, ODD, 1);
    }
    setenv("FANIN_SECRET_FILE", secret_of('1'), 1);
}

static int tear_down(void **state)
{
    fanin_client_destroy(&client);
    world_stop(&w);
    if (silent >= 0)
        close(silent);
    silent = -1;
    return 0;
}

/* Connects and pulls by so many threads. */
static fanin_status pull(unsigned threads, uint32_t connect_ms, uint32_t timeout_ms)
{
    fanin_client_config config = make_client_config();
    config.path = FANIN_PATH_STREAM;
    config.no_unix = true;
    config.threads = threads;
    config.connect_timeout_ms = connect_ms;
    fanin_client_destroy(&client);
    client = make_client(&config);
    error = (fanin_error)FANIN_ERROR_INIT;
    atomic_store(&by_caller, 0);
    atomic_store(&by_threads, 0);
    fanin_status status =
        fanin_client_connect(client, w.address_list, RANKS, timeout_ms, &error);
    fanin_pull_options options = make_options(FANIN_STEP_NEWEST, 0);
    options.timeout_ms = timeout_ms;
    return status == FANIN_OK ? world_pull(&w, client, &options, NULL, &error) : status;
}

static void threads_share_them(void **state)
{
    begin(NULL);
    assert_ok(pull(1, CALL_MS, CALL_MS), error);
    assert_true(atomic_load(&by_caller) >= 2 * RANKS);
    assert_int_equal(atomic_load(&by_threads), 0);
    for (int i = 0; i < 20; i++) {
        fanin_client_config config = make_client_config();
        config.no_unix = true;
        config.threads = THREADS;
        atomic_store(&by_caller, 0);
        fanin_client *one = connect_client(&config, w.address_list, RANKS);
        assert_int_equal(atomic_load(&by_caller), 0);
        assert_true(atomic_load(&by_threads) >= 2 * RANKS);
        fanin_client_destroy(&one);
        atomic_store(&by_threads, 0);
    }
    assert_ok(pull(THREADS, CALL_MS, CALL_MS), error);
}

/* None is left when the call is over. */
static void they_end_with_the_call(void **state)
{
    begin(NULL);
    fanin_client_config config = make_client_config();
    config.no_unix = true;
    config.threads = THREADS;
    fanin_client *alone = make_client(&config);
    assert_int_equal(fanin_client_connect(alone, w.address_list, RANKS, CALL_MS, NULL),
                     FANIN_OK);
    assert_int_equal(threads_named("fanin-work", NULL), 0);
    fanin_client_destroy(&alone);
}

/* As the calling thread alone tells it. */
static void expect_alike(fanin_status status, uint32_t connect_ms, uint32_t timeout_ms)
{
    fanin_error alone;
    assert_int_equal(pull(1, connect_ms, timeout_ms), status);
    alone = error;
    assert_string_equal(error.address, w.address_list[ODD]);
    assert_int_equal(pull(THREADS, connect_ms, timeout_ms), status);
    assert_string_equal(error.message, alone.message);
    assert_string_equal(error.remedy, alone.remedy);
    assert_string_equal(error.address, alone.address);
    assert_int_equal(error.rank, alone.rank);
}

static void what_is_refused_is_told_alike(void **state)
{
    begin(secret_of('2'));
    expect_alike(FANIN_ERR_AUTH, CALL_MS, CALL_MS);
    assert_says(error.message, "another secret");
    tear_down(NULL);
    begin(""); /* none */
    expect_alike(FANIN_ERR_AUTH, CALL_MS, CALL_MS);
    assert_says(error.message, "has no secret");
    tear_down(NULL);
    begin(NULL);
    world_stop_rank(&w, ODD); /* nobody listens */
    expect_alike(FANIN_ERR_UNREACHABLE, CALL_MS, CALL_MS);
}

/* The kernel takes what is sent, and nobody answers. */
static void listen_instead(void)
{
    socket_address at;
    world_stop_rank(&w, ODD);
    assert_int_equal(socket_resolve(w.address_list[ODD], &at, NULL), FANIN_OK);
    assert_int_equal(socket_listen(&at, 16, &silent, NULL), FANIN_OK);
}

static bool the_silent_is_blamed(unsigned threads, uint32_t connect_ms)
{
    return pull(threads, connect_ms, CALL_MS) == FANIN_ERR_UNREACHABLE &&
           strcmp(error.address, w.address_list[ODD]) == 0;
}

static void a_silent_rank_has_its_time(void **state)
{
    uint32_t ms =
        SHORT_MS; /* in which the others are connected, however busy the machine is */
    begin(NULL);
    listen_instead();
    while (ms < CALL_MS / 4 &&
           !(the_silent_is_blamed(1, ms) && the_silent_is_blamed(THREADS, ms)))
        ms *= 2;
    expect_alike(FANIN_ERR_UNREACHABLE, 2 * ms, CALL_MS);
    assert_says(error.message, "accepted but did not answer in time");
    close(silent);
    silent = -1;
    world_restart_rank(&w, ODD);
    world_commit_rank(&w, ODD, 1);
    assert_ok(world_pull(&w, client, NULL, NULL, &error), error); /* the same client */
}

/* While hands are shaken, and one rank will not. */
static void a_call_is_cancelled(void **state)
{
    begin(NULL);
    listen_instead();
    cancel_after = RANKS;
    assert_int_equal(pull(THREADS, LONG_MS, LONG_MS), FANIN_ERR_CANCELLED);
    cancel_after = 0;
}

#define CASE(name) cmocka_unit_test_teardown(name, tear_down)

int main(void)
{
    if (openssl_is_missing())
        return 77;
    const struct CMUnitTest tests[] = {
        CASE(threads_share_them),
        CASE(they_end_with_the_call),
        CASE(what_is_refused_is_told_alike),
        CASE(a_silent_rank_has_its_time),
        CASE(a_call_is_cancelled),
    };
    caller = pthread_self();
    int failed = cmocka_run_group_tests_name("many handshakes", tests, NULL, NULL);
    secrets_remove();
    return failed;
}
