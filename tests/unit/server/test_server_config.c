/* SPDX-License-Identifier: Apache-2.0 */
/* Creating and ending servers: what is refused and with which words, limits, counters. */
#include "clock.h"
#include "log_catcher.h"
#include "server_peer.h"
#include "socket.h"
#include "testing.h"
#include <fanin/client.h>

#include <dirent.h>
#include <fcntl.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <inttypes.h>
#include <regex.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>

static uint8_t memory[1000];

static void expect_refused(const fanin_server_config *c, fanin_status status,
                           const char *words)
{
    fanin_server *s = NULL;
    fanin_error error = FANIN_ERROR_INIT;
    assert_int_equal(fanin_server_create(c, &s, &error), status);
    assert_null(s);
    char both[sizeof error.message + sizeof error.remedy + 4];
    snprintf(both, sizeof both, "%s (%s)", error.message, error.remedy);
    assert_says(both, words);
}

/* An address of a network of this host; false: it has none. */
static bool own_address(char out[64])
{
    struct ifaddrs *list;
    bool found = false;
    assert_int_equal(getifaddrs(&list), 0);
    for (const struct ifaddrs *i = list; i && !found; i = i->ifa_next)
        found = i->ifa_addr && i->ifa_addr->sa_family == AF_INET &&
                !(i->ifa_flags & IFF_LOOPBACK) && (i->ifa_flags & IFF_UP) &&
                getnameinfo(i->ifa_addr, sizeof(struct sockaddr_in), out, 64, NULL, 0,
                            NI_NUMERICHOST) == 0;
    freeifaddrs(list);
    return found;
}

/* "fe80::1%eth0" of this host; false: it has none. */
static bool own_link_local(char out[64])
{
    struct ifaddrs *list;
    bool found = false;
    assert_int_equal(getifaddrs(&list), 0);
    for (const struct ifaddrs *i = list; i && !found; i = i->ifa_next) {
        const struct sockaddr_in6 *in6 = (const void *)i->ifa_addr;
        found = in6 && in6->sin6_family == AF_INET6 && (i->ifa_flags & IFF_RUNNING) &&
                IN6_IS_ADDR_LINKLOCAL(&in6->sin6_addr) &&
                getnameinfo(i->ifa_addr, sizeof *in6, out, 64, NULL, 0,
                            NI_NUMERICHOST) == 0;
    }
    freeifaddrs(list);
    return found;
}

SERVER_TEST(a_link_local_address_is_served)
{
    char bind[64], address[96];
    fanin_error error = FANIN_ERROR_INIT;
    if (!own_link_local(bind))
        skip();
    fanin_server_config c = server_config();
    c.bind = bind;
    c.flags = FANIN_SERVER_OPEN | FANIN_SERVER_INSECURE | FANIN_SERVER_NO_UCX;
    c.allow = "fe80::/10";
    fanin_server *s = server_start(&c);
    fanin_client_config of_client;
    fanin_client *client;
    fanin_client_config_init(&of_client, sizeof of_client);
    for (unsigned no_unix = 0; no_unix < 2; no_unix++) {
        of_client.no_unix = no_unix;
        snprintf(address, sizeof address, "[%s]:%u", bind,
                 (unsigned)fanin_server_port(s));
        const char *list[] = {address};
        assert_ok(fanin_client_create(&of_client, &client, &error), error);
        fanin_status status = fanin_client_connect(client, list, 1, 5000, &error);
        fanin_client_destroy(&client);
        assert_ok(status, error);
    }
    server_stop(&s, 0);
    bind[strcspn(bind, "%")] = '\0';
    expect_refused(&c, FANIN_ERR_ARGUMENT, "names no interface");
}

