/* SPDX-License-Identifier: Apache-2.0 */
/* Pulls whose ranks are read by several threads: what comes, and what ends them. */
#include "clock.h"
#include "ends.h"
#include "local_world.h"
#include "rank_proxy.h"
#include "secrets.h"
#include "testing.h"
#include <pthread.h>

#define RANKS 8
#define THREADS 4
#define VICTIM 5
#define WAIT_S 20

/* Half a megabyte a rank. */
static const world_tensor large[] = {
    {"base_model.model.a.lora_A.weight", FANIN_DTYPE_F32, 2, {512, 1500}},
    {"base_model.model.a.lora_B.weight", FANIN_DTYPE_BF16, 2, {1500, 333}},
    {"base_model.model.b.lora_A.weight", FANIN_DTYPE_F32, 1, {123457}},
};

static world w;
static fanin_client *client;
static fanin_error error = FANIN_ERROR_INIT;
static fanin_result_info info;
static rank_proxy proxy;
static bool has_proxy;
static size_t ranks = RANKS, victim = VICTIM; /* of the next world */
static bool has_openssl;

typedef enum way { UNIX, TCP, TLS, WAYS } way;

static int tear_down(void **state)
{
    fanin_client_destroy(&client);
    if (has_proxy)
        rank_proxy_stop(&proxy);
    has_proxy = false;
    world_stop(&w);
    unsetenv("FANIN_SECRET_FILE");
    error = (fanin_error)FANIN_ERROR_INIT;
    return 0;
}

static int all_ranks_again(void **state)
{
    ranks = RANKS;
    victim = VICTIM;
    return tear_down(state);
}

/* The same with one rank, which several threads read. */
static int one_rank(void **state)
{
    ranks = 1;
    victim = 0;
    return 0;
}

#define CASE(name) TEST_WITH(name, NULL, all_ranks_again)
#define CASE_ALSO_OF_ONE(name)                                                         \
    static void name(void **state);                                                    \
    TEST_WITH(name##_of_one_rank, one_rank, all_ranks_again)                           \
    {                                                                                  \
        name(state);                                                                   \
    }                                                                                  \
    CASE(name)

static void begin_large(world_cut cut)
{
    world_start(&w, ranks, cut, large, sizeof large / sizeof *large);
    world_commit(&w, 1);
}

/* Ranks and clients that are made from now on have one. */
static void use_secret(void)
{
    setenv("FANIN_SECRET_FILE", secret_of('1'), 1);
}

static void connect_over(unsigned threads, unsigned streams, bool tcp)
{
    fanin_client_config config = make_client_config();
    config.path = FANIN_PATH_STREAM;
    config.threads = threads;
    config.streams_per_rank = streams;
    config.no_unix = tcp;
    fanin_client_destroy(&client);
    client = world_client_with(&w, &config);
}

static void connect_with(unsigned threads, bool tcp)
{
    connect_over(threads, 0, tcp);
}

static void expect_pull(uint64_t step)
{
    error = (fanin_error)FANIN_ERROR_INIT;
    assert_ok(world_pull(&w, client, NULL, &info, &error), error);
    assert_int_equal(info.step, step);
    assert_int_equal(info.path, FANIN_PATH_STREAM);
}

/* ---------------------------------------------------------------- what comes */

CASE(every_cut_comes)
{
    static const world_cut cuts[] = {CUT_CHUNK0,  CUT_CHUNK1,    CUT_GRID,
                                     CUT_STRIDED, CUT_REPLICATE, CUT_HSDP};
    static const unsigned threads[] = {3, 8};
    for (size_t i = 0; i < sizeof cuts / sizeof *cuts; i++) {
        begin_large(cuts[i]);
        for (size_t j = 0; j < sizeof threads / sizeof *threads; j++) {
            connect_with(threads[j], (i + j) % 2 == 1);
            expect_pull(1);
            assert_int_equal(info.restarts, 0);
        }
        world_commit(&w, 2);
        expect_pull(2);
        tear_down(NULL);
    }
}

/* Reads of parts, and digests, which the calling thread asks for over the same connections. */
CASE_ALSO_OF_ONE(what_came_is_verified)
{
    begin_large(CUT_CHUNK0);
    for (int tcp = 0; tcp < 2; tcp++) {
        connect_with(THREADS, tcp);
        for (int i = 0; i < 3; i++) {
            fanin_pull_options options = make_options(FANIN_STEP_NEWEST, 0);
            options.verify = true;
            assert_ok(world_pull(&w, client, &options, &info, &error), error);
        }
    }
}

/* -------------------------------------------------------------- the threads */

/* Threads of this process that read. */
static unsigned count_readers(pid_t *first)
{
    return threads_named("fanin-read", first);
}

CASE(threads_are_kept_and_end)
{
    pid_t first = 0, again = 0;
    begin_large(CUT_CHUNK0);
    connect_with(THREADS, false);
    assert_int_equal(count_readers(&first), 0);
    for (int i = 0; i < 3; i++) {
        expect_pull(1);
        assert_int_equal(count_readers(&again), THREADS - 1);
        assert_true(first == 0 || first == again);
        first = again;
    }
    connect_with(1, false);
    expect_pull(1);
    assert_int_equal(count_readers(&again), 0);
    connect_with(THREADS, false);
    expect_pull(1);
    fanin_client_disconnect(client);
    assert_int_equal(count_readers(&again), 0);
}

/* The child has no thread and touches nothing; the parent goes on. */
CASE(a_fork_changes_nothing)
{
    pid_t first;
    begin_large(CUT_CHUNK0);
    connect_with(THREADS, false);
    expect_pull(1);
    pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        bool right = count_readers(&first) == 0 &&
                     fanin_client_ping(client, 1000, NULL, NULL, NULL) != FANIN_OK;
        fanin_client_destroy(&client);
        _exit(right ? 0 : 1);
    }
    assert_int_equal(tests_await(child), 0);
    expect_pull(1);
    assert_int_equal(count_readers(&first), THREADS - 1);
}

