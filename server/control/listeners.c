/* SPDX-License-Identifier: Apache-2.0 */
#include "control/listeners.h"
#include "control/dispatch.h"
#include "control/session.h"
#include "guests/peer.h"
#include "error_set.h"
#include "neighbour.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

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

bool listeners_start(struct control *c, int tcp_fd, int unix_fd)
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
void listener_accept(struct control *c, listener *l)
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

deadline listeners_due(const struct control *c)
{
    deadline at = deadline_sooner(c->paused ? c->resume_at : UINT64_MAX, c->lacks.due);
    return deadline_sooner(at,
                           deadline_sooner(c->tcp.rests_until, c->local.rests_until));
}

void listeners_resume(struct control *c)
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

void listeners_close(struct control *c)
{
    c->listening = c->paused = false;
    for (listener *l = &c->tcp; l; l = next_of(c, l))
        close_one(c, l);
}
