/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Ranks that die or stop, in every phase of a pull, with and without replicas: a pull ends
 * long before its deadline with an error that names the rank, or with the bytes of the ranks that
 * are left; and the same client works again when the rank is back.
 *
 * The argument is the path, "unix", "tcp" (both stream, "-threads": read by several) or "cma", for
 * the phases in which it matters, or "early" for those before.
 */
#include "ends.h"
#include "lab.h"
#include "local_world.h"
#include "rank_proxy.h"
#include "socket.h"
#include "testing.h"
#include <signal.h>

#define RANKS 4
#define VICTIM 1
/* When a rank that says nothing counts as lost; those that die say so. */
#define SILENT_MS 1000
#define PATIENT_MS 10000
/* Nobody may wait for that: the test would be out of time. */
#define LONG_MS 3600000

static fanin_path path = FANIN_PATH_STREAM;
static bool no_unix;
static uint32_t threads = 1;

typedef enum phase { BEFORE_CONNECT, IN_CATALOG, MID_READ, BEFORE_END } phase;

typedef struct fault {
    lab lab;
    lab_order order;
    rank_world world;
    rank_proxy proxy;
    landing landing;
    fanin_client *client;
    int number;     /* the signal */
    bool triggered; /* by the progress callback */
    uint64_t done_at_trigger, total;
} fault;

/* ------------------------------------------------------------------ set-up */

static bool cannot_run(void)
{
    return path == FANIN_PATH_CMA && !world_has_cma();
}

static void strike(void *cookie)
{
    fault *f = cookie;
    lab_signal(&f->lab, VICTIM, f->number);
}

static uint16_t victim_port;

/* The proxy listens in this process: who is behind it is told by the rank's own socket. */
bool __real_connection_process(const void *c, pid_t *pid_out);
bool __wrap_connection_process(const void *c, pid_t *pid_out);
bool __wrap_connection_process(const void *c, pid_t *pid_out)
{
    char address[32];
    socket_address tcp, name;
    int fd;
    if (!__real_connection_process(c, pid_out) || *pid_out != getpid())
        return *pid_out != 0;
    snprintf(address, sizeof address, "127.0.0.1:%u", (unsigned)victim_port);
    if (socket_resolve(address, &tcp, NULL) != FANIN_OK)
        return false;
    socket_unix_address(geteuid(), &tcp, &name);
    if (socket_connect_start(&name, &fd, NULL) != FANIN_OK)
        return false;
    bool known = socket_peer_credentials(fd, NULL, pid_out);
    close(fd);
    return known;
}

static fanin_client *client_of(uint32_t lost_ms)
{
    fanin_client_config config = make_client_config();
    config.no_ucx = false;
    config.path = path;
    config.no_unix = no_unix;
    config.connect_timeout_ms = lost_ms;
    config.lost_ms = lost_ms;
    config.threads = threads;
    /* A read takes many rounds; of several threads each has a window of its own. */
    config.max_inflight = threads > 1 ? threads << 22 : 1 << 20;
    return make_client(&config);
}

static void set_up(fault *f, phase phase, int number, uint32_t replicate)
{
    static const message_type types[] = {0, MSG_BOXES, 0, MSG_END};
    *f = (fault){.number = number};
    f->order = lab_order_of(RANKS);
    f->order.replicate = replicate;
    lab_open(&f->lab, false);
    lab_start(&f->lab, &f->order, &f->world);
    victim_port = (uint16_t)(f->order.base_port + VICTIM);
    rank_proxy_start(&f->proxy, victim_port, types[phase], strike, f);
    f->world.address_list[VICTIM] = f->proxy.address;
    landing_make(&f->world, &f->landing);
    f->client = client_of(number == SIGSTOP ? SILENT_MS : PATIENT_MS);
}

static void tear_down(fault *f)
{
    fanin_client_destroy(&f->client);
    rank_proxy_stop(&f->proxy);
    landing_free(&f->landing);
    rank_world_free(&f->world);
    lab_close(&f->lab);
}

static void on_progress(void *cookie, uint64_t done, uint64_t total)
{
    fault *f = cookie;
    if (f->triggered)
        return;
    f->triggered = true;
    f->done_at_trigger = done;
    f->total = total;
    strike(f);
}

static fanin_status pull(fault *f, phase phase, fanin_result_info *info,
                         fanin_error *error)
{
    fanin_pull_options options = make_options(FANIN_STEP_NEWEST, 0);
    options.timeout_ms = LONG_MS;
    if (phase == MID_READ) {
        options.progress = on_progress;
        options.progress_cookie = f;
    }
    memset(f->landing.arena, 0xcc, f->landing.size);
    *error = (fanin_error)FANIN_ERROR_INIT;
    return rank_world_pull(&f->world, f->client, &options, &f->landing, info, error);
}

static void connect_all(fault *f)
{
    assert_works(
        fanin_client_connect(f->client, f->world.address_list, RANKS, 20000, ERROR));
}

static fanin_status connect_and_pull(fault *f, phase phase, fanin_result_info *info,
                                     fanin_error *error)
{
    if (phase == BEFORE_CONNECT)
        strike(f);
    connect_all(f);
    fanin_status status = pull(f, phase, info, error);
    if (phase == MID_READ) {
        assert_true(f->triggered);
        assert_true(f->done_at_trigger < f->total);
    } else if (phase != BEFORE_CONNECT) {
        assert_true(atomic_load(&f->proxy.triggered));
    }
    return status;
}

