/* SPDX-License-Identifier: Apache-2.0 */
/* The control thread: listeners, sessions, UCX; sleeps in epoll until something is due. */
#include "control/control.h"
#include "control/dispatch.h"
#include "control/listeners.h"
#include "control/open_path.h"
#include "control/relays.h"
#include "control/rest.h"
#include "control/waits.h"
#include "guests/peer.h"
#include "wake.h"
#include "core/server_state.h"
#include "error_set.h"
#include "publish/commit.h"
#include "thread.h"

#include <errno.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <unistd.h>

#define EVENTS 64

/* What was begun may end, and nothing new begins. */
static void stop_listening(struct control *c)
{
    listeners_close(c);
    for (session *s = c->sessions, *next; s; s = next) {
        next = s->next;
        waits_cancel(s);
        parked_cancel(s);
        session_serve(s);
    }
}

/* ------------------------------------------------------------------ thread */

/* A change of a publication, or boxes that have come, may be news for them. */
static void look_at_parked(struct control *c)
{
    for (session *s = c->sessions, *next; s; s = next) {
        next = s->next;
        if (!parks_landed(s))
            continue;
        parked_stir(s);
        work_begin(s);
        bool says = !must_rest(s) && parked_look(s);
        work_charge(s);
        if (says)
            session_serve(s);
        else
            session_note_due(s);
    }
}

static void notify(struct control *c)
{
    wake_heard(c->server->wake);
    commit_tidy_and_leave(c->server);
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
    look_at_parked(c);
    if (c->listening && atomic_load(&c->stop_listening))
        stop_listening(c);
}

static void dispatch(struct control *c, const struct epoll_event *event)
{
    void *data = event->data.ptr;
    if (data == &c->server->wake)
        notify(c);
    else if (data == &c->tcp || data == &c->local)
        listener_accept(c, data);
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
    deadline at = deadline_sooner(listeners_due(c), c->rest_until);
    at = deadline_sooner(at, c->lists_due);
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
    listeners_resume(c);
    if (deadline_passed(peer_log_due(c->server)))
        peer_log_tell(c->server);
    if (deadline_passed(c->rest_until))
        rest_turns(c, session_take_turn);
    if (deadline_passed(c->due))
        expire_sessions(c);
}

/* Sessions that wait for lists are looked at again, if any has changed: all for many changes. */
static void lists_look(struct control *c)
{
    if (c->lists_changed)
        c->lists_due = deadline_sooner(c->lists_due, news_due(c));
    c->lists_changed = false;
    if (!deadline_passed(c->lists_due))
        return;
    c->lists_due = UINT64_MAX;
    for (session *s = c->sessions; s; s = s->next) {
        parked_stir(s);
        session_note_due(s);
    }
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
        lists_look(c);
        if (deadline_passed(due))
            tick(c);
        if (c->ucx_again)
            c->ucx_again = progress_ucx(c);
        free_dead(c);
    }
    listeners_close(c);
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
    c->due = c->rest_until = c->lists_due = UINT64_MAX;
    c->lists_floor = 1; /* 0 is the version of who knows none */
    c->epoll = epoll_create1(EPOLL_CLOEXEC);
    fanin_status status;
    s->control = c;
    struct epoll_event woken = {.events = EPOLLIN, .data.ptr = &s->wake};
    if (c->epoll < 0 || epoll_ctl(c->epoll, EPOLL_CTL_ADD, s->wake, &woken) != 0 ||
        !listeners_start(c, tcp_fd, unix_fd))
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
