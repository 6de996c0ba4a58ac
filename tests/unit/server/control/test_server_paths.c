/* SPDX-License-Identifier: Apache-2.0 */
/*
 * One-sided paths: who may open them, who gets addresses and remote keys, and when they end. No
 * adapter is needed: rdma is given UCX's transports of one host.
 */
#include "distant.h"
#include "gpu.h"
#include "log_catcher.h"
#include "server_peer.h"
#include "testing.h"
#include "ucx.h"
#include <sched.h>

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

static uint8_t memory[3][8192];
static char version[32]; /* of UCX, "" if there is none */

static int set_up(void **state)
{
    logger none = {0};
    ucx *u;
    const char *library = getenv("FANIN_TEST_UCX_LIBRARY");
    if (library && *library)
        setenv("FANIN_UCX_LIBRARY", library, 0);
    if (ucx_load(&none, &u, NULL) == FANIN_OK) {
        snprintf(version, sizeof version, "%s", ucx_version(u));
        ucx_unload(&u);
    }
    return 0;
}

/* What a session over the Unix socket is offered without UCX. */
static uint32_t own_paths(void)
{
    return 1u << WIRE_PATH_STREAM | 1u << WIRE_PATH_CMA |
           (gpu_built() ? 1u << WIRE_PATH_CUDA_IPC : 0);
}

static fanin_server *start(uint32_t flags)
{
    fanin_server_config c = server_config();
    c.flags = flags;
    fanin_server *s = server_start(&c);
    server_put(s, RUN, "a", memory[0], 100);
    server_put(s, RUN, "b", memory[2], 100);
    server_commit(s, 1);
    return s;
}

static void greet(peer *p, const char *ucx, uint32_t *paths)
{
    msg_hello m = {.role = ROLE_CONTROL};
    snprintf(m.ucx_version, sizeof m.ucx_version, "%s", ucx);
    *paths = peer_hello_with(p, m).paths;
}

static peer hello(fanin_server *s, bool over_unix, const char *ucx, uint32_t *paths)
{
    peer p = over_unix ? peer_connect_unix(s) : peer_connect(s);
    greet(&p, ucx, paths);
    return p;
}

static void expect_refused(peer *p, wire_path path, const char *words)
{
    peer_request_path(p, path);
    msg_error e = peer_expect_error(p, FANIN_ERR_UNSUPPORTED);
    assert_says(e.message, words);
}

SERVER_TEST(without_ucx_nothing_of_ucx_is_offered)
{
    fanin_server *s = start(FANIN_SERVER_NO_UCX);
    uint32_t paths;
    peer p = hello(s, true, "1.22.0", &paths);
    assert_int_equal(paths, own_paths());
    expect_refused(&p, WIRE_PATH_RDMA, "not to use UCX");
    if (!gpu_built())
        expect_refused(&p, WIRE_PATH_CUDA_IPC, "without CUDA");
}

SERVER_TEST(strangers_get_stream_only)
{
    if (!version[0])
        skip();
    fanin_server *s = start(0);
    uint32_t paths;
    peer p = hello(s, false, version, &paths);
    assert_int_equal(paths, 1u << WIRE_PATH_STREAM);
    expect_refused(&p, WIRE_PATH_CMA, "Unix socket");
    expect_refused(&p, WIRE_PATH_RDMA, "own user");
    expect_refused(&p, WIRE_PATH_CUDA_IPC,
                   gpu_built() ? "Unix socket" : "without CUDA");
    grant g = peer_newest(&p);
    peer_request_regions(&p, &g, WIRE_PATH_CMA);
    peer_expect_error(&p, FANIN_ERR_UNSUPPORTED);
    peer_close(&p);
    p = hello(s, true, "0.9.1", &paths);
    assert_int_equal(paths, own_paths());
    expect_refused(&p, WIRE_PATH_RDMA, "0.9.1");
    peer_close(&p);
    p = hello(s, true, "", &paths);
    expect_refused(&p, WIRE_PATH_RDMA, "none");
}