CASE(too_many_are_refused)
{
    fanin_client_config config = make_client_config();
    fanin_client *none = NULL;
    config.threads = 65;
    assert_int_equal(fanin_client_create(&config, &none, &error), FANIN_ERR_ARGUMENT);
    assert_non_null(strstr(error.message, "65"));
}

/* ----------------------------------------------------- several of one rank */

/* Of the first rank. */
static unsigned data_connections(void)
{
    fanin_server_stats stats = {.struct_size = sizeof stats};
    assert_int_equal(fanin_server_get_stats(w.ranks[0].server, &stats), FANIN_OK);
    return (unsigned)stats.sessions - 1;
}

/* Where there are fewer ranks than threads, threads read connections of one rank, as many as there
   are. */
CASE(a_rank_is_read_by_several)
{
    static const struct {
        size_t ranks;
        unsigned threads, streams, connections, readers;
    } cases[] = {
        {1, 1, 0, 1, 0}, {1, 2, 0, 2, 1},   {1, 4, 0, 4, 3}, {1, 64, 0, 4, 3},
        {1, 4, 1, 1, 0}, {1, 2, 16, 16, 1}, {1, 4, 3, 3, 2}, {2, 2, 0, 1, 1},
        {2, 4, 0, 2, 3}, {2, 64, 0, 4, 7},  {3, 4, 0, 2, 3},
    };
    for (way how = UNIX; how < (has_openssl ? WAYS : TLS); how++) {
        for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
            if (how == TLS)
                use_secret();
            ranks = cases[i].ranks;
            begin_large(CUT_CHUNK0);
            connect_over(cases[i].threads, cases[i].streams, how != UNIX);
            for (uint64_t step = 1; step < 4; step++) {
                expect_pull(step);
                assert_int_equal(info.restarts, 0);
                assert_int_equal(data_connections(), cases[i].connections);
                assert_int_equal(count_readers(NULL), cases[i].readers);
                world_commit(&w, step + 1);
            }
            tear_down(NULL);
        }
    }
}

/* What comes into a file, whose space is made as it comes, by all that read. */
CASE(a_directory_is_written_by_several)
{
    static const world_tensor lora[] = {
        {"base_model.model.a.lora_A.weight", FANIN_DTYPE_F32, 2, {20, 100000}},
        {"base_model.model.a.lora_B.weight", FANIN_DTYPE_F32, 2, {50000, 20}},
    };
    char folder[] = "/tmp/test-threads-XXXXXX", path[64];
    fanin_pull_options options = make_options(FANIN_STEP_NEWEST, 0);
    options.verify = true;
    assert_non_null(mkdtemp(folder));
    snprintf(path, sizeof path, "%s/adapter", folder);
    world_start(&w, 1, CUT_CHUNK0, lora, 2);
    world_commit(&w, 1);
    connect_with(THREADS, true);
    assert_ok(fanin_client_pull_adapter(client, &options, path, NULL, &error), error);
    assert_int_equal(count_readers(NULL), THREADS - 1);
    char command[128];
    snprintf(command, sizeof command, "rm -r %s", folder);
    assert_int_equal(system(command), 0);
}

/* ------------------------------------------------------------ what ends them */

/* A rank whose first read is held up on its way. */
typedef struct hold {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    bool released, forgotten; /* forgotten: nobody released it in time */
} hold;

static hold on_way = {PTHREAD_MUTEX_INITIALIZER, PTHREAD_COND_INITIALIZER, false,
                      false};

static void release(void)
{
    pthread_mutex_lock(&on_way.lock);
    assert_false(on_way.forgotten); /* the pull ended while it was held up */
    on_way.released = true;
    pthread_cond_broadcast(&on_way.changed);
    pthread_mutex_unlock(&on_way.lock);
}

static void hold_up(void *cookie)
{
    struct timespec at;
    clock_gettime(CLOCK_REALTIME, &at);
    at.tv_sec += WAIT_S;
    pthread_mutex_lock(&on_way.lock);
    while (!on_way.released &&
           pthread_cond_timedwait(&on_way.changed, &on_way.lock, &at) == 0)
        ;
    on_way.forgotten = !on_way.released;
    pthread_mutex_unlock(&on_way.lock);
}