SERVER_TEST(openness_is_said_aloud)
{
    char address[64], secret[] = "/tmp/test-secret-XXXXXX";
    fanin_server_config c = server_config();
    if (!own_address(address))
        skip();
    c.bind = address;
    c.flags = FANIN_SERVER_OPEN | FANIN_SERVER_NO_UCX;
    c.allow = "10.0.0.0/8";
    c.secret_file = "";
    expect_refused(&c, FANIN_ERR_ARGUMENT, "without the launch's secret");
    expect_refused(&c, FANIN_ERR_ARGUMENT, "--secret-file");
    expect_refused(&c, FANIN_ERR_ARGUMENT, "--insecure");
    int fd = mkstemp(secret);
    assert_true(fd >= 0);
    assert_int_equal(write(fd, "0123456789abcdef0123456789abcdef", 32), 32);
    close(fd);
    c.secret_file = secret;
    static const char *const wide[] = {"0.0.0.0/0", "10.0.0.0/8,0.0.0.0/1", "::/0",
                                       "2000::/3", "8.0.0.0/7"};
    for (size_t i = 0; i < sizeof wide / sizeof *wide; i++) {
        c.allow = wide[i];
        expect_refused(&c, FANIN_ERR_ARGUMENT, "wider than any private one");
    }
    expect_refused(&c, FANIN_ERR_ARGUMENT, "--insecure");
    c.allow = "10.0.0.0/8,fc00::/7";
    fanin_server *s = server_start(&c);
    server_stop(&s, 0);
    unlink(secret);
    c.secret_file = "";
    c.allow = "0.0.0.0/0,::/0";
    setenv("FANIN_INSECURE", "off", 1);
    expect_refused(&c, FANIN_ERR_ARGUMENT, "--insecure");
    setenv("FANIN_INSECURE", "1", 1);
    c.log = log_catch;
    log_listen("insecure");
    s = server_start(&c);
    unsetenv("FANIN_INSECURE");
    log_expect(2, "of prefix /0, which is wider than any private one");
    server_stop(&s, 0);
    c.allow = "10.0.0.0/8";
    c.flags |= FANIN_SERVER_INSECURE;
    log_listen("insecure");
    s = server_start(&c);
    log_expect(1, "without the launch's secret or certificates: everybody");
    server_stop(&s, 0);
    c.log = NULL;
    c.allow = "0.0.0.0/0,::/0";
    s = server_start(&c);
    server_stop(&s, 0);
    /* Where nobody comes from elsewhere. */
    c.flags = FANIN_SERVER_OPEN | FANIN_SERVER_NO_UCX;
    c.bind = "127.0.0.1";
    s = server_start(&c);
    server_stop(&s, 0);
}

SERVER_TEST(bad_configurations_are_refused)
{
    static const struct {
        uint32_t rank, world_size;
        const char *bind, *allow, *name;
        uint32_t flags;
        uint16_t base_port;
        const char *words;
    } bad[] = {
        {1, 1, "127.0.0.1", NULL, "n", 0, 0, "rank 1"},
        {0, 0, "127.0.0.1", NULL, "n", 0, 0, "world size"},
        {0, 65537, "127.0.0.1", NULL, "n", 0, 0, "world size"},
        {0, 1, "localhost", NULL, "n", 0, 0, "numeric"},
        {0, 1, "0.0.0.0", NULL, "n", 0, 0, "wildcard"},
        {0, 1, "::", "10.0.0.0/8", "n", FANIN_SERVER_OPEN, 0, "wildcard"},
        {0, 1, "192.0.2.1", NULL, "n", 0, 0, "loopback"},
        {0, 1, "192.0.2.1", NULL, "n", FANIN_SERVER_OPEN, 0, "allow-list"},
        {0, 1, "192.0.2.1", "10.0.0.0/8", "n",
         FANIN_SERVER_OPEN | FANIN_SERVER_INSECURE, 0, "192.0.2.1"},
        {0, 1, "127.0.0.1", "10.1.0.0/8", "n", FANIN_SERVER_OPEN, 0, "10.1.0.0/8"},
        {0, 1, "127.0.0.1", NULL, "", 0, 0, "name"},
        {0, 1, "127.0.0.1", NULL, "\xff", 0, 0, "name"},
        {0, 1, "127.0.0.1", NULL, "n", 128, 0, "flag"},
        {0, 2, "127.0.0.1", NULL, "n", FANIN_SERVER_RELAY, 0, "rank 0 of 1"},
        {9, 10, "127.0.0.1", NULL, "n", 0, 65530, "65530"},
    };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        fanin_server_config c = server_config();
        c.rank = bad[i].rank;
        c.world_size = bad[i].world_size;
        c.bind = bad[i].bind;
        c.allow = bad[i].allow;
        c.name = bad[i].name;
        c.flags |= bad[i].flags;
        c.base_port = bad[i].base_port;
        expect_refused(&c, FANIN_ERR_ARGUMENT, bad[i].words);
    }
    fanin_server_config c = server_config();
    memset(c.world_id, 0, sizeof c.world_id);
    expect_refused(&c, FANIN_ERR_ARGUMENT, "world id");
    c = server_config();
    c.data_threads = 17;
    expect_refused(&c, FANIN_ERR_ARGUMENT, "data_threads");
    c.data_threads = 16;
    c.max_memory = (uint64_t)127 << 20;
    expect_refused(&c, FANIN_ERR_ARGUMENT, "8 MiB for each data thread");
    c.data_threads = 0;
    c.max_bytes_per_second = 999999;
    expect_refused(&c, FANIN_ERR_ARGUMENT, "max_bytes_per_second");
    c.max_bytes_per_second = 1000000;
    c.max_memory = (uint64_t)7 << 20;
    expect_refused(&c, FANIN_ERR_ARGUMENT, "8 MiB for each data thread");
    c = server_config();
    c.stranger_share_ms = 60001;
    expect_refused(&c, FANIN_ERR_ARGUMENT, "share");
    c = server_config();
    c.own_share_ms = UINT32_MAX;
    expect_refused(&c, FANIN_ERR_ARGUMENT, "share");
    c = server_config();
    c.nice = -21;
    expect_refused(&c, FANIN_ERR_ARGUMENT, "nice");
    c = server_config();
    c.struct_size = 3;
    expect_refused(&c, FANIN_ERR_ARGUMENT, "config_init");
    expect_refused(NULL, FANIN_ERR_ARGUMENT, "configuration");
    fanin_server *none = NULL;
    fanin_server_destroy(&none, 0);
    fanin_server_destroy(NULL, 0);
    assert_int_equal(fanin_server_port(NULL), 0);
}

