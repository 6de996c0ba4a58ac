/* SPDX-License-Identifier: Apache-2.0 */
/* The control thread: listeners, sessions, UCX; sleeps in epoll until something is due. */
#include "control/control.h"
#include "control/dispatch.h"
#include "control/evict.h"
#include "control/open_path.h"
#include "control/rest.h"
#include "control/waits.h"
#include "core/peer_log.h"
#include "core/peer_work.h"
#include "core/wake.h"
#include "core/yielding.h"
#include "error_set.h"
#include "publish/commit.h"
#include "thread.h"

#include <errno.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <unistd.h>

#define EVENTS 64
#define ACCEPTS 64                            /**< connections taken in one go */
#define ACCEPT_WINDOW_NS UINT64_C(2000000000) /**< as WORK_WINDOW_NS */
#define NO_ACCEPTS_MS 100                     /**< after running out of descriptors */

/* -1 is no descriptor, and fine. */
static bool watch_fd(struct control *c, int fd, void *data)
{
    struct epoll_event event = {.events = EPOLLIN, .data.ptr = data};
    return fd < 0 || epoll_ctl(c->epoll, EPOLL_CTL_ADD, fd, &event) == 0;
}

static void stop_watching(struct control *c, int fd)
{
    if (fd >= 0)
        epoll_ctl(c->epoll, EPOLL_CTL_DEL, fd, NULL);
}

/* --------------------------------------------------------------- accepting */

static void accept_one(struct control *c, int fd, const socket_address *peer)
{
    fanin_error error = FANIN_ERROR_INIT;
    newcomer from;
    uint64_t began = thread_cpu_ns();
    socket_tune(fd);
    fanin_status status = admit(c->server, fd, peer, &from, &error);
    if (status == FANIN_ERR_LIMIT && evict_idle(c, from.share, from.room))
        status = admit(c->server, fd, peer, &from, &error);
    if (status != FANIN_OK)
        session_refuse(c, fd, peer, from.share, &error);
    else
        session_open(c, fd, peer, &from);
    if (from.share)
        peer_charge(c->server, from.share, thread_cpu_ns() - began);
    if (c->sessions) /* the newest */
        session_note_due(c->sessions);
}

/* Out of descriptors or memory: the listeners rest, else epoll would return at once. */
static void pause_accepting(struct control *c, int code)
{
    log_write(&c->server->log, FANIN_LOG_ERROR, "accept-failed",
              "cannot accept connections (errno %d); see `ulimit -n`", code);
    stop_watching(c, c->tcp);
    stop_watching(c, c->unix_fd);
    c->paused = true;
    c->resume_at = deadline_in_ms(NO_ACCEPTS_MS);
}

static void resume_accepting(struct control *c)
{
    c->paused = false;
    if (c->tcp_until == UINT64_MAX)
        watch_fd(c, c->tcp, &c->tcp);
    watch_fd(c, c->unix_fd, &c->unix_fd);
}

static void accept_from(struct control *c, int listener)
{
    for (int i = 0; i < ACCEPTS && c->listening && !c->paused; i++) {
        socket_address peer;
        int fd = socket_accept(listener, &peer);
        if (fd >= 0)
            accept_one(c, fd, &peer);
        else if (errno == EMFILE || errno == ENFILE || errno == ENOBUFS ||
                 errno == ENOMEM)
            pause_accepting(c, errno);
        else if (errno == EAGAIN)
            return;
    }
}

/* Accepting by TCP may take as much CPU time as one peer's requests, however many peers come; beyond
   that they wait in the kernel's queue. Those by the Unix socket do not. */
static void accept_all(struct control *c, int listener)
{
    const fanin_server *s = c->server;
    if (listener != c->tcp || s->peer_cpu == 0) {
        accept_from(c, listener);
        return;
    }
    uint64_t began = thread_cpu_ns();
    accept_from(c, listener);
    bucket_take(&c->accepts, clock_ns(),
                (thread_cpu_ns() - began) * 1000 / s->peer_cpu);
    if (bucket_ready(&c->accepts, ACCEPT_WINDOW_NS) <= clock_ns() || c->paused ||
        c->tcp < 0)
        return;
    stop_watching(c, c->tcp);
    c->tcp_until = bucket_ready(&c->accepts, ACCEPT_WINDOW_NS);
    atomic_fetch_add(&c->server->rests, 1);
}

static void close_listener(struct control *c, int *fd)
{
    if (*fd < 0)
        return;
    /* Children of a fork hold copies of the socket: shutting it down frees the port. */
    stop_watching(c, *fd);
    shutdown(*fd, SHUT_RDWR);
    close(*fd);
    *fd = -1;
}

static void close_listeners(struct control *c)
{
    c->listening = c->paused = false;
    close_listener(c, &c->tcp);
    close_listener(c, &c->unix_fd);
    for (session *s = c->sessions, *next; s; s = next) {
        next = s->next;
        waits_cancel(s);
        session_serve(s);
    }
}

