/* SPDX-License-Identifier: Apache-2.0 */
/* A control session's life, and its bytes on their way in and out. */
#include "control/session.h"
#include "control/relays.h"
#include "control/rest.h"
#include "guests/peer.h"
#include "error_set.h"
#include "neighbour.h"
#include "shards/registration.h"
#include "stream/stream.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <unistd.h>

#define KEEP_MOST 4096         /**< of an empty output buffer */
#define SPARE_MOST (256 << 10) /**< of the thread's own: most lists fit */

bool session_account(session *s)
{
    size_t memory = sizeof *s + sizeof(reader) + s->in.bytes.capacity +
                    s->out.bytes.capacity + tls_memory(s->tls) + relay_part_memory(s);
    return memory_account(s->control->server, s->from, &s->memory, memory);
}

/* ------------------------------------------------------------- open, close */

/* NULL and errno: there is no memory. */
static session *make(struct control *c, int fd, const socket_address *peer,
                     peer_share *from)
{
    session *s = calloc(1, sizeof *s);
    if (!s)
        return NULL;
    s->control = c;
    s->fd = fd;
    s->is_unix = peer->storage.ss_family == AF_UNIX;
    s->secured = s->is_unix; /* the kernel says who is there */
    s->is_local = socket_is_loopback(peer);
    memcpy(s->peer, peer->text, sizeof s->peer);
    s->due = deadline_in_ms(HELLO_MS);
    s->idle = UINT64_MAX;
    s->stalled_at = s->begun_at = UINT64_MAX;
    s->heard_ns = clock_ns();
    s->interest = EPOLLIN;
    framing_start(&s->in, LIMIT_BEFORE_HELLO);
    struct epoll_event event = {.events = s->interest, .data.ptr = s};
    if (epoll_ctl(c->epoll, EPOLL_CTL_ADD, fd, &event) != 0) {
        int code = errno;
        free(s);
        errno = code;
        return NULL;
    }
    s->from = from;
    from->held++;
    s->next = c->sessions;
    if (c->sessions)
        c->sessions->previous = s;
    c->sessions = s;
    (void)session_account(s);
    return s;
}

/* Once for each difference: who is told apart is told apart at every connection. */
static void tell_stranger(struct control *c, unsigned differs)
{
    if ((differs & ~c->told) == 0)
        return;
    c->told |= differs;
    log_write(&c->server->log, FANIN_LOG_INFO, "unix-stranger",
              "a client of this uid is not offered every one-sided path: %s; %s",
              neighbour_why(differs), NEIGHBOUR_REMEDY);
}

int session_open(struct control *c, int fd, const socket_address *peer,
                 const newcomer *who)
{
    session *s = make(c, fd, peer, who->share);
    if (!s) {
        int code = errno;
        close(fd);
        dismiss(c->server, who->share);
        return code;
    }
    s->admitted = true;
    s->differs = who->differs;
    if (s->is_unix)
        tell_stranger(c, who->differs);
    return 0;
}

int session_refuse(struct control *c, int fd, const socket_address *peer,
                   peer_share *from, const fanin_error *why)
{
    if (from)
        peer_log(c->server, from, FANIN_LOG_WARNING, "session-refused", "%s: %s",
                 peer->text, why->message);
    pthread_mutex_lock(&c->server->lock);
    c->server->stats.sessions_refused++;
    pthread_mutex_unlock(&c->server->lock);
    errno = from ? 0 : ENOMEM;
    session *s = from && c->n_refused < REFUSED_PEERS ? make(c, fd, peer, from) : NULL;
    if (!s) {
        int code = errno;
        close(fd);
        return code;
    }
    c->n_refused++;
    s->phase = SESSION_CLOSING;
    s->due = deadline_in_ms(LINGER_MS);
    reply_error(s, 0, why);
    session_send(s);
    return 0;
}

/* The session leaves the lists of everybody; the object stays until the events that epoll
   returned are handled. */
static void leave(session *s)
{
    struct control *c = s->control;
    fanin_server *server = c->server;
    if (s->turn.waits)
        rest_leave(s);
    if (s->previous)
        s->previous->next = s->next;
    else
        c->sessions = s->next;
    if (s->next)
        s->next->previous = s->previous;
    bool has_data = false;
    relay_part_free(s);
    if (s->reader)
        mappers_drop(&server->registrar, s->reader);
    pthread_mutex_lock(&server->lock);
    server->listeners -= s->n_waits + s->n_watches;
    server->delta_sessions -= s->wants_deltas;
    if (s->reader) {
        has_data = s->reader->n_data > 0;
        count_session(server, s->from, -1);
        reader_close(server, s->reader);
        reader_release(server, s->reader);
        s->reader = NULL;
    }
    pthread_mutex_unlock(&server->lock);
    if (has_data)
        stream_wake(server);
    if (!s->admitted)
        c->n_refused--;
    s->phase = SESSION_DEAD;
    s->next = c->dead;
    c->dead = s;
}

