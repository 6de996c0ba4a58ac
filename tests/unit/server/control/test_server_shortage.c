/* SPDX-License-Identifier: Apache-2.0 */
/* Connections that a rank cannot take for want of descriptors or memory: its log says so, once a
   second. */
#include "guests/admission.h"
#include "log_catcher.h"
#include "server_peer.h"
#include "testing.h"

#include <sched.h>
#include <stdatomic.h>
#include <sys/epoll.h>
#include <sys/socket.h>

#ifndef SO_PEERPIDFD
#define SO_PEERPIDFD 77
#endif

#define HOUR_MS UINT64_C(3600000)

/* What fails, with which errno; 0: nothing does. */
static atomic_int accepting, watching, looking;
static atomic_uint failures;         /* to accept */
static atomic_bool a_second_is_long; /* an hour */
static atomic_bool an_hour_passed;

int __real_accept4(int fd, struct sockaddr *peer, socklen_t *size, int flags);
int __wrap_accept4(int fd, struct sockaddr *peer, socklen_t *size, int flags);
int __wrap_accept4(int fd, struct sockaddr *peer, socklen_t *size, int flags)
{
    int code = atomic_load(&accepting);
    if (code == 0)
        return __real_accept4(fd, peer, size, flags);
    atomic_fetch_add(&failures, 1);
    errno = code;
    return -1;
}

int __real_epoll_ctl(int set, int what, int fd, struct epoll_event *event);
int __wrap_epoll_ctl(int set, int what, int fd, struct epoll_event *event);
int __wrap_epoll_ctl(int set, int what, int fd, struct epoll_event *event)
{
    int code = atomic_load(&watching);
    if (code == 0 || what != EPOLL_CTL_ADD)
        return __real_epoll_ctl(set, what, fd, event);
    errno = code;
    return -1;
}

int __real_getsockopt(int fd, int level, int name, void *value, socklen_t *size);
int __wrap_getsockopt(int fd, int level, int name, void *value, socklen_t *size);
int __wrap_getsockopt(int fd, int level, int name, void *value, socklen_t *size)
{
    int code = atomic_load(&looking);
    if (code == 0 || name != SO_PEERPIDFD)
        return __real_getsockopt(fd, level, name, value, size);
    errno = code;
    return -1;
}

deadline __real_deadline_in_ms(uint64_t ms);
deadline __wrap_deadline_in_ms(uint64_t ms);
deadline __wrap_deadline_in_ms(uint64_t ms)
{
    if (!atomic_load(&a_second_is_long))
        return __real_deadline_in_ms(ms);
    return __real_deadline_in_ms(ms == 1000 ? HOUR_MS : ms == 100 ? 1 : ms);
}

bool __real_deadline_passed(deadline at);
bool __wrap_deadline_passed(deadline at);
bool __wrap_deadline_passed(deadline at)
{
    bool is_due = atomic_load(&an_hour_passed) && at != UINT64_MAX;
    return is_due || __real_deadline_passed(at);
}

static int end(void **state)
{
    atomic_store(&accepting, 0);
    atomic_store(&watching, 0);
    atomic_store(&looking, 0);
    atomic_store(&failures, 0);
    atomic_store(&a_second_is_long, false);
    atomic_store(&an_hour_passed, false);
    return server_tear_down(state);
}

#define CASE(name) TEST_WITH(name, NULL, end)

static fanin_server *start(void)
{
    fanin_server_config c = server_config();
    return server_start(&c);
}

static void connect_in_vain(fanin_server *s)
{
    peer p = peer_connect(s);
    peer_expect_closed(&p);
    peer_close(&p);
}

static void ping_anew(fanin_server *s)
{
    peer p = peer_open(s);
    peer_ping(&p);
    peer_close(&p);
}

/* What may be lacking, descriptors and open files first. */
enum { FILES = 2 };
static const struct {
    int code;
    const char *remedy;
} lacks[] = {
    {EMFILE, "raise ulimit -n"},
    {ENFILE, "raise fs.file-max"},
    {ENOMEM, "free memory"},
    {ENOBUFS, "free memory"},
};

/* A connection waits meanwhile. */
CASE(who_cannot_be_accepted_waits)
{
    for (size_t i = 0; i < sizeof lacks / sizeof *lacks; i++) {
        fanin_server *s = start();
        log_listen("accept-failed");
        atomic_store(&accepting, lacks[i].code);
        peer p = peer_connect(s);
        log_await(lacks[i].remedy);
        atomic_store(&accepting, 0);
        peer_hello_with(&p, (msg_hello){.role = ROLE_CONTROL});
        peer_close(&p);
        server_stop(&s, 0);
    }
}

CASE(accepts_that_fail_are_counted)
{
    char words[64];
    fanin_server *s = start();
    atomic_store(&a_second_is_long, true);
    atomic_store(&accepting, EMFILE);
    log_listen("accept-failed");
    peer p = peer_connect(s);
    deadline by = __real_deadline_in_ms(30000);
    while (atomic_load(&failures) < 4 && !__real_deadline_passed(by))
        sched_yield();
    atomic_store(&accepting, 0);
    peer_hello_with(&p, (msg_hello){.role = ROLE_CONTROL});
    unsigned times = atomic_load(&failures);
    log_expect(1, "cannot accept connections: Too many open files; raise ulimit -n");
    atomic_store(&an_hour_passed, true);
    (void)peer_connect(s);
    snprintf(words, sizeof words, "... and %u more: cannot accept", times - 1);
    log_expect(2, words);
}

/* Without a session nobody can be told anything. */
CASE(sessions_that_cannot_be_made_are_counted)
{
    fanin_server *s = start();
    atomic_store(&a_second_is_long, true);
    atomic_store(&watching, ENOSPC);
    log_listen("accept-failed");
    for (int i = 0; i < 3; i++)
        connect_in_vain(s);
    log_expect(1, "No space left on device; raise fs.epoll.max_user_watches");
    atomic_store(&watching, ENOMEM);
    connect_in_vain(s);
    atomic_store(&watching, 0);
    atomic_store(&an_hour_passed, true);
    (void)peer_connect(s);
    log_expect(2, "... and 3 more: cannot accept connections: Cannot allocate memory; "
                  "free memory");
    atomic_store(&an_hour_passed, false);
    ping_anew(s);
}

/* Nor why it is refused. */
CASE(refusals_that_cannot_be_told_are_logged)
{
    fanin_server_config c = server_config();
    c.max_sessions = 2;
    fanin_server *s = server_start(&c);
    peer first = peer_open(s), second = peer_connect(s);
    log_listen("accept-failed");
    atomic_store(&watching, ENOSPC);
    connect_in_vain(s);
    log_await("fs.epoll.max_user_watches");
    atomic_store(&watching, 0);
    peer_ping(&first);
    peer_close(&second);
}

/* It may be the own user, which is not to hear that it is another one. */
CASE(who_cannot_be_seen_is_no_stranger)
{
    fanin_server *s = start();
    for (size_t i = 0; i < FILES; i++) {
        log_listen("accept-failed");
        atomic_store(&looking, lacks[i].code);
        peer p = peer_connect_unix(s);
        peer_expect_closed(&p);
        peer_close(&p);
        log_await(lacks[i].remedy);
        atomic_store(&looking, 0);
        peer own = peer_open_unix(s);
        peer_ping(&own);
        peer_close(&own);
    }
    server_expect_idle(s);
}
