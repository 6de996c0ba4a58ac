/* SPDX-License-Identifier: Apache-2.0 */
/* Who is at the other end of a Unix socket, told to both ends by the kernel. */
#include "distant.h"
#include "neighbour.h"
#include "testing.h"

#include <sched.h>
#include <sys/resource.h>
#include <sys/un.h>
#include <sys/wait.h>

#ifndef SO_PEERPIDFD
#define SO_PEERPIDFD 77
#endif

/* Links that cannot be read: those that end so. */
static const char *hidden;
static int hidden_errno;

ssize_t __real_readlinkat(int directory, const char *name, char *out, size_t size);
ssize_t __wrap_readlinkat(int directory, const char *name, char *out, size_t size);
ssize_t __wrap_readlinkat(int directory, const char *name, char *out, size_t size)
{
    size_t end = hidden ? strlen(hidden) : 0, length = strlen(name);
    if (!hidden || length < end || strcmp(name + length - end, hidden) != 0)
        return __real_readlinkat(directory, name, out, size);
    errno = hidden_errno;
    return -1;
}

/* The process of a peer cannot be looked at, for want of what this says; 0: it can. */
static int lacking;

int __real_getsockopt(int fd, int level, int name, void *value, socklen_t *size);
int __wrap_getsockopt(int fd, int level, int name, void *value, socklen_t *size);
int __wrap_getsockopt(int fd, int level, int name, void *value, socklen_t *size)
{
    if (lacking == 0 || name != SO_PEERPIDFD)
        return __real_getsockopt(fd, level, name, value, size);
    errno = lacking;
    return -1;
}

/* What is closed another thread has at once; -1: that is over. */
static bool is_taken;
static int taken_fd = -1;

int __real_close(int fd);
int __wrap_close(int fd);
int __wrap_close(int fd)
{
    int result = __real_close(fd);
    if (is_taken && taken_fd < 0)
        taken_fd = dup(STDIN_FILENO);
    return result;
}

typedef struct scene {
    socket_address at;
    int listener;
} scene;

static int set_up(void **state)
{
    static scene s;
    struct sockaddr_un *un = (void *)&s.at.storage;
    memset(&s, 0, sizeof s);
    un->sun_family = AF_UNIX;
    int length =
        snprintf(un->sun_path + 1, 64, "fanin-test-neighbour-%d", (int)getpid());
    s.at.length =
        (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + (size_t)length);
    assert_int_equal(socket_listen(&s.at, 8, &s.listener, NULL), 0);
    *state = &s;
    return 0;
}

static int tear_down(void **state)
{
    scene *s = *state;
    hidden = NULL;
    lacking = 0;
    is_taken = false;
    close(s->listener);
    return 0;
}

#define CASE(name) TEST_WITH(name, set_up, tear_down)

/* What the listener says of a process in such namespaces, and that process of the listener. */
static void expect(scene *s, int namespaces, unsigned here, unsigned there)
{
    distant d;
    socket_address peer;
    if (!distant_connect(&d, namespaces, &s->at))
        skip();
    int fd = socket_accept(s->listener, &peer);
    assert_true(fd >= 0);
    assert_int_equal(neighbour_differs(fd), here);
    assert_int_equal(d.seen, there);
    distant_end(&d);
    /* Nothing can be said any more of who is gone. */
    assert_int_equal(neighbour_differs(fd), NEIGHBOUR_UNSEEN);
    close(fd);
    close(d.fd);
}

CASE(own_processes_differ_in_nothing)
{
    expect(*state, 0, 0, 0);
}

CASE(other_files_are_no_secret)
{
    expect(*state, CLONE_NEWNS, NEIGHBOUR_MOUNT_SPACE, NEIGHBOUR_MOUNT_SPACE);
}

CASE(ipc_namespaces_are_told)
{
    expect(*state, CLONE_NEWIPC, NEIGHBOUR_IPC_SPACE, NEIGHBOUR_IPC_SPACE);
}

/* From within, what is outside has no number. */
CASE(pid_namespaces_are_told)
{
    expect(*state, CLONE_NEWPID, NEIGHBOUR_PID_SPACE, NEIGHBOUR_UNSEEN);
}

CASE(containers_differ_in_several)
{
    expect(*state, CLONE_NEWPID | CLONE_NEWNS | CLONE_NEWIPC,
           NEIGHBOUR_PID_SPACE | NEIGHBOUR_MOUNT_SPACE | NEIGHBOUR_IPC_SPACE,
           NEIGHBOUR_UNSEEN);
}

/* From within, who has no uid there is as much "nobody" as the process itself, and shows nothing.
   */
CASE(user_namespaces_are_told)
{
    expect(*state, CLONE_NEWUSER, NEIGHBOUR_USER_SPACE, NEIGHBOUR_UNSEEN);
}

