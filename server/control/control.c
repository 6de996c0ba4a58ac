/* SPDX-License-Identifier: Apache-2.0 */
#include "control/control.h"
#include "control/dispatch.h"
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
#include "control/session.h"
#include "neighbour.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

/* The listeners: TCP, and the Unix socket beside it. To accept strangers takes a share of a CPU at
   most, however many they are. Beyond that who has used up its own share is closed as it comes, so
   that others do not wait behind it in the kernel's queue. When that takes as much again the
   listener rests. */

#define ACCEPTS 64                            /**< connections taken in one go */
#define ACCEPT_WINDOW_NS UINT64_C(2000000000) /**< as WORK_WINDOW_NS */
/** Of a listener that only closes who is over its share: when it rests. */
#define CLOSE_WINDOW_NS (2 * ACCEPT_WINDOW_NS)
#define NO_ACCEPTS_MS 100 /**< after running out of descriptors */
#define TELL_MS 1000      /**< from one line of a shortage to the next */

static listener *next_of(struct control *c, const listener *l)
{
    return l == &c->tcp ? &c->local : NULL;
}

/* No descriptor is fine. */
static bool watch_it(struct control *c, listener *l)
{
    struct epoll_event event = {.events = EPOLLIN, .data.ptr = l};
    return l->fd < 0 || epoll_ctl(c->epoll, EPOLL_CTL_ADD, l->fd, &event) == 0;
}

/* It stays in the set while it rests: to add it again could fail for want of memory, and this
   cannot. */
static void set_listening(struct control *c, listener *l, bool listens)
{
    struct epoll_event event = {.events = listens ? EPOLLIN : EPOLLET, .data.ptr = l};
    if (l->fd >= 0)
        (void)epoll_ctl(c->epoll, EPOLL_CTL_MOD, l->fd, &event);
}

/* Takes both; @p unix_fd may be -1. False: they cannot be waited for, errno says why, and they stay
   the caller's. */
static bool listeners_start(struct control *c, int tcp_fd, int unix_fd)
{
    c->tcp = (listener){.fd = tcp_fd, .rests_until = UINT64_MAX};
    c->local = (listener){.fd = unix_fd, .rests_until = UINT64_MAX};
    c->lacks.due = UINT64_MAX;
    c->listening = true;
    return watch_it(c, &c->tcp) && watch_it(c, &c->local);
}

/* The first time at once, the others once a second. */
static void tell_shortage(struct control *c)
{
    shortage *lacks = &c->lacks;
    char reason[128], more[32] = "";
    if (lacks->times == 0) {
        lacks->due = UINT64_MAX;
        return;
    }
    if (lacks->due != UINT64_MAX)
        snprintf(more, sizeof more, "... and %u more: ", lacks->times);
    /* Nothing but epoll says ENOSPC of a connection. */
    log_write(
        &c->server->log, FANIN_LOG_ERROR, "accept-failed",
        "%scannot accept connections: %s; %s", more,
        strerror_r(lacks->code, reason, sizeof reason),
        error_remedy(lacks->code,
                     "raise fs.epoll.max_user_watches: this user's processes watch "
                     "as many descriptors as they may"));
    lacks->times = 0;
    lacks->due = deadline_in_ms(TELL_MS);
}

static void note_shortage(struct control *c, int code)
{
    c->lacks.code = code;
    c->lacks.times++;
    if (c->lacks.due == UINT64_MAX)
        tell_shortage(c);
}

/* Out of descriptors or memory: the listeners rest, else epoll would return at once. */
static void pause_all(struct control *c, int code)
{
    note_shortage(c, code);
    for (listener *l = &c->tcp; l; l = next_of(c, l))
        set_listening(c, l, false);
    c->paused = true;
    c->resume_at = deadline_in_ms(NO_ACCEPTS_MS);
}

/* The own user's perhaps: to refuse it as a stranger's would be final, and closed it comes again.
   */
static void leave_unseen(struct control *c, int fd, const newcomer *who, bool admitted)
{
    close(fd);
    if (admitted)
        dismiss(c->server, who->share);
    pause_all(c, neighbour_lacks(who->differs));
}

/* Whose it is; NULL: there was no memory for that. */
static peer_share *take(struct control *c, int fd, const socket_address *peer)
{
    fanin_error error = FANIN_ERROR_INIT;
    newcomer from;
    socket_tune(fd);
    fanin_status status = admit(c->server, fd, peer, &from, &error);
    if (neighbour_lacks(from.differs)) {
        leave_unseen(c, fd, &from, status == FANIN_OK);
        return from.share;
    }
    if (status == FANIN_ERR_LIMIT && evict_idle(c, from.share, from.room))
        status = admit(c->server, fd, peer, &from, &error);
    int code = status == FANIN_OK ? session_open(c, fd, peer, &from)
                                  : session_refuse(c, fd, peer, from.share, &error);
    if (code != 0)
        note_shortage(c, code);
    if (c->sessions) /* the newest */
        session_note_due(c->sessions);
    return from.share;
}

static bool has_had_share(const peer_share *of)
{
    return bucket_ready(&of->work, WORK_WINDOW_NS) > clock_ns();
}

/* Without a word, and nothing of the connection stays in the kernel: half of what accepting it
   costs. NULL: it may stay. */
