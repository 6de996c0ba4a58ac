/* SPDX-License-Identifier: Apache-2.0 */
#include "host.h"
#include "log_catcher.h"
#include "socket.h"
#include "testing.h"

#include <fcntl.h>
#include <net/if.h>
#include <poll.h>
#include <sys/resource.h>
#include <sys/un.h>
#include <sys/wait.h>

static socket_address resolved(const char *text)
{
    socket_address a;
    assert_works(socket_resolve(text, &a, ERROR));
    return a;
}

TEST(addresses_are_parsed)
{
    assert_string_equal(resolved("127.0.0.1:6000").text, "127.0.0.1:6000");
    assert_string_equal(resolved("[::1]:6000").text, "[::1]:6000");
    assert_string_equal(resolved("[2001:db8::1]:65535").text, "[2001:db8::1]:65535");
    assert_string_equal(resolved("localhost:1").text, "127.0.0.1:1");
    static const char *const bad[] = {
        "",         "host",   "host:",   ":80",  "host:x", "host:-1",   "h:65536",
        "h:123456", "::1:80", "[::1]80", "[::1", "[]:80",  "1.2.3.4:8 "};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        socket_address a;
        fanin_error error = FANIN_ERROR_INIT;
        assert_int_equal(socket_resolve(bad[i], &a, &error), FANIN_ERR_ARGUMENT);
        assert_non_null(strstr(error.message, bad[i]));
    }
    socket_address a;
    assert_int_equal(socket_resolve(NULL, &a, NULL), FANIN_ERR_ARGUMENT);
}

TEST(link_local_addresses_keep_their_interface)
{
    char text[64];
    assert_string_equal(resolved("[fe80::1%lo]:6000").text, "[fe80::1%lo]:6000");
    snprintf(text, sizeof text, "[FE80:0::1%%%u]:6000", if_nametoindex("lo"));
    socket_address a = resolved(text), again = resolved("[fe80::1%lo]:6000"), name;
    assert_string_equal(a.text, again.text);
    assert_memory_equal(&a.storage, &again.storage, sizeof(struct sockaddr_in6));
    socket_listen_text(&a, text);
    assert_string_equal(text, a.text);
    socket_unix_address(7, &a, &name);
    assert_string_equal(name.text, "unix:7/[fe80::1%lo]:6000");
    static const char *const bad[] = {"[fe80::1]:6000", "[fe80::1%nosuch0]:6000",
                                      "[fe80::1%]:6000"};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        fanin_error error = FANIN_ERROR_INIT;
        assert_int_equal(socket_resolve(bad[i], &a, &error), FANIN_ERR_ARGUMENT);
        assert_says(error.message, "interface");
        assert_says(error.remedy, "interface");
        assert_string_equal(error.address, bad[i]);
    }
}

static bool loopback(const char *text)
{
    socket_address a = resolved(text);
    return socket_is_loopback(&a);
}

static bool local(const char *text)
{
    socket_address a = resolved(text);
    return socket_is_local(&a);
}

static bool wildcard(const char *text)
{
    socket_address a = resolved(text);
    return socket_is_wildcard(&a);
}

TEST(addresses_are_classified)
{
    assert_true(loopback("127.0.0.1:1"));
    assert_true(loopback("127.9.9.9:1"));
    assert_true(loopback("[::1]:1"));
    assert_true(loopback("[::ffff:127.0.0.1]:1"));
    assert_false(loopback("128.0.0.1:1"));
    assert_false(loopback("[::2]:1"));
    assert_true(local("127.0.0.1:1"));
    assert_false(local("192.0.2.1:1"));
    assert_true(wildcard("0.0.0.0:1"));
    assert_true(wildcard("[::]:1"));
    assert_true(wildcard("[::ffff:0.0.0.0]:1"));
    assert_false(wildcard("127.0.0.1:1"));
}

static void leads_to(const char *text, const char *expected)
{
    socket_address a = resolved(text);
    char whole[SOCKET_TEXT];
    socket_to_connect(&a);
    socket_listen_text(&a, whole);
    assert_string_equal(whole, expected);
}

TEST(wildcards_lead_to_loopback)
{
    leads_to("0.0.0.0:1", "127.0.0.1:1");
    leads_to("[::]:2", "[::1]:2");
    leads_to("[::ffff:0.0.0.0]:3", "127.0.0.1:3");
    leads_to("192.0.2.1:4", "192.0.2.1:4");
    leads_to("[2001:db8::1]:5", "[2001:db8::1]:5");
}