/* But to the own user on the same host. */
SERVER_TEST(open_servers_offer_no_rdma)
{
    fanin_server_config c = server_config();
    c.flags = FANIN_SERVER_OPEN;
    c.bind = "127.0.0.2";
    c.allow = "127.0.0.0/8";
    fanin_server *s = server_start(&c);
    uint32_t paths;
    peer p = peer_connect_unix_at(s, c.bind);
    greet(&p, version, &paths);
    assert_int_equal(paths, own_paths());
    expect_refused(&p, WIRE_PATH_RDMA, "stream path only");
}

/* With a secret they are told: client/ucx/test_probe.c. */
SERVER_TEST(a_trusted_network_has_to_prove_itself)
{
    if (!version[0])
        skip();
    fanin_server *s = start(FANIN_SERVER_TRUSTED_NETWORK);
    uint32_t paths;
    peer p = hello(s, false, version, &paths);
    assert_int_equal(paths, 1u << WIRE_PATH_STREAM);
    expect_refused(&p, WIRE_PATH_RDMA, "prove who they are");
    grant g = peer_newest(&p);
    peer_request_regions(&p, &g, WIRE_PATH_RDMA);
    peer_expect_error(&p, FANIN_ERR_UNSUPPORTED);
    p = hello(s, true, version, &paths);
    assert_true(paths & (1u << WIRE_PATH_RDMA));
}

/* Where its own incarnation lies, and addresses without keys. */
SERVER_TEST(the_own_user_may_read_the_process)
{
    fanin_server *s = start(FANIN_SERVER_NO_UCX);
    peer p = peer_connect_unix(s);
    msg_hello_ok hello = peer_hello_with(&p, (msg_hello){.role = ROLE_CONTROL});
    grant g = peer_newest(&p);
    peer_request_path(&p, WIRE_PATH_CMA);
    body in = peer_expect(&p, MSG_OPEN_PATH_OK);
    msg_open_path ok;
    assert_int_equal(decode_open_path(&in, &ok), FANIN_OK);
    assert_int_equal(ok.address.size, 0);
    assert_memory_equal((const uint8_t *)(uintptr_t)ok.witness, hello.incarnation,
                        sizeof hello.incarnation);
    region_table *t = peer_regions(&p, &g, WIRE_PATH_CMA);
    assert_int_equal(t->count, 2);
    assert_int_equal(t->entries[0].base, (uintptr_t)memory[0]);
    assert_int_equal(t->entries[1].base, (uintptr_t)memory[2]);
    assert_int_equal(t->entries[0].rkey_size, 0);
    region_table_free(&t);
}

SERVER_TEST(the_own_user_gets_remote_keys)
{
    if (!version[0])
        skip();
    fanin_server *s = start(0);
    uint32_t paths;
    peer p = hello(s, true, version, &paths);
    assert_true(paths & (1u << WIRE_PATH_RDMA));
    grant g = peer_newest(&p);
    peer_request_path(&p, WIRE_PATH_RDMA);
    body in = peer_expect(&p, MSG_OPEN_PATH_OK);
    msg_open_path ok;
    assert_int_equal(decode_open_path(&in, &ok), FANIN_OK);
    assert_true(ok.address.size > 0);
    assert_int_equal(ok.witness, 0);
    region_table *t = peer_regions(&p, &g, WIRE_PATH_RDMA);
    assert_int_equal(t->count, 2); /* pages without a shard lie between them */
    assert_int_equal(t->entries[0].base, (uintptr_t)memory[0]);
    assert_int_equal(t->entries[1].base, (uintptr_t)memory[2]);
    assert_int_equal(t->entries[0].length, 100);
    assert_true(t->entries[0].rkey_size > 0);
    region_table_free(&t);
    peer_ping(&p);
}

SERVER_TEST(keys_end_with_the_memory)
{
    if (!version[0])
        skip();
    fanin_server *s = start(0);
    uint32_t paths;
    peer p = hello(s, true, version, &paths);
    grant g = peer_newest(&p);
    peer_request_path(&p, WIRE_PATH_RDMA);
    peer_expect(&p, MSG_OPEN_PATH_OK);
    region_table *t = peer_regions(&p, &g, WIRE_PATH_RDMA);
    region_table_free(&t);
    server_put(s, RUN, "b", memory[1], 100); /* memory[2] is the trainer's again */
    peer_request_regions(&p, &g, WIRE_PATH_RDMA);
    peer_expect_error(&p, FANIN_ERR_STALE);
    server_commit(s, 2);
    g = peer_newest(&p);
    t = peer_regions(&p, &g, WIRE_PATH_RDMA);
    assert_int_equal(t->entries[t->count - 1].base + t->entries[t->count - 1].length,
                     (uintptr_t)memory[1] + 100);
    region_table_free(&t);
    assert_int_equal(fanin_server_remove(s, RUN, NULL, NULL), FANIN_OK);
    peer_request_regions(&p, &g, WIRE_PATH_RDMA);
    peer_expect_error(&p, FANIN_ERR_NOT_FOUND);
}