/* What no process of the host has makes no difference; what one does not show does. */
CASE(links_that_are_not_there)
{
    static const struct {
        const char *link;
        int errno_is;
        unsigned differs;
    } cases[] = {
        {"/ns/ipc", ENOENT, 0},
        {"/self/ns/user", ENOENT, 0},
        {"/self/ns/user", EACCES, NEIGHBOUR_UNSEEN},
        {"ns/pid", EACCES, NEIGHBOUR_UNSEEN},
        {"/proc/self", ENOENT, NEIGHBOUR_UNSEEN}, /* nothing is mounted there */
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        distant d;
        socket_address peer;
        scene *s = *state;
        assert_true(distant_connect(&d, 0, &s->at));
        int fd = socket_accept(s->listener, &peer);
        hidden = cases[i].link;
        hidden_errno = cases[i].errno_is;
        assert_int_equal(neighbour_differs(fd), cases[i].differs);
        hidden = NULL;
        distant_end(&d);
        close(fd);
        close(d.fd);
    }
}

/* ---------------------------------------------------- without descriptors */

/* A connection that has the last descriptor. */
typedef struct last {
    distant d;
    struct rlimit before;
    int fd, taken[64], n;
} last;

static void take_last(last *l, scene *s)
{
    socket_address peer;
    struct rlimit none;
    neighbour_prepare();
    assert_true(distant_connect(&l->d, 0, &s->at));
    l->fd = socket_accept(s->listener, &peer);
    l->n = 0;
    assert_return_code(getrlimit(RLIMIT_NOFILE, &l->before), errno);
    none = l->before;
    none.rlim_cur = (rlim_t)l->fd + 1;
    assert_return_code(setrlimit(RLIMIT_NOFILE, &none), errno);
    while (l->n < 64 && (l->taken[l->n] = dup(l->fd)) >= 0)
        l->n++;
    assert_int_equal(errno, EMFILE);
}

/* Also of a peer that is gone. */
static void give_last(last *l)
{
    assert_int_equal(neighbour_differs(l->fd), 0);
    distant_end(&l->d);
    assert_int_equal(neighbour_differs(l->fd), NEIGHBOUR_UNSEEN);
    assert_int_equal(dup(l->fd), -1); /* the reserve is there again */
    assert_return_code(setrlimit(RLIMIT_NOFILE, &l->before), errno);
    while (l->n > 0)
        close(l->taken[--l->n]);
    close(l->fd);
    close(l->d.fd);
}

CASE(without_descriptors_nobody_becomes_a_stranger)
{
    last l;
    take_last(&l, *state);
    for (int i = 0; i < 3; i++)
        assert_int_equal(neighbour_differs(l.fd), 0);
    give_last(&l);
}

CASE(a_reserve_that_is_taken_is_had_again)
{
    last l;
    take_last(&l, *state);
    is_taken = true;
    assert_int_equal(neighbour_differs(l.fd), NEIGHBOUR_NO_DESCRIPTOR);
    assert_int_equal(neighbour_differs(l.fd), NEIGHBOUR_NO_DESCRIPTOR);
    is_taken = false;
    assert_true(taken_fd >= 0);
    close(taken_fd);
    taken_fd = -1;
    give_last(&l);
}

CASE(what_is_lacking_is_told)
{
    last l;
    take_last(&l, *state);
    lacking = ENFILE;
    assert_int_equal(neighbour_differs(l.fd), NEIGHBOUR_NO_FILE);
    lacking = EMFILE;
    assert_int_equal(neighbour_differs(l.fd), NEIGHBOUR_NO_DESCRIPTOR);
    lacking = 0;
    give_last(&l);
    assert_int_equal(neighbour_lacks(NEIGHBOUR_NO_FILE), ENFILE);
    assert_int_equal(neighbour_lacks(NEIGHBOUR_NO_DESCRIPTOR), EMFILE);
    assert_int_equal(neighbour_lacks(NEIGHBOUR_UID | NEIGHBOUR_MOUNT_SPACE), 0);
}

CASE(another_user_is_told)
{
    scene *s = *state;
    socket_address peer;
    int ends[2];
    char byte;
    if (geteuid() != 0)
        skip();
    assert_int_equal(pipe(ends), 0);
    pid_t child = fork();
    if (child == 0) {
        int fd = socket(AF_UNIX, SOCK_STREAM, 0);
        close(ends[1]);
        if (setuid(1234) != 0 ||
            connect(fd, (const struct sockaddr *)&s->at.storage, s->at.length) != 0)
            _exit(1);
        _exit(read(ends[0], &byte, 1) == 0 ? 0 : 1);
    }
    close(ends[0]);
    int fd = -1;
    while (fd < 0 && waitpid(child, NULL, WNOHANG) == 0)
        fd = socket_accept(s->listener, &peer);
    assert_true(fd >= 0);
    assert_int_equal(neighbour_differs(fd), NEIGHBOUR_UID);
    close(ends[1]);
    assert_int_equal(tests_await(child), 0);
    close(fd);
}

CASE(every_difference_has_words)
{
    for (unsigned bit = 1; bit <= NEIGHBOUR_NO_FILE; bit *= 2)
        assert_says(neighbour_why(bit), "the peer's process ");
    assert_string_equal(neighbour_why(0), "");
    assert_int_equal(neighbour_differs(0), NEIGHBOUR_UID); /* no Unix socket at all */
}