static void unix_name_is(const char *address, const char *expected)
{
    socket_address tcp = resolved(address), a;
    socket_unix_address(1000, &tcp, &a);
    const struct sockaddr_un *un = (const void *)&a.storage;
    assert_int_equal(un->sun_family, AF_UNIX);
    assert_int_equal(a.length,
                     offsetof(struct sockaddr_un, sun_path) + 1 + strlen(expected));
    assert_int_equal(un->sun_path[0], '\0');
    assert_memory_equal(un->sun_path + 1, expected, strlen(expected));
    assert_true(socket_is_loopback(&a));
    assert_false(socket_is_wildcard(&a));
}

TEST(unix_names_have_the_address)
{
    unix_name_is("127.0.0.1:6000", "fanin-1000-127.0.0.1:6000");
    unix_name_is("127.0.0.2:6000", "fanin-1000-127.0.0.2:6000");
    unix_name_is("localhost:6000", "fanin-1000-127.0.0.1:6000");
    unix_name_is("[::ffff:127.0.0.2]:65535", "fanin-1000-127.0.0.2:65535");
    unix_name_is("[0:0::1]:6000", "fanin-1000-[::1]:6000");
    socket_address a = resolved("[::1]:0");
    socket_set_port(&a, 6001);
    assert_string_equal(a.text, "[::1]:6001");
}

static int accept_in_time(int listener, socket_address *peer)
{
    struct pollfd p = {.fd = listener, .events = POLLIN};
    assert_int_equal(poll(&p, 1, 10000), 1);
    return socket_accept(listener, peer);
}

static void connects(const socket_address *a, int listener)
{
    socket_address peer;
    int client;
    assert_works(socket_connect_start(a, &client, ERROR));
    int server = accept_in_time(listener, &peer);
    assert_true(server >= 0);
    struct pollfd p = {.fd = client, .events = POLLOUT};
    assert_int_equal(poll(&p, 1, 10000), 1);
    assert_int_equal(socket_connect_result(client), 0);
    socket_tune(server);
    int fds[] = {client, server};
    for (size_t i = 0; i < 2; i++) {
        assert_true(fcntl(fds[i], F_GETFD) & FD_CLOEXEC);
        assert_true(fcntl(fds[i], F_GETFL) & O_NONBLOCK);
    }
    uid_t uid = 12345;
    pid_t pid = 0;
    bool is_unix = a->storage.ss_family == AF_UNIX;
    assert_int_equal(socket_peer_credentials(server, &uid, &pid), is_unix);
    if (is_unix) {
        assert_int_equal(uid, geteuid());
        assert_int_equal(pid, getpid());
    }
    assert_int_equal(socket_is_loopback(&peer), true);
    assert_true(socket_stays_here(client) && socket_stays_here(server));
    close(client);
    close(server);
}

/* As the kernel has it once all ports of its range are taken. */
static bool no_port_is_free;

int __real_bind(int fd, const struct sockaddr *address, socklen_t size);
int __wrap_bind(int fd, const struct sockaddr *address, socklen_t size);
int __wrap_bind(int fd, const struct sockaddr *address, socklen_t size)
{
    if (!no_port_is_free)
        return __real_bind(fd, address, size);
    errno = EADDRINUSE;
    return -1;
}

TEST(a_lack_of_ports_is_told)
{
    socket_address tcp = resolved("127.0.0.1:0"), name = tcp;
    socket_unix_address(geteuid(), &tcp, &name);
    fanin_error error = FANIN_ERROR_INIT;
    int listener;
    no_port_is_free = true;
    fanin_status by_tcp = socket_listen(&tcp, 5, &listener, &error);
    assert_null(strstr(error.message, "port 0"));
    assert_says(error.message, "ip_local_port_range");
    assert_says(error.remedy, "base_port");
    fanin_status by_name = socket_listen(&name, 5, &listener, &error);
    assert_null(strstr(error.message, "port 0"));
    assert_says(error.message, name.text);
    no_port_is_free = false;
    assert_int_equal(by_tcp, FANIN_ERR_LIMIT);
    assert_int_equal(by_name, FANIN_ERR_EXISTS);
}

