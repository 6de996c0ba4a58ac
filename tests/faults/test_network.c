/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Broken networks: trainer and worker in two network namespaces, joined by a link that is
 * cut and packets that are dropped in the middle of a read or, by TLS, of a handshake. Needs root.
 */
#include "clock.h"
#include "ends.h"
#include "lab.h"
#include "secrets.h"
#include "testing.h"
#include <sched.h>
#include <stdatomic.h>

#define RANKS 4
#define VICTIM 1
#define HOST "10.213.7.2"
#define SILENT_MS 1000
#define DEADLINE_MS 20000
#define LONG_MS 3600000 /* nobody may wait for that */

static bool separate; /* this process has a network namespace of its own */
static bool has_openssl;

typedef struct network_fault {
    lab lab;
    lab_order order;
    rank_world world;
    landing landing;
    fanin_client *client;
    const char *command; /* run in the middle of a read */
    bool triggered;
} network_fault;

static network_fault f;
static fanin_error error;
/* Run when one of this side's handshakes waits for the rank; NULL: nothing. */
static const char *_Atomic in_handshake;

static bool try_command(const char *command)
{
    fflush(NULL);
    return system(command) == 0;
}

static void run_command(const char *command)
{
    if (!try_command(command))
        fail_msg("%s", command);
}

tls_step __real_tls_handshake(tls *t);
tls_step __wrap_tls_handshake(tls *t);
tls_step __wrap_tls_handshake(tls *t)
{
    tls_step step = __real_tls_handshake(t);
    const char *command = atomic_exchange(&in_handshake, NULL);
    if (command)
        run_command(command);
    return step;
}

static bool can_filter(void)
{
    return separate && try_command("iptables -L INPUT -n >/dev/null 2>&1");
}

/* ------------------------------------------------------------------ set-up */

static void join_networks(const lab *l)
{
    char command[512];
    snprintf(command, sizeof(command),
             "ip link del fanin0 2>/dev/null; set -e; ip link set lo up; "
             "ip link add fanin0 type veth peer name fanin1 netns %d; "
             "ip addr add 10.213.7.1/24 dev fanin0; ip link set fanin0 up; "
             "nsenter -t %d -n sh -ec 'ip link set lo up; "
             "ip addr add " HOST "/24 dev fanin1; ip link set fanin1 up'",
             (int)l->pid, (int)l->pid);
    run_command(command);
}

static void set_up_with(uint32_t replicate, const char *secret)
{
    f = (network_fault){.order = lab_order_of(RANKS)};
    f.order.replicate = replicate;
    f.order.base_port = 6000;
    f.order.flags = FANIN_SERVER_OPEN | (secret ? 0 : FANIN_SERVER_INSECURE);
    if (secret)
        snprintf(f.order.environment[0], sizeof f.order.environment[0],
                 "FANIN_SECRET_FILE=%s", secret);
    strcpy(f.order.bind, HOST);
    strcpy(f.order.allow, "10.213.7.0/24");
    lab_open(&f.lab, true);
    join_networks(&f.lab);
    lab_start(&f.lab, &f.order, &f.world);
    landing_make(&f.world, &f.landing);
    fanin_client_config config = make_client_config();
    config.no_ucx = false;
    config.connect_timeout_ms = config.lost_ms = SILENT_MS;
    config.max_inflight = 1 << 20;
    config.secret_file = secret;
    f.client = make_client(&config);
}

static void set_up(uint32_t replicate)
{
    set_up_with(replicate, NULL);
}

/* All by TLS. */
static void set_up_secured(void)
{
    set_up_with(1, secret_of('1'));
}

static int tear_down(void **state)
{
    if (!f.client)
        return 0; /* skipped */
    fanin_client_destroy(&f.client);
    landing_free(&f.landing);
    rank_world_free(&f.world);
    lab_close(&f.lab);
    f.client = NULL;
    in_handshake = NULL;
    return 0;
}

#define CASE(name) TEST_WITH(name, NULL, tear_down)

static void on_progress(void *cookie, uint64_t done, uint64_t total)
{
    if (f.triggered)
        return;
    f.triggered = true;
    assert_true(done < total);
    run_command(f.command);
}

static fanin_status pull(const char *command)
{
    fanin_pull_options options = make_options(FANIN_STEP_NEWEST, 0);
    options.timeout_ms = LONG_MS;
    if (command) {
        f.command = command;
        options.progress = on_progress;
    }
    error = (fanin_error)FANIN_ERROR_INIT;
    fanin_result_info info;
    fanin_status status =
        rank_world_pull(&f.world, f.client, &options, &f.landing, &info, &error);
    if (status == FANIN_OK) {
        assert_int_equal(info.path, FANIN_PATH_STREAM);
        assert_true(landing_is_step(&f.world, &f.landing, 1));
    }
    return status;
}

/* A link that is up again may lose the first packets: a rank then is unreachable for once more. */
static void expect_back(void)
{
    fanin_status status;
    deadline at = deadline_in_ms(DEADLINE_MS);
    do
        status = pull(NULL);
    while (status == FANIN_ERR_UNREACHABLE && !deadline_passed(at));
    assert_ok(status, error);
}

static void connect_all(void)
{
    assert_ok(fanin_client_connect(f.client, f.world.address_list, RANKS, DEADLINE_MS,
                                   &error),
              error);
}