SERVER_TEST(a_port_in_use_is_named)
{
    fanin_server *s = server_start(NULL);
    fanin_server_config c = server_config();
    char port[16];
    c.base_port = (uint16_t)(fanin_server_port(s) - 1);
    c.rank = 1;
    c.world_size = 2;
    snprintf(port, sizeof port, "port %u", (unsigned)fanin_server_port(s));
    expect_refused(&c, FANIN_ERR_EXISTS, port);
    expect_refused(&c, FANIN_ERR_EXISTS, "ss -ltnp");
    c.base_port++;
    c.rank = 0;
    expect_refused(&c, FANIN_ERR_EXISTS, port);
    uint16_t again = fanin_server_port(s);
    server_stop(&s, 0);
    c.base_port = again;
    s = server_start(&c); /* free at once */
    assert_int_equal(fanin_server_port(s), again);
}

SERVER_TEST(the_config_of_a_caller_may_be_shorter)
{
    uint8_t bytes[sizeof(fanin_server_config)];
    memset(bytes, 0xee, sizeof bytes);
    fanin_server_config_init((fanin_server_config *)(void *)bytes, 24);
    for (size_t i = 24; i < sizeof bytes; i++)
        assert_int_equal(bytes[i], 0xee);
}

/* In a child, since the limits cannot be put back without a privilege. */
static int create_as(uint32_t flags, rlim_t soft, rlim_t hard, uint32_t sessions,
                     int more)
{
    pid_t child = fork();
    if (child == 0) {
        struct rlimit limit = {soft, hard};
        fanin_error error = FANIN_ERROR_INIT;
        fanin_server *s = NULL;
        fanin_server_config c = server_config();
        c.max_sessions = sessions;
        c.flags |= flags;
        for (int i = 0; i < more; i++)
            if (dup(0) < 0)
                _exit(1);
        if (setrlimit(RLIMIT_NOFILE, &limit) != 0)
            _exit(2);
        fanin_status status = fanin_server_create(&c, &s, &error);
        if (status == FANIN_ERR_LIMIT)
            _exit(strstr(error.remedy, "ulimit -n") && strstr(error.message, "files")
                      ? strstr(error.remedy, "max_sessions") ? 10 : 13
                      : 3);
        getrlimit(RLIMIT_NOFILE, &limit);
        fanin_server_destroy(&s, 0);
        _exit(status == FANIN_OK ? limit.rlim_cur > soft ? 12 : 11 : 4);
    }
    return tests_await(child);
}

static int create_with_limit(rlim_t soft, rlim_t hard, uint32_t sessions, int more)
{
    return create_as(0, soft, hard, sessions, more);
}

SERVER_TEST(descriptor_limits_are_checked)
{
    assert_int_equal(create_with_limit(200, 200, 256, 0), 10);
    assert_int_equal(create_with_limit(300, 500, 256, 0), 12); /* raised */
    assert_int_equal(create_with_limit(400, 400, 256, 0), 11);
    assert_int_equal(create_with_limit(400, 400, 256, 100), 10);
    assert_int_equal(create_with_limit(400, 400, 0, 0),
                     11); /* as many as there is room for */
    assert_int_equal(create_with_limit(400, 400, 0, 300), 11);
    assert_int_equal(create_with_limit(300, 1000, 0, 0), 12);
    assert_int_equal(create_with_limit(60, 60, 0, 0), 10); /* not even for one client */
    /* a relay's caller cannot choose its sessions */
    assert_int_equal(create_as(FANIN_SERVER_RELAY, 60, 60, 0, 0), 13);
}

