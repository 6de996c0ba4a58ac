/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The path rdma without an adapter: both ends are given UCX's transports of one host instead.
 * Pulls, and the first one-sided read of a rank when it is not answered in time: it may still call
 * back while it is recalled, or even later. Time and UCX's turns are the test's.
 */
#include "local_world.h"
#include "path/path.h"
#include "secrets.h"
#include "testing.h"
#include "ucx.h"
#include <time.h>

#define RANKS 2
#define STALL_S 4 /* longer than a probe may take */

static struct {
    bool stall;     /* the next turn of UCX does nothing, and time passes */
    bool deaf;      /* ... and no later one does anything */
    bool undrained; /* endpoints close, but their reads are not recalled */
    bool slow_keys; /* to unpack a remote key takes long */
    bool offered;   /* ranks offer rdma to everybody */
    unsigned closed, destroyed, unpacked;
} ucx_does;

/* The client's thread only: the servers' go on. */
static _Thread_local time_t ahead_s;

int __real_clock_gettime(clockid_t id, struct timespec *now);
int __wrap_clock_gettime(clockid_t id, struct timespec *now);
int __wrap_clock_gettime(clockid_t id, struct timespec *now)
{
    int result = __real_clock_gettime(id, now);
    now->tv_sec += ahead_s;
    return result;
}

bool __real_ucx_client_progress(ucx_client *c);
bool __wrap_ucx_client_progress(ucx_client *c);
bool __wrap_ucx_client_progress(ucx_client *c)
{
    if (!ucx_does.stall && !ucx_does.deaf)
        return __real_ucx_client_progress(c);
    ahead_s += ucx_does.stall ? STALL_S : 0;
    ucx_does.stall = false;
    return false;
}

bool __real_ucx_endpoint_close(ucx_endpoint **e, deadline at);
bool __wrap_ucx_endpoint_close(ucx_endpoint **e, deadline at);
bool __wrap_ucx_endpoint_close(ucx_endpoint **e, deadline at)
{
    ucx_does.closed++;
    if (!ucx_does.undrained)
        return __real_ucx_endpoint_close(e, at);
    *e = NULL;
    return false;
}

bool __real_ucx_client_destroy(ucx_client **c);
bool __wrap_ucx_client_destroy(ucx_client **c);
bool __wrap_ucx_client_destroy(ucx_client **c)
{
    ucx_does.destroyed += *c != NULL;
    return __real_ucx_client_destroy(c);
}

fanin_status __real_ucx_rkey_unpack(ucx_endpoint *e, const void *data, size_t size,
                                    ucx_rkey **out, fanin_error *error);
fanin_status __wrap_ucx_rkey_unpack(ucx_endpoint *e, const void *data, size_t size,
                                    ucx_rkey **out, fanin_error *error);
fanin_status __wrap_ucx_rkey_unpack(ucx_endpoint *e, const void *data, size_t size,
                                    ucx_rkey **out, fanin_error *error)
{
    ucx_does.unpacked++;
    ahead_s += ucx_does.slow_keys ? 3600 : 0;
    return __real_ucx_rkey_unpack(e, data, size, out, error);
}

fanin_status __real_ucx_client_create(ucx *u, ucx_path path, const char *gpu,
                                      const logger *log, ucx_client **out,
                                      fanin_error *error);
fanin_status __wrap_ucx_client_create(ucx *u, ucx_path path, const char *gpu,
                                      const logger *log, ucx_client **out,
                                      fanin_error *error);
fanin_status __wrap_ucx_client_create(ucx *u, ucx_path path, const char *gpu,
                                      const logger *log, ucx_client **out,
                                      fanin_error *error)
{
    assert_int_equal(path, UCX_PATH_RDMA);
    return __real_ucx_client_create(u, UCX_PATH_HOST, gpu, log, out, error);
}

fanin_status __real_ucx_server_create(ucx *u, ucx_path path, const logger *log,
                                      ucx_server **out, fanin_error *error);
fanin_status __wrap_ucx_server_create(ucx *u, ucx_path path, const logger *log,
                                      ucx_server **out, fanin_error *error);
fanin_status __wrap_ucx_server_create(ucx *u, ucx_path path, const logger *log,
                                      ucx_server **out, fanin_error *error)
{
    assert_int_equal(path, UCX_PATH_RDMA);
    return __real_ucx_server_create(u, UCX_PATH_HOST, log, out, error);
}

bool __real_path_is_offered(const fanin_client *client, size_t peer,
                            const path_reader *path);
bool __wrap_path_is_offered(const fanin_client *client, size_t peer,
                            const path_reader *path);
bool __wrap_path_is_offered(const fanin_client *client, size_t peer,
                            const path_reader *path)
{
    /* Nothing but UCX is to be tried. */
    if (path->number == FANIN_PATH_CMA)
        return false;
    return ucx_does.offered || __real_path_is_offered(client, peer, path);
}

bool __wrap_path_is_local(const fanin_client *client, size_t peer);
bool __wrap_path_is_local(const fanin_client *client, size_t peer)
{
    return false;
}

typedef struct fixture {
    world world;
    fanin_client *client;
} fixture;

static void set_up(fixture *f)
{
    if (!world_has_ucx())
        skip();
    *f = (fixture){0};
    memset(&ucx_does, 0, sizeof(ucx_does));
    world_start(&f->world, RANKS, CUT_CHUNK0, world_lora, world_lora_count);
    world_commit(&f->world, 1);
    f->client = world_client(&f->world, FANIN_PATH_AUTO);
}