void session_close(session *s, const char *why)
{
    if (s->phase == SESSION_DEAD)
        return;
    peer_log_broken(s->control->server, s->from, s->peer, s->tls);
    if (why)
        peer_log(s->control->server, s->from, FANIN_LOG_INFO, "session-close",
                 "%s: %s%s", s->peer, why, s->trace);
    leave(s);
    /* A forked child may hold a copy of the descriptor: closing alone would neither end the
       connection nor take it out of the epoll set. */
    epoll_ctl(s->control->epoll, EPOLL_CTL_DEL, s->fd, NULL);
    shutdown(s->fd, SHUT_RDWR);
    close(s->fd);
    if (s->admitted)
        dismiss(s->control->server, s->from);
}

void session_free(session *s)
{
    memory_account(s->control->server, s->from, &s->memory, 0);
    s->from->held--;
    framing_free(&s->in);
    outgoing_free(&s->out);
    tls_free(&s->tls);
    free(s);
}

void session_hand_over(session *s, reader *r)
{
    fanin_server *server = s->control->server;
    handover h = {.fd = s->fd,
                  .reader = r,
                  .from = s->from,
                  .in = s->in,
                  .out = s->out,
                  .tls = s->tls};
    memcpy(h.peer, s->peer, sizeof h.peer);
    epoll_ctl(s->control->epoll, EPOLL_CTL_DEL, s->fd, NULL);
    if (!s->out.bytes.failed && stream_adopt(server, &h)) {
        s->in = (framing){0};
        s->out = (outgoing){0};
        s->tls = NULL;
        leave(s); /* descriptor, count and bytes live on */
        return;
    }
    pthread_mutex_lock(&server->lock);
    r->n_data--;
    reader_release(server, r);
    pthread_mutex_unlock(&server->lock);
    session_close(s, "out of memory");
}

/* ------------------------------------------------------------------ output */

void session_reject(session *s, uint64_t request, fanin_status code,
                    const char *message)
{
    fanin_server *server = s->control->server;
    fanin_error error = FANIN_ERROR_INIT;
    error_set(&error, code, NULL, "%s", message);
    if (code == FANIN_ERR_PROTOCOL || code == FANIN_ERR_VERSION) {
        pthread_mutex_lock(&server->lock);
        server->stats.protocol_errors++;
        pthread_mutex_unlock(&server->lock);
    }
    peer_log(server, s->from, FANIN_LOG_WARNING, "session-rejected", "%s: %s", s->peer,
             message);
    reply_error(s, request, &error);
    s->phase = SESSION_CLOSING;
    s->due = deadline_in_ms(LINGER_MS);
}

static void swap_with_spare(session *s)
{
    buffer *own = &s->out.bytes, *spare = &s->control->spare, before = *own;
    own->data = spare->data;
    own->capacity = spare->capacity;
    spare->data = before.data;
    spare->capacity = before.capacity;
}

void session_take_spare(session *s)
{
    if (outgoing_is_empty(&s->out) &&
        s->out.bytes.capacity < s->control->spare.capacity)
        swap_with_spare(s);
}

static void give_spare(session *s)
{
    size_t own = s->out.bytes.capacity;
    if (outgoing_is_empty(&s->out) && own > KEEP_MOST && own <= SPARE_MOST &&
        own > s->control->spare.capacity)
        swap_with_spare(s);
}

/* False: the connection is gone. */
static bool flush(session *s)
{
    size_t left = outgoing_left(&s->out);
    if (outgoing_flush(&s->out, s->tls, s->fd) != 0)
        return false;
    if (outgoing_is_empty(&s->out))
        s->stalled_at = UINT64_MAX;
    else if (outgoing_left(&s->out) < left || s->stalled_at == UINT64_MAX)
        s->stalled_at = deadline_in_ms(STALL_MS);
    give_spare(s);
    outgoing_trim(&s->out, KEEP_MOST);
    return true;
}

static void update_interest(session *s)
{
    bool waits = !outgoing_is_empty(&s->out) || tls_unsent(s->tls) > 0;
    uint32_t interest = waits ? EPOLLOUT : 0;
    if (outgoing_left(&s->out) < OUTPUT_PAUSE && !s->turn.waits)
        /* What TLS has received already the socket does not tell: its room wakes the thread. */
        interest |= tls_pending(s->tls) ? EPOLLIN | EPOLLOUT : EPOLLIN;
    if (interest == s->interest)
        return;
    struct epoll_event event = {.events = interest, .data.ptr = s};
    if (epoll_ctl(s->control->epoll, EPOLL_CTL_MOD, s->fd, &event) != 0)
        session_close(s, "epoll refuses the socket");
    else
        s->interest = interest;
}

void session_send(session *s)
{
    if (s->phase == SESSION_DEAD)
        return;
    if (s->out.bytes.failed || outgoing_left(&s->out) > OUTPUT_MOST) {
        session_close(s, s->out.bytes.failed ? "out of memory" : "it does not read");
        return;
    }
    if (!flush(s)) {
        session_close(s, "the connection broke");
        return;
    }
    if (!session_account(s) && s->phase != SESSION_CLOSING) {
        session_close(s, "the connections have all the memory they may");
        return;
    }
    if (s->phase == SESSION_CLOSING && outgoing_is_empty(&s->out) &&
        tls_unsent(s->tls) == 0 && !s->shut) {
        s->shut = true;
        shutdown(s->fd, SHUT_WR);
    }
    update_interest(s);
}

