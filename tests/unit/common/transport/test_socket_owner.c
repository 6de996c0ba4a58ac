/* SPDX-License-Identifier: Apache-2.0 */
/* Whose process took the other end of a TCP connection of this host: by sock_diag, and without it.
   */
#include "neighbour.h"
#include "socket.h"
#include "testing.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/wait.h>

#define PATIENCE_MS 20000
#define STRANGER 1234

static bool no_netlink;

int __real_socket(int family, int type, int protocol);
int __wrap_socket(int family, int type, int protocol);
int __wrap_socket(int family, int type, int protocol)
{
    if (no_netlink && family == AF_NETLINK)
        return -1;
    return __real_socket(family, type, protocol);
}

typedef struct scene {
    socket_address at; /* that is connected to */
    int listener;
} scene;

/* @p address: "127.0.0.1:0"; *to: as that is asked for, with the port of the listener. */
static bool listen_at(scene *s, const char *address, const char *to)
{
    socket_address at;
    assert_int_equal(socket_resolve(address, &at, NULL), 0);
    if (socket_listen(&at, 8, &s->listener, NULL) != 0)
        return false;
    assert_int_equal(socket_resolve(to, &s->at, NULL), 0);
    socket_set_port(&s->at, socket_port(s->listener));
    return true;
}

static int connect_to(const scene *s)
{
    int fd = socket(s->at.storage.ss_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
    assert_int_equal(connect(fd, (const struct sockaddr *)&s->at.storage, s->at.length),
                     0);
    return fd;
}

/* Asked once the other end has been taken. */
static void expect_own(scene *s)
{
    uid_t uid;
    socket_address peer;
    int fd = connect_to(s);
    assert_false(socket_owner(fd, &uid)); /* nobody's yet */
    struct pollfd waits = {.fd = s->listener, .events = POLLIN};
    assert_int_equal(poll(&waits, 1, PATIENCE_MS), 1);
    int taken = socket_accept(s->listener, &peer);
    assert_true(taken >= 0);
    uid = 77;
    assert_true(socket_owner(fd, &uid));
    assert_int_equal(uid, geteuid());
    assert_true(socket_owner(taken, &uid)); /* and the other way round */
    close(taken);
    assert_false(socket_owner(fd, &uid)); /* nobody's any more */
    close(fd);
    close(s->listener);
}

TEST(own_processes_are_told)
{
    scene s;
    for (int i = 0; i < 2; i++) {
        no_netlink = i == 1;
        assert_true(listen_at(&s, "127.0.0.1:0", "127.0.0.1:0"));
        expect_own(&s);
        assert_true(listen_at(&s, "127.0.0.7:0", "127.0.0.7:0"));
        expect_own(&s);
        if (listen_at(&s, "[::1]:0", "[::1]:0"))
            expect_own(&s);
    }
}

/* A listener of IPv6 that takes IPv4 too, as other programs' are. */
TEST(both_families_are_told)
{
    for (int i = 0; i < 2; i++) {
        no_netlink = i == 1;
        scene s = {.listener = socket(AF_INET6, SOCK_STREAM | SOCK_NONBLOCK, 0)};
        struct sockaddr_in6 any = {.sin6_family = AF_INET6};
        if (s.listener < 0 ||
            bind(s.listener, (const struct sockaddr *)&any, sizeof any) != 0)
            skip();
        assert_int_equal(listen(s.listener, 8), 0);
        assert_int_equal(socket_resolve("127.0.0.1:1", &s.at, NULL), 0);
        socket_set_port(&s.at, socket_port(s.listener));
        expect_own(&s);
    }
}

typedef struct stranger {
    pid_t pid;
    uint16_t port;
    int keep; /* it ends with this pipe */
} stranger;

/* Listens as another user, takes one connection and says a byte on it. */
static void live_as_stranger(int tell, int until)
{
    scene s;
    socket_address peer;
    char byte;
    if (setuid(STRANGER) != 0 || !listen_at(&s, "127.0.0.1:0", "127.0.0.1:0"))
        _exit(1);
    struct pollfd waits = {.fd = s.listener, .events = POLLIN};
    uint16_t port = socket_port(s.listener);
    if (write(tell, &port, sizeof port) != sizeof port ||
        poll(&waits, 1, PATIENCE_MS) != 1)
        _exit(1);
    int fd = socket_accept(s.listener, &peer);
    if (fd < 0 || write(fd, "x", 1) != 1)
        _exit(1);
    _exit(read(until, &byte, 1) == 0 ? 0 : 1);
}

static stranger start_stranger(void)
{
    stranger n;
    int told[2], until[2];
    assert_int_equal(pipe2(told, O_CLOEXEC), 0);
    assert_int_equal(pipe2(until, O_CLOEXEC), 0);
    n.pid = fork();
    if (n.pid == 0) {
        close(until[1]);
        live_as_stranger(told[1], until[0]);
    }
    close(told[1]);
    close(until[0]);
    n.keep = until[1];
    assert_int_equal(read(told[0], &n.port, sizeof n.port), sizeof n.port);
    close(told[0]);
    return n;
}

TEST(other_users_are_told)
{
    if (geteuid() != 0)
        skip();
    for (int i = 0; i < 2; i++) {
        int code;
        char byte;
        uid_t uid;
        scene s;
        no_netlink = false;
        stranger n = start_stranger();
        assert_int_equal(socket_resolve("127.0.0.1:1", &s.at, NULL), 0);
        socket_set_port(&s.at, n.port);
        int fd = connect_to(&s);
        struct pollfd waits = {.fd = fd, .events = POLLIN};
        assert_int_equal(poll(&waits, 1, PATIENCE_MS), 1);
        assert_int_equal(read(fd, &byte, 1), 1);
        no_netlink = i == 1;
        assert_true(socket_owner(fd, &uid));
        assert_int_equal(uid, STRANGER);
        close(n.keep);
        assert_int_equal(waitpid(n.pid, &code, 0), n.pid);
        assert_int_equal(code, 0);
        close(fd);
    }
}

TEST(what_is_no_connection_has_no_owner)
{
    uid_t uid;
    int ends[2];
    assert_false(socket_owner(-1, &uid));
    assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM, 0, ends), 0);
    assert_false(socket_owner(ends[0], &uid));
    close(ends[0]);
    close(ends[1]);
}