TEST(sockets_connect)
{
    socket_address a = resolved("127.0.0.1:0");
    fanin_error error = FANIN_ERROR_INIT;
    int listener, other;
    assert_ok(socket_listen(&a, 5, &listener, &error), error);
    uint16_t port = socket_port(listener);
    assert_true(port > 0);
    char text[32];
    snprintf(text, sizeof text, "127.0.0.1:%u", (unsigned)port);
    a = resolved(text);
    connects(&a, listener);
    assert_int_equal(socket_listen(&a, 5, &other, &error), FANIN_ERR_EXISTS);
    assert_int_equal(error.sys_errno, EADDRINUSE);
    assert_non_null(strstr(error.message, text + 10));
    assert_non_null(strstr(error.remedy, "ss -ltnp"));
    close(listener);
    /* Nobody listens any more. */
    int client;
    if (socket_connect_start(&a, &client, &error) == FANIN_OK) {
        struct pollfd p = {.fd = client, .events = POLLOUT};
        assert_int_equal(poll(&p, 1, 10000), 1);
        assert_int_equal(socket_connect_result(client), ECONNREFUSED);
        close(client);
    } else {
        assert_int_equal(error.status, FANIN_ERR_UNREACHABLE);
    }
    socket_address tcp = a;
    socket_unix_address(geteuid(), &tcp, &a);
    assert_ok(socket_listen(&a, 5, &listener, &error), error);
    connects(&a, listener);
    assert_int_equal(socket_listen(&a, 5, &other, &error), FANIN_ERR_EXISTS);
    close(listener);
    a = resolved("192.0.2.1:1234");
    assert_int_equal(socket_listen(&a, 5, &other, &error), FANIN_ERR_ARGUMENT);
    assert_non_null(strstr(error.message, "192.0.2.1"));
}

static bool contains(const char *networks, const char *address)
{
    network *list;
    size_t count;
    assert_works(networks_parse(networks, &list, &count, ERROR));
    socket_address a = resolved(address);
    bool found = networks_contain(list, count, &a);
    free(list);
    return found;
}

TEST(networks_contain_addresses)
{
    assert_true(contains("10.0.0.0/8", "10.255.1.2:1"));
    assert_false(contains("10.0.0.0/8", "11.0.0.0:1"));
    assert_true(contains("192.168.128.0/17, fd00::/8", "192.168.255.1:1"));
    assert_false(contains("192.168.128.0/17", "192.168.127.255:1"));
    assert_true(contains("fd00::/8", "[fdff::1]:1"));
    assert_false(contains("fd00::/8", "[fe00::1]:1"));
    assert_true(contains("0.0.0.0/0", "1.2.3.4:1"));
    assert_false(contains("0.0.0.0/0", "[::1]:1"));
    assert_true(contains("::/0", "[::1]:1"));
    assert_true(contains("1.2.3.4", "1.2.3.4:1"));
    assert_false(contains("1.2.3.4", "1.2.3.5:1"));
    assert_true(contains("10.0.0.0/8", "[::ffff:10.1.1.1]:1"));
    static const char *const bad[] = {"",           "10.0.0.0/33", "10.0.0.0/",
                                      "10.0.0.0/x", "10.1.0.0/8",  "fd00::/129",
                                      "host",       "10.0.0.0/8,", "10.0.0/8"};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        network *list;
        size_t count;
        fanin_error error = FANIN_ERROR_INIT;
        assert_int_equal(networks_parse(bad[i], &list, &count, &error),
                         FANIN_ERR_ARGUMENT);
        assert_null(list);
        assert_true(strlen(error.remedy) > 0);
    }
}

TEST(processes_of_a_host_have_one_id)
{
    char own[HOST_ID_SIZE], theirs[HOST_ID_SIZE] = "";
    int ends[2];
    host_id(NULL, own);
    assert_true(strlen(own) > 32);
    assert_int_equal(pipe(ends), 0);
    pid_t child = fork();
    if (child == 0) {
        host_id(NULL, theirs);
        _exit(write(ends[1], theirs, sizeof theirs) == sizeof theirs ? 0 : 1);
    }
    int code;
    assert_int_equal(waitpid(child, &code, 0), child);
    assert_int_equal(read(ends[0], theirs, sizeof theirs), sizeof theirs);
    assert_string_equal(own, theirs);
    close(ends[0]);
    close(ends[1]);
}

TEST(a_host_that_cannot_be_told_is_logged)
{
    const logger log = {.fn = log_catch};
    char id[HOST_ID_SIZE];
    struct rlimit before;
    assert_int_equal(getrlimit(RLIMIT_NOFILE, &before), 0);
    const struct rlimit none = {.rlim_max = before.rlim_max};
    log_listen("host-unknown");
    assert_int_equal(setrlimit(RLIMIT_NOFILE, &none), 0);
    host_id(&log, id);
    assert_int_equal(setrlimit(RLIMIT_NOFILE, &before), 0);
    assert_string_equal(id, "");
    log_expect(1, "ulimit -n");
}