static void tear_down(fixture *f)
{
    memset(&ucx_does, 0, sizeof(ucx_does));
    fanin_client_destroy(&f->client);
    world_stop(&f->world);
}

static fanin_path pull(fixture *f)
{
    fanin_result_info info;
    assert_works(world_pull(&f->world, f->client, NULL, &info, ERROR));
    assert_int_equal(info.step, 1);
    return info.path;
}

/* UCX's cma may be forbidden here (containers): then nothing of this happens. */
static bool has_reads(void)
{
    fixture f;
    set_up(&f);
    fanin_path path = pull(&f);
    tear_down(&f);
    if (path != FANIN_PATH_RDMA)
        print_message("no one-sided reads by UCX here\n");
    return path == FANIN_PATH_RDMA;
}

TEST(a_stalled_process_keeps_the_path)
{
    fixture f;
    if (!has_reads())
        skip();
    set_up(&f);
    ucx_does.stall = true;
    assert_int_equal(pull(&f), FANIN_PATH_RDMA);
    assert_false(ucx_does.stall);
    assert_int_equal(ucx_does.closed, 0);
    tear_down(&f);
}

/* A rank may list millions of them. */
TEST(keys_are_read_until_the_deadline)
{
    fixture f;
    fanin_error error = FANIN_ERROR_INIT;
    fanin_pull_options options;
    fanin_pull_options_init(&options, sizeof options);
    options.publication = "lora:0";
    options.timeout_ms = 60000;
    if (!has_reads())
        skip();
    set_up(&f);
    ucx_does.slow_keys = true;
    assert_int_equal(world_pull(&f.world, f.client, &options, NULL, &error),
                     FANIN_ERR_TIMEOUT);
    assert_non_null(strstr(error.message, "while remote keys were read"));
    assert_int_equal(ucx_does.unpacked, 1);
    ucx_does.slow_keys = false;
    assert_int_equal(pull(&f), FANIN_PATH_RDMA);
    tear_down(&f);
}

TEST(an_answer_after_the_verdict_changes_nothing)
{
    fixture f;
    if (!has_reads())
        skip();
    set_up(&f);
    ucx_does.stall = ucx_does.deaf = true;
    assert_int_equal(pull(&f), FANIN_PATH_STREAM);
    assert_int_equal(ucx_does.closed, RANKS);
    assert_int_equal(ucx_does.destroyed, 0);
    assert_int_equal(pull(&f), FANIN_PATH_STREAM);
    tear_down(&f);
}

TEST(a_read_that_cannot_be_recalled_closes_ucx)
{
    fixture f;
    if (!has_reads())
        skip();
    set_up(&f);
    ucx_does.stall = ucx_does.deaf = ucx_does.undrained = true;
    assert_int_equal(pull(&f), FANIN_PATH_STREAM);
    assert_int_equal(ucx_does.destroyed, 1);
    ucx_does.deaf = ucx_does.undrained = false;
    assert_int_equal(pull(&f), FANIN_PATH_STREAM);
    tear_down(&f);
}

TEST(every_cut_comes)
{
    static const world_cut cuts[] = {CUT_CHUNK0,  CUT_CHUNK1,    CUT_GRID,
                                     CUT_STRIDED, CUT_REPLICATE, CUT_HSDP};
    if (!has_reads())
        skip();
    for (size_t i = 0; i < sizeof cuts / sizeof *cuts; i++) {
        fixture f = {0};
        world_start(&f.world, 4, cuts[i], world_lora, world_lora_count);
        world_commit(&f.world, 1);
        f.client = world_client(&f.world, FANIN_PATH_RDMA);
        assert_int_equal(pull(&f), FANIN_PATH_RDMA);
        tear_down(&f);
    }
}

/* A pull by rdma over TCP from a network that the trainer calls trusted; "" for secret: there is
   none. */
static fanin_status pull_over_tcp(const char *secret, fanin_error *error)
{
    fixture f = {.world.flags = FANIN_SERVER_TRUSTED_NETWORK};
    fanin_client_config config;
    fanin_client_config_init(&config, sizeof config);
    config.path = FANIN_PATH_RDMA;
    config.no_unix = true;
    setenv("FANIN_SECRET_FILE", secret, 1);
    world_begin(&f.world, RANKS, CUT_CHUNK0, 1);
    f.client = world_client_with(&f.world, &config);
    *error = (fanin_error)FANIN_ERROR_INIT;
    fanin_status status = world_pull(&f.world, f.client, NULL, NULL, error);
    unsetenv("FANIN_SECRET_FILE");
    tear_down(&f);
    return status;
}

/* Remote keys write, whatever was asked for, and UCX believes the addresses that it is given. */
TEST(over_tcp_keys_are_for_those_who_prove_themselves)
{
    fanin_error error;
    if (!has_reads() || openssl_is_missing())
        skip();
    assert_ok(pull_over_tcp(secret_of('1'), &error), error);
    for (int offered = 0; offered < 2; offered++) {
        ucx_does.offered = offered;
        assert_int_equal(pull_over_tcp("", &error), FANIN_ERR_UNSUPPORTED);
        assert_says(error.message, "secret");
    }
    secrets_remove();
}