SERVER_TEST(a_forked_child_touches_nothing)
{
    fanin_server *s = server_start(NULL);
    server_put(s, RUN, "a", memory, 10);
    pid_t child = fork();
    if (child == 0) {
        fanin_box box;
        fanin_tensor t = byte_tensor("b", &box, memory, 1);
        fanin_server_stats stats = {.struct_size = sizeof stats};
        char text[16];
        int good = 0;
        good += fanin_server_put(s, RUN, &t, 1, false, NULL) == FANIN_ERR_FORKED;
        good += fanin_server_remove(s, RUN, NULL, NULL) == FANIN_ERR_FORKED;
        good += fanin_server_begin_update(s, RUN, NULL) == FANIN_ERR_FORKED;
        good += fanin_server_commit(s, RUN, 1, NULL, NULL) == FANIN_ERR_FORKED;
        good += fanin_server_abort_update(s, RUN, NULL) == FANIN_ERR_FORKED;
        good += fanin_server_set_metadata(s, RUN, NULL, 0, NULL) == FANIN_ERR_FORKED;
        good += fanin_server_list(s, NULL, NULL, NULL, NULL) == FANIN_ERR_FORKED;
        good += fanin_server_get_stats(s, &stats) == FANIN_ERR_FORKED;
        good += fanin_server_prometheus(s, text, 16, NULL) == FANIN_ERR_FORKED;
        good += fanin_server_port(s) == 0;
        fanin_server_destroy(&s, 1000);
        good += s == NULL;
        _exit(good);
    }
    assert_int_equal(tests_await(child), 11);
    server_commit(s, 1);
    peer p = peer_open(s);
    peer_newest(&p);
}

/* Trainers fork (data loaders): copies of descriptors in a child keep nothing alive. */
SERVER_TEST(a_child_with_copies_does_not_keep_connections)
{
    fanin_server *s = server_start(NULL);
    peer p = peer_open(s), q = peer_open(s), late;
    peer d = peer_data(s, &p);
    int hold[2];
    assert_int_equal(pipe(hold), 0);
    pid_t child = fork();
    if (child == 0) {
        char byte;
        close(hold[1]);
        _exit(read(hold[0], &byte, 1) == 0 ? 0 : 1);
    }
    close(hold[0]);
    /* The server ends one session, which ends its data connection, too. */
    buffer b = {0};
    encode_empty(&b, 1, MSG_PONG);
    peer_send(&p, &b);
    peer_expect_error(&p, FANIN_ERR_PROTOCOL);
    shutdown(p.fd, SHUT_WR);
    peer_expect_closed(&p);
    peer_expect_closed(&d);
    peer_ping(&q);
    fanin_server_config c = server_config();
    c.base_port = fanin_server_port(s);
    server_stop(&s, 0);
    peer_expect_closed(&q);
    s = server_start(&c); /* the port is free, although the child has the listener */
    late = peer_open(s);
    peer_ping(&late);
    close(hold[1]);
    assert_int_equal(tests_await(child), 0);
}

/* A rank that is killed while a child of it lives on: its readers notice at once, and the next rank
   gets the port. */
/* Whether 0 to 2 fail each write as closed descriptors do, and none of them is anything else's. */
static bool holds_nothing(void)
{
    for (int fd = 0; fd <= 2; fd++) {
        if (write(fd, "x", 1) >= 0 || errno != EBADF || fcntl(fd, F_GETFD) < 0)
            return false;
        close(fd);
    }
    return true;
}

static int without_standard_descriptors(void)
{
    fanin_server_config of_server = server_config();
    fanin_client_config of_client;
    fanin_server *s = NULL;
    fanin_client *c = NULL;
    for (int fd = 0; fd <= 2; fd++)
        close(fd);
    if (fanin_server_create(&of_server, &s, NULL) != FANIN_OK || !holds_nothing())
        return 1;
    fanin_client_config_init(&of_client, sizeof of_client);
    if (fanin_client_create(&of_client, &c, NULL) != FANIN_OK || !holds_nothing())
        return 2;
    fanin_client_destroy(&c);
    fanin_server_destroy(&s, 0);
    return 0;
}

SERVER_TEST(closed_standard_descriptors_get_nothing)
{
    pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0)
        _exit(without_standard_descriptors());
    assert_int_equal(tests_await(child), 0);
}