/* ------------------------------------------------------------------ thread */

static void notify(struct control *c)
{
    wake_heard(c->server->wake);
    commit_tidy(c->server);
    bool more = true;
    while (more) {
        more = changes_take(c->server, &c->changes);
        for (session *s = c->sessions, *next; s; s = next) {
            next = s->next;
            if (s->n_waits + s->n_watches == 0 || s->turn.waits)
                continue;
            work_begin(s);
            bool says = !must_rest(s) && waits_answer(s, &c->changes);
            work_charge(s);
            if (says)
                session_serve(s);
        }
    }
    if (c->listening && atomic_load(&c->stop_listening))
        close_listeners(c);
}

static void dispatch(struct control *c, const struct epoll_event *event)
{
    void *data = event->data.ptr;
    if (data == &c->server->wake)
        notify(c);
    else if (data == &c->tcp || data == &c->unix_fd)
        accept_all(c, *(int *)data);
    else if (data == &c->ucx_again)
        c->ucx_again = true;
    else
        session_handle_event(data, event->events);
}

static void free_dead(struct control *c)
{
    while (c->dead) {
        session *s = c->dead;
        c->dead = s->next;
        session_free(s);
    }
}

static deadline next_due(const struct control *c)
{
    deadline at = c->paused ? c->resume_at : UINT64_MAX;
    at = deadline_sooner(at, deadline_sooner(c->tcp_until, c->rest_until));
    return deadline_sooner(deadline_sooner(at, c->due), peer_log_due(c->server));
}

/* All of them, since who was due first may have been put off. */
static void expire_sessions(struct control *c)
{
    for (session *s = c->sessions, *next; s; s = next) {
        next = s->next;
        session_expire(s);
    }
    c->due = UINT64_MAX;
    for (session *s = c->sessions; s; s = s->next)
        session_note_due(s);
}

static void tick(struct control *c)
{
    if (c->paused && deadline_passed(c->resume_at))
        resume_accepting(c);
    if (deadline_passed(c->tcp_until)) {
        c->tcp_until = UINT64_MAX;
        if (!c->paused && c->listening)
            watch_fd(c, c->tcp, &c->tcp);
    }
    if (deadline_passed(peer_log_due(c->server)))
        peer_log_tell(c->server);
    if (deadline_passed(c->rest_until))
        rest_turns(c, session_take_turn);
    if (deadline_passed(c->due))
        expire_sessions(c);
}

static void *run(void *cookie)
{
    struct control *c = cookie;
    struct epoll_event events[EVENTS];
    yielding_begin(c->server);
    while (!atomic_load(&c->quit)) {
        deadline due = next_due(c);
        int timeout = c->ucx_again ? 0 : deadline_poll_ms(due);
        int n = epoll_wait(c->epoll, events, EVENTS, timeout);
        for (int i = 0; i < n; i++)
            dispatch(c, &events[i]);
        if (deadline_passed(due))
            tick(c);
        if (c->ucx_again)
            c->ucx_again = progress_ucx(c);
        free_dead(c);
    }
    close_listeners(c);
    while (c->sessions)
        session_close(c->sessions, NULL);
    free_dead(c);
    return NULL;
}

void control_stop_listening(fanin_server *s)
{
    atomic_store(&s->control->stop_listening, true);
    wake_up(s->wake);
}

static void control_free(struct control *c)
{
    if (c->epoll >= 0)
        close(c->epoll);
    free(c);
}

fanin_status control_create(fanin_server *s, int tcp_fd, int unix_fd,
                            fanin_error *error)
{
    struct control *c = calloc(1, sizeof *c);
    if (!c)
        return error_set_memory(error);
    c->server = s;
    c->tcp = tcp_fd;
    c->unix_fd = unix_fd;
    c->listening = true;
    c->due = c->rest_until = c->tcp_until = UINT64_MAX;
    c->epoll = epoll_create1(EPOLL_CLOEXEC);
    fanin_status status;
    s->control = c;
    if (c->epoll < 0 || !watch_fd(c, s->wake, &s->wake) ||
        !watch_fd(c, c->tcp, &c->tcp) || !watch_fd(c, c->unix_fd, &c->unix_fd))
        status = error_set_errno(error, FANIN_ERR_IO, errno, NULL,
                                 "cannot set up the control thread");
    else
        status = thread_start(&c->thread, "fanin-control", run, c, error);
    if (status != FANIN_OK) {
        s->control = NULL;
        control_free(c);
    }
    return status;
}

uint64_t control_cpu_ns(const fanin_server *s)
{
    return thread_cpu_ns_of(s->control->thread);
}

void control_destroy(fanin_server *s)
{
    struct control *c = s->control;
    if (!c)
        return;
    atomic_store(&c->quit, true);
    wake_up(s->wake);
    pthread_join(c->thread, NULL);
    s->control = NULL;
    control_free(c);
}