static void expect_lost(fanin_status status)
{
    if (status != FANIN_ERR_UNREACHABLE && status != FANIN_ERR_CLOSED)
        fail_msg("%s: %s", fanin_status_name(status), error.message);
    printf("# %s\n", error.message);
    assert_non_null(strstr(error.message, "rank "));
    assert_non_null(strstr(error.message, HOST ":600"));
    assert_int_equal(strncmp(error.address, HOST ":600", strlen(HOST ":600")), 0);
    assert_true(error.remedy[0]);
}

/* ------------------------------------------------------------------- tests */

#define CUT "ip link set fanin0 down"
#define JOIN "ip link set fanin0 up"

static void cut_in_read(void)
{
    connect_all();
    expect_lost(pull(CUT));
    assert_true(error.rank >= 0);
    run_command(JOIN);
    expect_back();
}

CASE(test_link_cut)
{
    if (!separate)
        skip();
    set_up(1);
    cut_in_read();
}

/* In the middle of records. */
CASE(test_secured_link_cut)
{
    if (!separate || !has_openssl)
        skip();
    set_up_secured();
    cut_in_read();
}

/* What this side has said is on its way, and nothing comes back: on the first control connection.
   */
CASE(test_link_cut_in_handshake)
{
    if (!separate || !has_openssl)
        skip();
    set_up_secured();
    in_handshake = CUT;
    error = (fanin_error)FANIN_ERROR_INIT;
    fanin_status status =
        fanin_client_connect(f.client, f.world.address_list, RANKS, LONG_MS, &error);
    assert_null(atomic_load(&in_handshake));
    assert_int_equal(status, FANIN_ERR_UNREACHABLE);
    assert_int_equal(strncmp(error.address, HOST ":600", strlen(HOST ":600")), 0);
    assert_non_null(strstr(error.message, error.address));
    assert_true(error.remedy[0]);
    run_command(JOIN);
    deadline at = deadline_in_ms(DEADLINE_MS);
    do
        status = fanin_client_connect(f.client, f.world.address_list, RANKS,
                                      DEADLINE_MS, &error);
    while (status == FANIN_ERR_UNREACHABLE && !deadline_passed(at));
    assert_ok(status, error);
    expect_back();
}

/* On the first data connection: the control connections have their secret. */
CASE(test_link_cut_in_data_handshake)
{
    if (!separate || !has_openssl)
        skip();
    set_up_secured();
    connect_all();
    in_handshake = CUT;
    expect_lost(pull(NULL));
    assert_null(atomic_load(&in_handshake));
    assert_true(error.rank >= 0);
    run_command(JOIN);
    expect_back();
}

/* Packets of one rank vanish: no reset, no refusal, nothing. */
#define DROP_VICTIM "iptables -A INPUT -p tcp --sport 6001 -j DROP"

CASE(test_packets_dropped)
{
    if (!can_filter())
        skip();
    set_up(1);
    connect_all();
    expect_lost(pull(DROP_VICTIM));
    assert_int_equal(error.rank, VICTIM);
    assert_string_equal(error.address, HOST ":6001");
    run_command("iptables -F INPUT");
    assert_ok(pull(NULL), error);
}

CASE(test_packets_dropped_replica)
{
    if (!can_filter())
        skip();
    set_up(2);
    connect_all();
    assert_ok(pull(DROP_VICTIM), error);
    run_command("iptables -F INPUT");
    assert_ok(pull(NULL), error);
}

CASE(test_dropped_before_connect)
{
    if (!can_filter())
        skip();
    set_up(1);
    run_command(DROP_VICTIM);
    connect_all(); /* to the three others */
    fanin_status status = pull(NULL);
    assert_int_equal(status, FANIN_ERR_UNREACHABLE);
    assert_string_equal(error.address, HOST ":6001");
    assert_true(error.key[0]);
    run_command("iptables -F INPUT");
    assert_ok(pull(NULL), error);
}

/* The rank takes the connection and hears the greeting, and what it answers is lost. */
#define DROP_ANSWERS                                                                   \
    "iptables -A INPUT -p tcp --sport 6001 -m length --length 120:65535 -j DROP"

CASE(test_answers_dropped_in_handshake)
{
    if (!can_filter() || !has_openssl)
        skip();
    set_up_secured();
    run_command(DROP_ANSWERS);
    connect_all(); /* to the three others */
    assert_int_equal(pull(NULL), FANIN_ERR_UNREACHABLE);
    assert_string_equal(error.address, HOST ":6001");
    assert_non_null(strstr(error.message, "accepted but did not answer in time"));
    run_command("iptables -F INPUT");
    expect_back();
}

CASE(test_secured_packets_dropped)
{
    if (!can_filter() || !has_openssl)
        skip();
    set_up_secured();
    connect_all();
    expect_lost(pull(DROP_VICTIM));
    assert_int_equal(error.rank, VICTIM);
    assert_string_equal(error.address, HOST ":6001");
    run_command("iptables -F INPUT");
    expect_back();
}

int main(void)
{
    const openssl *o;
    has_openssl = openssl_load(&o, NULL) == FANIN_OK;
    separate = geteuid() == 0 && unshare(CLONE_NEWNET) == 0;
    if (!separate)
        printf("# skipped: network namespaces need root\n");
    else if (!can_filter())
        printf("# partly skipped: there is no iptables\n");
    int failed = tests_run(NULL);
    secrets_remove();
    return failed;
}