SERVER_TEST(a_killed_rank_leaves_its_child_nothing)
{
    int report[2], hold[2], met[2]; /* met: the reader has a session */
    assert_int_equal(pipe(report), 0);
    assert_int_equal(pipe(met), 0);
    assert_int_equal(pipe(hold), 0);
    pid_t rank = fork();
    if (rank == 0) {
        fanin_server *s = server_start(NULL);
        uint16_t port = fanin_server_port(s);
        char byte;
        close(hold[1]);
        if (write(report[1], &port, sizeof port) != sizeof port ||
            read(met[0], &byte, 1) != 1)
            _exit(1);
        pid_t child = fork();
        if (child == 0) /* until the test ends */
            _exit(write(report[1], &child, sizeof child) > 0 &&
                  read(hold[0], &byte, 1));
        for (;;)
            pause();
    }
    uint16_t port;
    pid_t child;
    assert_int_equal(read(report[0], &port, sizeof port), sizeof port);
    peer p = peer_open_at(port);
    assert_int_equal(write(met[1], "", 1), 1);
    assert_int_equal(read(report[0], &child, sizeof child), sizeof child);
    assert_int_equal(kill(rank, SIGKILL), 0);
    assert_int_equal(waitpid(rank, NULL, 0), rank);
    peer_expect_closed(&p);
    fanin_server_config c = server_config();
    c.base_port = port;
    fanin_server *s = server_start(&c);
    peer q = peer_open(s);
    peer_ping(&q);
    close(hold[0]);
    close(hold[1]);
    close(report[0]);
    close(report[1]);
    close(met[0]);
    close(met[1]);
}

/* Whether a thread of that name exists and blocks every signal that can be blocked. */
static bool thread_blocks_signals(const char *name)
{
    bool found = false;
    DIR *tasks = opendir("/proc/self/task");
    assert_non_null(tasks);
    for (struct dirent *d; (d = readdir(tasks));) {
        char path[300], line[300];
        unsigned long long blocked = 0;
        bool named = false;
        snprintf(path, sizeof path, "/proc/self/task/%s/status", d->d_name);
        FILE *f = d->d_name[0] == '.' ? NULL : fopen(path, "r");
        while (f && fgets(line, sizeof line, f)) {
            line[strcspn(line, "\n")] = '\0';
            named =
                named || (strncmp(line, "Name:\t", 6) == 0 && !strcmp(line + 6, name));
            sscanf(line, "SigBlk: %llx", &blocked);
        }
        if (f)
            fclose(f);
        /* SIGTERM, SIGINT, SIGCHLD, SIGUSR1 */
        found = found || (named && (blocked & 0x14202) == 0x14202);
    }
    closedir(tasks);
    return found;
}

SERVER_TEST(threads_block_signals)
{
    fanin_server *s = server_start(NULL);
    peer p = peer_open(s);
    assert_true(thread_blocks_signals("fanin-control"));
    assert_true(thread_blocks_signals("fanin-data"));
    peer_close(&p);
    server_stop(&s, 0);
    assert_false(thread_blocks_signals("fanin-control"));
    assert_false(thread_blocks_signals("fanin-data"));
}

/* ------------------------------------------------------------------ limits */

static msg_error refused(fanin_server *s, bool over_unix, fanin_status code)
{
    peer p = over_unix ? peer_connect_unix(s) : peer_connect(s);
    msg_error e = peer_expect_error(&p, code);
    peer_expect_closed(&p);
    return e;
}

SERVER_TEST(connections_are_limited)
{
    fanin_server_config c = server_config();
    c.max_sessions = 6;
    fanin_server *s = server_start(&c);
    peer p[6];
    p[0] = peer_open(s);
    p[1] = peer_data(s, &p[0]);
    p[2] = peer_data(s, &p[0]);
    refused(s, false, FANIN_ERR_LIMIT); /* half for one network peer */
    p[3] = peer_open_unix(s);           /* the server's own user may have the rest */
    p[4] = peer_open_unix(s);
    p[5] = peer_data_unix(s, &p[4]);
    msg_error e = refused(s, true, FANIN_ERR_LIMIT);
    assert_non_null(strstr(e.message, "6 connections"));
    fanin_server_stats stats = server_stats(s);
    assert_int_equal(stats.sessions, 6);
    assert_int_equal(stats.sessions_opened, 6);
    assert_int_equal(stats.sessions_refused, 2);
    peer_close(&p[4]); /* and with it its data connection */
    peer_await_count(&p[0], s, offsetof(fanin_server_stats, sessions), 4);
    p[4] = peer_open_unix(s);
}