static peer_share *turn_away(struct control *c, int fd, const socket_address *peer)
{
    const struct linger at_once = {.l_onoff = 1};
    fanin_server *s = c->server;
    pthread_mutex_lock(&s->lock);
    peer_share *from = peer_share_of(s, peer, false);
    bool leaves = from && has_had_share(from);
    s->stats.sessions_refused += leaves;
    pthread_mutex_unlock(&s->lock);
    if (!leaves)
        return NULL;
    (void)setsockopt(fd, SOL_SOCKET, SO_LINGER, &at_once, sizeof at_once);
    close(fd);
    peer_log(s, from, FANIN_LOG_WARNING, "session-refused",
             "%s: more connections come than peer_cpu allows, and those of %s have had "
             "their share of it",
             peer->text, from->name);
    return from;
}

/* Whether accepting has taken what it may at once: then those go that are over their share. Who
   comes by the Unix socket may be the own user, which is not seen so cheaply. */
static bool is_pressed(const struct control *c, const listener *l)
{
    return l == &c->tcp && c->server->peer_cpu > 0 &&
           bucket_ready(&l->accepts, ACCEPT_WINDOW_NS) > clock_ns();
}

/* The CPU time that strangers took. */
static uint64_t take_some(struct control *c, const listener *l)
{
    uint64_t all = 0, began = thread_cpu_ns();
    for (int i = 0; i < ACCEPTS && c->listening && !c->paused; i++) {
        socket_address peer;
        int fd = socket_accept(l->fd, &peer);
        if (fd < 0 && errno == EAGAIN)
            break;
        if (fd < 0) {
            if (errno == EMFILE || errno == ENFILE || errno == ENOBUFS ||
                errno == ENOMEM)
                pause_all(c, errno);
            continue;
        }
        peer_share *from = is_pressed(c, l) ? turn_away(c, fd, &peer) : NULL;
        from = from ? from : take(c, fd, &peer);
        uint64_t now = thread_cpu_ns(), cpu_ns = now - began;
        began = now;
        if (from)
            peer_charge(c->server, from, cpu_ns);
        all += from && from->is_own ? 0 : cpu_ns;
    }
    return all;
}

/* As much as one peer's requests, however many peers come. On the Unix socket those are other users
   of this host, whom nobody but this process can turn away, and whose queue is the own user's too.
   */
static void listener_accept(struct control *c, listener *l)
{
    const fanin_server *s = c->server;
    uint64_t cpu_ns = take_some(c, l);
    uint64_t window_ns = l == &c->tcp ? CLOSE_WINDOW_NS : ACCEPT_WINDOW_NS;
    if (s->peer_cpu == 0)
        return;
    bucket_take(&l->accepts, clock_ns(), cpu_ns * 1000 / s->peer_cpu);
    if (bucket_ready(&l->accepts, window_ns) <= clock_ns() || c->paused || l->fd < 0)
        return;
    set_listening(c, l, false);
    l->rests_until = bucket_ready(&l->accepts, window_ns);
    atomic_fetch_add(&c->server->rests, 1);
}

/* When listeners_resume() is to be called; UINT64_MAX: never. */
static deadline listeners_due(const struct control *c)
{
    deadline at = deadline_sooner(c->paused ? c->resume_at : UINT64_MAX, c->lacks.due);
    return deadline_sooner(at,
                           deadline_sooner(c->tcp.rests_until, c->local.rests_until));
}

/* Listens again where it has rested for long enough, and tells of what could not be taken. */
static void listeners_resume(struct control *c)
{
    bool resumed = c->paused && deadline_passed(c->resume_at);
    c->paused = c->paused && !resumed;
    if (deadline_passed(c->lacks.due))
        tell_shortage(c);
    for (listener *l = &c->tcp; l; l = next_of(c, l)) {
        bool rested = deadline_passed(l->rests_until);
        if (rested)
            l->rests_until = UINT64_MAX;
        if (c->listening && !c->paused && (rested || resumed) &&
            l->rests_until == UINT64_MAX)
            set_listening(c, l, true);
    }
}

static void close_one(struct control *c, listener *l)
{
    if (l->fd < 0)
        return;
    /* Children of a fork hold copies of the socket: shutting it down frees the port. */
    epoll_ctl(c->epoll, EPOLL_CTL_DEL, l->fd, NULL);
    shutdown(l->fd, SHUT_RDWR);
    close(l->fd);
    l->fd = -1;
}

/* Nobody connects any more. */
static void listeners_close(struct control *c)
{
    c->listening = c->paused = false;
    for (listener *l = &c->tcp; l; l = next_of(c, l))
        close_one(c, l);
}

/* The control thread: listeners, sessions, UCX; sleeps in epoll until something is due. */

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
        (void)parked_stir(s);
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
        c->lists_due = deadline_sooner(c->lists_due, news_due(c, clock_ns()));
    c->lists_changed = false;
    if (!deadline_passed(c->lists_due))
        return;
    c->lists_due = UINT64_MAX;
    for (session *s = c->sessions; s; s = s->next) {
        if (parked_stir(s))
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
    buffer_free(&c->spare);
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
    c->lists_version = LIST_EMPTY;
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