static void kill_rank(void *cookie)
{
    world_stop_rank(&w, victim);
}

static void cancel(void *cookie)
{
    fanin_client_cancel(client);
    hold_up(cookie);
}

/* @p strike runs before the victim's first read goes through. */
static void begin_with(void (*strike)(void *), bool tcp)
{
    begin_large(CUT_CHUNK0);
    on_way.released = on_way.forgotten = false;
    rank_proxy_start(&proxy, fanin_server_port(w.ranks[victim].server), MSG_READ,
                     strike, NULL);
    has_proxy = true;
    w.address_list[victim] = proxy.address;
    connect_with(THREADS, tcp);
}

/* Of those that read it each finds that out: one tells. */
static void expect_named_once(void)
{
    const char *first = strstr(error.message, proxy.address);
    assert_int_equal(error.rank, victim);
    assert_string_equal(error.address, proxy.address);
    assert_non_null(first);
    assert_null(strstr(first + 1, proxy.address));
}

CASE_ALSO_OF_ONE(a_rank_dies)
{
    for (int tcp = 0; tcp < 2; tcp++) {
        begin_with(kill_rank, tcp);
        fanin_status status = world_pull(&w, client, NULL, &info, &error);
        if (status != FANIN_ERR_CLOSED && status != FANIN_ERR_UNREACHABLE)
            fail_msg("%s: %s", fanin_status_name(status), error.message);
        expect_named_once();
        world_restart_rank(&w, victim);
        world_commit(&w, 2);
        expect_pull(2);
        tear_down(NULL);
    }
}

CASE_ALSO_OF_ONE(a_pull_is_cancelled)
{
    begin_with(cancel, false);
    assert_int_equal(world_pull(&w, client, NULL, &info, &error), FANIN_ERR_CANCELLED);
    release();
    expect_pull(1);
}

CASE_ALSO_OF_ONE(a_pull_runs_out_of_time)
{
    begin_with(hold_up, true);
    fanin_pull_options options = make_options(FANIN_STEP_NEWEST, 0);
    options.timeout_ms = 300;
    assert_int_equal(world_pull(&w, client, &options, &info, &error),
                     FANIN_ERR_TIMEOUT);
    release();
    expect_pull(1);
}

/* All others have brought what they have, and the one that is waited for is named. */
static void on_progress(void *cookie, const fanin_pull_progress *progress)
{
    unsigned *told = cookie;
    if (!progress->slowest)
        return;
    assert_int_equal(progress->n_ranks, RANKS);
    for (size_t i = 0; i < RANKS; i++) {
        const fanin_rank_progress *r = progress->ranks[i];
        assert_int_equal(r->bytes_done, r->rank == VICTIM ? 0 : r->bytes_total);
        assert_int_equal(r->quiet_ms >= 1000, r->rank == VICTIM);
    }
    assert_int_equal(progress->slowest->rank, VICTIM);
    ++*told;
    release();
}

CASE(the_slowest_is_named)
{
    unsigned told = 0;
    begin_with(hold_up, false);
    fanin_pull_options options = make_options(FANIN_STEP_NEWEST, 0);
    options.rank_progress = on_progress;
    options.progress_cookie = &told;
    assert_ok(world_pull(&w, client, &options, &info, &error), error);
    assert_true(told > 0);
}

/* Sixteen requests: as soon as all of a rank's connections are up each has two of them. */
static void begin_many(void)
{
    static char names[16][64];
    static world_tensor many[16];
    for (size_t i = 0; i < 16; i++) {
        snprintf(names[i], sizeof names[i], "base_model.model.%zu.lora_A.weight", i);
        many[i] = (world_tensor){names[i], FANIN_DTYPE_F32, 2, {1, 262144}};
    }
    world_start(&w, 1, CUT_CHUNK0, many, 16);
    world_commit(&w, 1);
}

/* The only rank's, by one of its connections. */
CASE(an_altered_bit_of_one_of_several)
{
    for (unsigned connection = 1; connection <= THREADS; connection++) {
        flip f = {
            .connection = connection, .way = FLIP_TO_CLIENT, .at = 90000, .bit = 3};
        begin_many();
        rank_proxy_start_flip(&proxy, fanin_server_port(w.ranks[0].server), &f);
        has_proxy = true;
        w.address_list[0] = proxy.address;
        connect_with(THREADS, true);
        for (int i = 0; i < 20 && !atomic_load(&f.flipped); i++)
            expect_pull(1);
        assert_true(atomic_load(&f.flipped));
        assert_int_equal(info.restarts, 1);
        tear_down(NULL);
    }
}

int main(void)
{
    const openssl *o;
    has_openssl = openssl_load(&o, NULL) == FANIN_OK;
    int failed = tests_run(NULL);
    secrets_remove();
    return failed;
}