/* Clients that connect first and pull later find room for their bytes. */
SERVER_TEST(sessions_leave_room_for_data)
{
    fanin_server_config c = server_config();
    c.max_sessions = 8;
    fanin_server *s = server_start(&c);
    peer p[4], d[4];
    p[0] = peer_open(s);
    p[1] = peer_open(s);
    peer late = peer_connect(s);
    msg_hello hello = {
        .version_min = VERSION_MIN, .version_max = VERSION_MAX, .role = ROLE_CONTROL};
    peer_request_hello(&late, &hello);
    msg_error e = peer_expect_error(&late, FANIN_ERR_LIMIT);
    assert_non_null(strstr(e.message, "max_sessions"));
    peer_expect_closed(&late);
    peer_close(&late);
    /* what was refused is gone */
    peer_await_count(&p[0], s, offsetof(fanin_server_stats, sessions), 2);
    p[2] = peer_open_unix(s);
    p[3] = peer_open_unix(s);
    for (size_t i = 0; i < 4; i++)
        d[i] = i < 2 ? peer_data(s, &p[i]) : peer_data_unix(s, &p[i]);
    for (size_t i = 0; i < 4; i++)
        peer_ping(&d[i]);
}

SERVER_TEST(many_refused_peers_do_no_harm)
{
    fanin_server_config c = server_config();
    c.max_sessions = 2;
    fanin_server *s = server_start(&c);
    peer p = peer_open(s), q = peer_data(s, &p), refusals[40];
    for (size_t i = 0; i < 40; i++)
        refusals[i] = peer_connect(s);
    peer_ping(&p);
    for (size_t i = 0; i < 40; i++)
        peer_close(&refusals[i]);
    peer_ping(&q);
}

SERVER_TEST(open_servers_mind_the_allow_list)
{
    fanin_server_config c = server_config();
    c.flags |= FANIN_SERVER_OPEN;
    c.bind = "127.0.0.1";
    c.allow = "10.0.0.0/8,fd00::/8";
    fanin_server *s = server_start(&c);
    refused(s, false, FANIN_ERR_AUTH);
    server_stop(&s, 0);
    c.allow = "10.0.0.0/8,127.0.0.0/8";
    s = server_start(&c);
    peer p = peer_open(s);
    peer_ping(&p);
}

SERVER_TEST(other_users_are_refused_on_the_unix_socket)
{
    if (geteuid() != 0)
        skip();
    fanin_server *s = server_start(NULL);
    socket_address a, tcp;
    char where[32];
    snprintf(where, sizeof where, "127.0.0.1:%u", (unsigned)fanin_server_port(s));
    assert_int_equal(socket_resolve(where, &tcp, NULL), FANIN_OK);
    socket_unix_address(0, &tcp, &a);
    pid_t child = fork();
    if (child == 0) {
        int fd, code = 1;
        char text[600] = {0};
        if (setuid(65534) == 0 && (fd = socket(AF_UNIX, SOCK_STREAM, 0)) >= 0 &&
            connect(fd, (struct sockaddr *)&a.storage, a.length) == 0 &&
            recv(fd, text, sizeof text, 0) > FRAME_SIZE)
            code = memmem(text, sizeof text, "own user", 8) ? 0 : 2;
        _exit(code);
    }
    assert_int_equal(tests_await(child), 0);
    assert_int_equal(server_stats(s).sessions_refused, 1);
}

SERVER_TEST(idle_sessions_are_closed)
{
    fanin_server_config c = server_config();
    c.idle_ms = 1000;
    fanin_server *s = server_start(&c);
    peer idle = peer_open(s), waiting = peer_open(s);
    peer_request_wait(&waiting, RUN, WIRE_RULE_NEWEST, 0, 10000);
    peer_expect_closed(&idle);
    server_put(s, RUN, "a", memory, 10);
    server_commit(s, 1);
    peer_expect(&waiting, MSG_WAIT_OK);
}