/* What a process of this uid in such namespaces is offered. */
static uint32_t offered_to(fanin_server *s, int namespaces, peer *p)
{
    distant d;
    socket_address tcp, at;
    uint32_t paths;
    char text[32];
    snprintf(text, sizeof text, "127.0.0.1:%u", (unsigned)fanin_server_port(s));
    assert_int_equal(socket_resolve(text, &tcp, NULL), FANIN_OK);
    socket_unix_address(geteuid(), &tcp, &at);
    if (!distant_connect(&d, namespaces, &at))
        skip();
    *p = peer_of(d.fd);
    greet(p, version, &paths);
    distant_end(&d);
    return paths;
}

/* A uid is not enough: root of each container is root. */
SERVER_TEST(containers_are_strangers)
{
    fanin_server *s = start(0);
    static const int apart[] = {CLONE_NEWPID, CLONE_NEWUSER,
                                CLONE_NEWPID | CLONE_NEWNS | CLONE_NEWIPC};
    peer p;
    for (size_t i = 0; i < sizeof apart / sizeof *apart; i++) {
        assert_int_equal(offered_to(s, apart[i], &p), 1u << WIRE_PATH_STREAM);
        expect_refused(&p, WIRE_PATH_CMA, "namespace");
        expect_refused(&p, WIRE_PATH_RDMA, "namespace");
        expect_refused(&p, WIRE_PATH_CUDA_IPC,
                       gpu_built() ? "namespace" : "without CUDA");
        peer_close(&p);
    }
}

/* cma is read by the kernel, which judges by itself; the others nobody judges later. */
SERVER_TEST(other_files_leave_cma)
{
    fanin_server *s = start(0);
    peer p;
    assert_int_equal(offered_to(s, CLONE_NEWNS, &p),
                     1u << WIRE_PATH_STREAM | 1u << WIRE_PATH_CMA);
    expect_refused(&p, WIRE_PATH_RDMA, "mount namespace");
    peer_close(&p);
    assert_int_equal(offered_to(s, CLONE_NEWIPC, &p),
                     (own_paths() & ~(1u << WIRE_PATH_CUDA_IPC)) |
                         (version[0] ? 1u << WIRE_PATH_RDMA : 0));
}

SERVER_TEST(containers_are_trusted_when_told)
{
    fanin_server *s = start(FANIN_SERVER_TRUST_CONTAINERS | FANIN_SERVER_NO_UCX);
    peer p;
    assert_int_equal(offered_to(s, CLONE_NEWPID | CLONE_NEWNS | CLONE_NEWIPC, &p),
                     own_paths());
    peer_close(&p);
    setenv("FANIN_TRUST_CONTAINERS", "1", 1);
    fanin_server *told = start(FANIN_SERVER_NO_UCX);
    setenv("FANIN_TRUST_CONTAINERS", "0", 1);
    fanin_server *untold = start(FANIN_SERVER_NO_UCX);
    unsetenv("FANIN_TRUST_CONTAINERS");
    assert_int_equal(offered_to(told, CLONE_NEWUSER, &p), own_paths());
    peer_close(&p);
    assert_int_equal(offered_to(untold, CLONE_NEWUSER, &p), 1u << WIRE_PATH_STREAM);
}

/* Once for a reason, with what to do. */
SERVER_TEST(strangers_are_told_once)
{
    fanin_server_config c = server_config();
    c.log = log_catch;
    log_listen("unix-stranger");
    fanin_server *s = server_start(&c);
    peer p;
    for (int i = 0; i < 3; i++) {
        (void)offered_to(s, CLONE_NEWPID, &p);
        peer_close(&p);
    }
    log_expect(1, "--trust-containers");
}

TESTS_BETWEEN(set_up, NULL)