/* ----------------------------------------------------------------- outcome */

/* By its rank where it was known, by its address in any case. */
static void expect_named(const fault *f, fanin_status status, phase phase,
                         const fanin_error *error)
{
    if (status != FANIN_ERR_UNREACHABLE && status != FANIN_ERR_CLOSED)
        fail_msg("%s: %s", fanin_status_name(status), error->message);
    assert_int_equal(error->status, status);
    if (phase != BEFORE_CONNECT) {
        assert_int_equal(error->rank, VICTIM);
        assert_non_null(strstr(error->message, "rank 1"));
    }
    assert_string_equal(error->address, f->proxy.address);
    assert_true(error->phase[0]);
    assert_true(error->remedy[0]);
}

/* The rank goes on, or all ranks are new and hold other bytes for the same step. */
static void bring_back(fault *f)
{
    if (f->number == SIGSTOP) {
        lab_signal(&f->lab, VICTIM, SIGCONT);
        return;
    }
    lab_stop(&f->lab);
    f->order.world++;
    f->order.life++;
    lab_restart(&f->lab, &f->order);
}

static void expect_life(const fault *f, const fanin_result_info *info)
{
    assert_int_equal(info->step, 1);
    assert_int_equal(info->world_id[0], f->order.world);
    assert_true(landing_is_step(&f->world, &f->landing, lab_step(f->order.life)));
}

static void suffer(phase phase, int number, uint32_t replicate)
{
    if (cannot_run())
        skip();
    fault f;
    fanin_error error;
    fanin_result_info info;
    set_up(&f, phase, number, replicate);
    fanin_status status = connect_and_pull(&f, phase, &info, &error);
    if (replicate > 1) {
        assert_ok(status, error);
        expect_life(&f, &info);
    } else {
        expect_named(&f, status, phase, &error);
        printf("# %s\n", error.message);
    }
    bring_back(&f);
    assert_ok(pull(&f, BEFORE_END, &info, &error), error);
    expect_life(&f, &info);
    tear_down(&f);
}

static const struct row {
    const char *name;
    phase phase;
    int number;
    uint32_t replicate;
} rows[] = {
    {"kill_before_connect", BEFORE_CONNECT, SIGKILL, 1},
    {"stop_before_connect", BEFORE_CONNECT, SIGSTOP, 1},
    {"kill_in_catalog", IN_CATALOG, SIGKILL, 1},
    {"stop_in_catalog", IN_CATALOG, SIGSTOP, 1},
    {"kill_mid_read", MID_READ, SIGKILL, 1},
    {"stop_mid_read", MID_READ, SIGSTOP, 1},
    {"kill_before_end", BEFORE_END, SIGKILL, 1},
    {"stop_before_end", BEFORE_END, SIGSTOP, 1},
    {"replica_kill_before_connect", BEFORE_CONNECT, SIGKILL, 2},
    {"replica_stop_before_connect", BEFORE_CONNECT, SIGSTOP, 2},
    {"replica_kill_in_catalog", IN_CATALOG, SIGKILL, 2},
    {"replica_stop_in_catalog", IN_CATALOG, SIGSTOP, 2},
    {"replica_kill_mid_read", MID_READ, SIGKILL, 2},
    {"replica_stop_mid_read", MID_READ, SIGSTOP, 2},
    {"replica_kill_before_end", BEFORE_END, SIGKILL, 2},
    {"replica_stop_before_end", BEFORE_END, SIGSTOP, 2},
};

static void suffer_row(void **state)
{
    const struct row *r = *state;
    suffer(r->phase, r->number, r->replicate);
}

/* ----------------------------------------------------------------- new life */

/* All ranks die and are born again, with other bytes, in the middle of a read. */
static void rebirth(void *cookie, uint64_t done, uint64_t total)
{
    fault *f = cookie;
    if (f->triggered)
        return;
    f->triggered = true;
    f->number = SIGKILL;
    bring_back(f);
}

static void test_reborn_mid_read(void **state)
{
    if (cannot_run())
        skip();
    fault f;
    fanin_result_info info;
    set_up(&f, MID_READ, SIGKILL, 1);
    connect_all(&f);
    fanin_pull_options options = make_options(FANIN_STEP_EXACT, 1);
    options.progress = rebirth;
    options.progress_cookie = &f;
    assert_works(
        rank_world_pull(&f.world, f.client, &options, &f.landing, &info, ERROR));
    assert_true(f.triggered);
    assert_true(info.restarts > 0);
    expect_life(&f, &info); /* all bytes are the new life's, and it says so */
    tear_down(&f);
}

/* The phases before a read are the same on every path. */
int main(int argc, char **argv)
{
    const char *which = argc > 1 ? argv[1] : "early";
    bool early = strcmp(which, "early") == 0;
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
        if ((rows[i].phase <= IN_CATALOG) == early)
            tests_add(rows[i].name, suffer_row, NULL, NULL,
                      (void *)(uintptr_t)&rows[i]);
    if (!early)
        tests_add("reborn_mid_read", test_reborn_mid_read, NULL, NULL, NULL);
    if (strcmp(which, "cma") == 0)
        path = FANIN_PATH_CMA;
    no_unix = strncmp(which, "tcp", 3) == 0;
    threads = strstr(which, "-threads") ? 3 : 1; /* one of them has two ranks */
    return tests_run(argc > 2 ? argv[2] : NULL);
}