SERVER_TEST(memory_is_limited)
{
    fanin_server_config c = server_config();
    c.max_memory = 8 << 20;
    fanin_server *s = server_start(&c);
    /* Metadata make a key table of three pages. */
    char *large = calloc(1, 1 << 20);
    memset(large, 'x', (1 << 20) - 100);
    fanin_pair pair = {"large", large};
    assert_int_equal(fanin_server_set_metadata(s, RUN, &pair, 1, NULL), FANIN_OK);
    server_commit(s, 1);
    peer p[20];
    bool limited = false;
    for (size_t i = 0; i < 20; i++) {
        p[i] = peer_open_unix(s);
        if (i == 0)
            peer_ping(&p[i]);
    }
    peer probe = peer_open_unix(s);
    grant g = peer_newest(&probe);
    msg_blob_request m = {.path = 0};
    memcpy(m.digest, g.key_digest, 16);
    for (size_t i = 0; i < 20; i++) {
        buffer b = {0};
        for (int j = 0; j < 3; j++)
            encode_blob_request(&b, 1, MSG_KEYS, &m);
        peer_send(&p[i], &b); /* and nobody takes the replies */
        if (server_stats(s).session_memory > c.max_memory)
            limited = true;
    }
    assert_false(limited);
    /* Somebody is told; whoever takes the bytes gets them. */
    size_t errors = 0;
    for (size_t i = 0; i < 20; i++) {
        for (int j = 0; j < 3; j++) {
            peer_receive(&p[i]);
            errors += p[i].frame.type == MSG_ERROR;
        }
        peer_close(&p[i]);
    }
    assert_true(errors > 0 && errors < 60);
    free(large);
}

SERVER_TEST(destroy_lets_pulls_end)
{
    fanin_server *s = server_start(NULL);
    server_put(s, RUN, "a", memory, 10);
    server_commit(s, 1);
    peer p = peer_open(s);
    peer_lease(&p);
    uint64_t start = clock_ns();
    server_stop(&s, 150);
    assert_true(clock_ns() - start >= UINT64_C(149000000));
    peer_expect_closed(&p);
    s = server_start(NULL);
    server_put(s, RUN, "a", memory, 10);
    server_commit(s, 1);
    p = peer_open(s);
    grant g = peer_lease(&p);
    peer_end(&p, &g, false);
    server_stop(&s, 3600000); /* waits for nobody, or this test has no end */
}

/* -------------------------------------------------------------- statistics */

static size_t count_text(const char *text, const char *what)
{
    size_t n = 0;
    for (const char *at = text; (at = strstr(at, what)); at += strlen(what))
        n++;
    return n;
}

/* Every line is a comment or a sample as text format 0.0.4 has them, and none comes twice. */
static void check_exposition(const char *text)
{
    static const char sample[] =
        "^[a-z_]+(\\{[a-z_]+=\"[^\"\\\\]*\"(,[a-z_]+=\"[^\"\\\\]*\")*\\})? "
        "[0-9]+(\\.[0-9]+)?$";
    regex_t form, comment;
    assert_int_equal(regcomp(&form, sample, REG_EXTENDED | REG_NOSUB), 0);
    assert_int_equal(
        regcomp(&comment,
                "^# (HELP [a-z_]+ .+|TYPE [a-z_]+ (counter|gauge|histogram))$",
                REG_EXTENDED | REG_NOSUB),
        0);
    char *copy = strdup(text);
    for (char *line = strtok(copy, "\n"); line; line = strtok(NULL, "\n")) {
        char key[256];
        if (regexec(line[0] == '#' ? &comment : &form, line, 0, NULL, 0) != 0)
            fail_msg("no line of the text format: %s", line);
        size_t length =
            line[0] == '#' ? strlen(line) : (size_t)(strrchr(line, ' ') - line) + 1;
        snprintf(key, sizeof key, "\n%.*s", (int)length, line);
        if (copy != line)
            assert_int_equal(count_text(text, key), 1);
    }
    free(copy);
    regfree(&form);
    regfree(&comment);
}