/* ------------------------------------------------------------------- input */

bool session_receive(session *s)
{
    size_t room;
    if (s->phase == SESSION_CLOSING)
        framing_drop(&s->in); /* what comes after an error is not looked at */
    uint8_t *to = framing_room(&s->in, &room);
    if (!to || room == 0)
        return to != NULL;
    ssize_t n = tls_receive(s->tls, s->fd, to, room);
    if (n < 0)
        return errno == EAGAIN || errno == EINTR;
    if (n == 0)
        return false;
    framing_add(&s->in, (size_t)n);
    s->heard_ns = clock_ns();
    if (s->phase == SESSION_OPEN)
        s->idle = deadline_in_ms(s->control->server->idle_ms);
    return true;
}

/* --------------------------------------------------------------- making room */

/* When nobody could go for a peer, nobody can for a moment: to look at all sessions costs more than
   to accept. For others somebody may. */
#define LOOK_AGAIN_MS 50

static bool holds_lease(const reader *r)
{
    for (size_t i = 0; i < SESSION_LEASES; i++)
        if (r->leases[i].of)
            return true;
    return false;
}

/* When anything was last heard of it, or sent to its data connections. Lock held. */
static uint64_t active_ns(const session *s)
{
    return s->heard_ns > s->reader->active_ns ? s->heard_ns : s->reader->active_ns;
}

/* Nobody's connections are more in the way than those of who has more of them. */
static bool may_go_for(const session *s, const peer_share *newcomer,
                       admission_room room)
{
    if (s->phase != SESSION_OPEN || s->n_waits + s->n_watches > 0 || parked_lives(s))
        return false;
    return s->from == newcomer ||
           (room == ROOM_NONE && !s->from->is_own &&
            (newcomer->is_own || s->from->connections > newcomer->connections));
}

static session *find_idle(struct control *c, const peer_share *newcomer,
                          admission_room room)
{
    fanin_server *server = c->server;
    session *found = NULL;
    uint64_t before = clock_ns() - (uint64_t)EVICT_IDLE_MS * 1000000;
    pthread_mutex_lock(&server->lock);
    for (session *s = c->sessions; s; s = s->next)
        if (may_go_for(s, newcomer, room) && active_ns(s) < before &&
            !holds_lease(s->reader)) {
            before = active_ns(s);
            found = s;
        }
    server->stats.sessions_evicted += found != NULL;
    pthread_mutex_unlock(&server->lock);
    return found;
}

bool evict_idle(struct control *c, peer_share *newcomer, admission_room room)
{
    deadline *again = &newcomer->evict_again[room == ROOM_NONE];
    if (!deadline_passed(*again))
        return false;
    session *s = find_idle(c, newcomer, room);
    if (!s) {
        *again = deadline_in_ms(LOOK_AGAIN_MS);
        return false;
    }
    reply_fault(s, 0, FANIN_ERR_CLOSED,
                "the session was idle, and its connection is needed by another");
    session_send(s);
    session_close(s, "it was idle, and its connection is needed by another");
    return true;
}

/* ------------------------------------------------------------------- replies */

void reply_error(session *s, uint64_t request, const fanin_error *error)
{
    msg_error m = {.code = error->status};
    if (error->status == FANIN_OK)
        return;
    memcpy(m.message, error->message, sizeof m.message);
    memcpy(m.remedy, error->remedy, sizeof m.remedy);
    memcpy(m.key, error->key, sizeof m.key);
    encode_error(&s->out.bytes, request, &m);
}

void reply_fault(session *s, uint64_t request, fanin_status code, const char *message)
{
    fanin_error error = FANIN_ERROR_INIT;
    error_set(&error, code, NULL, "%s", message);
    reply_error(s, request, &error);
}

uint64_t age_ms(uint64_t since_ns)
{
    return (clock_ns() - since_ns) / 1000000 + 1;
}

void describe_missing(const fanin_server *server, const char *name, fanin_error *error)
{
    char there[320];
    error_place place = {.phase = "catalog", .remedy = "check the name of the run"};
    publication_names(server, there, sizeof there);
    error_set(error, FANIN_ERR_NOT_FOUND, &place,
              "rank %u does not publish %s; it publishes %s", (unsigned)server->rank,
              name, there[0] ? there : "nothing");
}

publication *find_present(const fanin_server *server, const char *name)
{
    publication *p = publication_find(server, name);
    return p && p->present ? p : NULL;
}

void describe_paused(const char *name, const char *reason, fanin_error *error)
{
    error_place place = {.phase = "wait",
                         .key = name,
                         .remedy = "pull again when the trainer has resumed it"};
    error_set(error, FANIN_ERR_PAUSED, &place, "%s is paused: %s", name, reason);
}

int32_t state_for(const session *s, publication_state state)
{
    if (state == STATE_PAUSED && !(s->features & FEATURE_PAUSED))
        return WIRE_STATE_WRITING;
    return (int32_t)state;
}