/* time() may be some milliseconds behind. */
static double unix_seconds(void)
{
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

SERVER_TEST(prometheus_tells_of_publications)
{
    static char text[65536];
    fanin_server *s = server_start(NULL);
    server_put(s, RUN, "a", memory, 10);
    server_put(s, "lora:b-2.x", "a", memory, 10);
    double before = unix_seconds();
    server_commit(s, 7);
    server_begin(s);
    assert_int_equal(fanin_server_prometheus(s, text, sizeof text, NULL), FANIN_OK);
    check_exposition(text);
    static const char step[] =
        "fanin_publication_step{publication=\"" RUN "\",rank=\"0\"} 7\n";
    assert_non_null(strstr(text, step));
    assert_non_null(strstr(text, "fanin_publication_state{publication=\"" RUN
                                 "\",rank=\"0\",state=\"writing\"} 1\n"));
    assert_non_null(strstr(text, "fanin_publication_state{publication=\"" RUN
                                 "\",rank=\"0\",state=\"stable\"} 0\n"));
    assert_non_null(strstr(text, "fanin_publication_state{publication=\"lora:b-2.x\","
                                 "rank=\"0\",state=\"unpublished\"} 1\n"));
    assert_null(strstr(text, "step{publication=\"lora:b-2.x\"")); /* never committed */
    assert_non_null(
        strstr(text, "# TYPE fanin_publication_commit_timestamp_seconds gauge\n"));
    static const char stamp[] =
        "fanin_publication_commit_timestamp_seconds{publication=\"" RUN
        "\",rank=\"0\"} ";
    const char *at = strstr(text, stamp);
    assert_non_null(at);
    double seconds = strtod(at + strlen(stamp), NULL);
    assert_true(seconds >= before && seconds <= unix_seconds());
    fanin_server_stats stats = {.struct_size = sizeof stats};
    assert_int_equal(fanin_server_get_stats(s, &stats), FANIN_OK);
    uint64_t waits = 0;
    for (size_t i = 0; i < FANIN_DRAIN_BUCKETS; i++)
        waits += stats.drain_waits[i];
    assert_true(waits > 0);
    char all[80];
    snprintf(all, sizeof all, "fanin_drain_seconds_bucket{le=\"+Inf\"} %" PRIu64 "\n",
             waits);
    assert_non_null(strstr(text, all));
    assert_non_null(strstr(text, "fanin_drain_seconds_bucket{le=\"0.0003\"} "));
    assert_non_null(strstr(text, "fanin_drain_seconds_bucket{le=\"30\"} "));
    assert_int_equal(fanin_server_remove(s, "lora:b-2.x", NULL, NULL), FANIN_OK);
    assert_int_equal(fanin_server_prometheus(s, text, sizeof text, NULL), FANIN_OK);
    assert_null(strstr(text, "lora:b-2.x"));
}

SERVER_TEST(prometheus_text_is_well_formed)
{
    fanin_server *s = server_start(NULL);
    server_put(s, RUN, "a", memory, 10);
    server_commit(s, 1);
    peer p = peer_open(s);
    grant g = peer_lease(&p);
    assert_true(peer_end(&p, &g, false).good);
    size_t length;
    assert_int_equal(fanin_server_prometheus(s, NULL, 0, &length), FANIN_OK);
    assert_true(length > 1000);
    char *text = malloc(length + 1), small[32];
    assert_int_equal(fanin_server_prometheus(s, small, sizeof small, NULL), FANIN_OK);
    assert_int_equal(strlen(small), sizeof small - 1);
    size_t again;
    assert_int_equal(fanin_server_prometheus(s, text, length + 1, &again), FANIN_OK);
    assert_int_equal(strlen(text), again);
    check_exposition(text);
    assert_non_null(strstr(text, "fanin_pulls_total{result=\"good\"} 1\n"));
    assert_non_null(strstr(text, "fanin_commits_total 1\n"));
    assert_non_null(strstr(text, "fanin_connections 1\n"));
    assert_non_null(strstr(text, "# HELP fanin_commits_withdrawn_total "));
    assert_non_null(strstr(text, "fanin_commits_withdrawn_total 0\n"));
    assert_non_null(strstr(text, "# HELP fanin_ipc_mappers "));
    assert_non_null(strstr(text, "fanin_ipc_mappers 0\n"));
    assert_non_null(strstr(text, "# TYPE fanin_drain_wait_seconds_total counter\n"));
    char family[100] = "";
    for (char *line = strtok(text, "\n"); line; line = strtok(NULL, "\n")) {
        char name[100], kind[20];
        if (sscanf(line, "# TYPE %99s %19s", name, kind) == 2) {
            snprintf(family, sizeof family, "%s", name);
            assert_true(!strcmp(kind, "counter") || !strcmp(kind, "gauge") ||
                        !strcmp(kind, "histogram"));
            assert_int_equal(!strcmp(kind, "counter"),
                             !strcmp(name + strlen(name) - 6, "_total"));
        } else if (strncmp(line, "# HELP fanin_", 13) != 0) {
            assert_int_equal(strncmp(line, family, strlen(family)), 0);
            assert_non_null(strchr(line, ' '));
        }
    }
    free(text);
    fanin_server_stats stats = {.struct_size = sizeof stats.struct_size};
    stats.pulls_good = 77;
    assert_int_equal(fanin_server_get_stats(s, &stats), FANIN_OK);
    assert_int_equal(stats.pulls_good, 77); /* beyond the caller's size */
    assert_int_equal(fanin_server_get_stats(s, NULL), FANIN_ERR_ARGUMENT);
}
