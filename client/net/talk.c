/* SPDX-License-Identifier: Apache-2.0 */
#include "net/connection.h"

#include "error_set.h"
#include "net/client_state.h"
#include "net/trust.h"
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

/* ---------------------------------------------------------------- ending */

error_place connection_place(const connection *c, const char *phase)
{
    return (error_place){.phase = phase,
                         .address = c->text,
                         .rank_plus_1 = c->known ? (int32_t)c->peer.rank + 1 : 0};
}

const char *connection_name(const connection *c, char name[CONNECTION_NAME])
{
    char rank[16] = "the rank";
    if (c->known)
        snprintf(rank, sizeof rank, "rank %u", c->peer.rank);
    snprintf(name, CONNECTION_NAME, "%s at %s", rank, c->text);
    return name;
}

void connection_shut(connection *c)
{
    c->state = CONNECTION_DOWN;
    if (c->source.fd < 0)
        return;
    loop_remove(c->shared->loop, &c->source);
    close(c->source.fd);
    c->source.fd = -1;
    tls_free(&c->tls);
}

void connection_fail(connection *c, const fanin_error *fault)
{
    bool was_up = c->state != CONNECTION_DOWN;
    if (was_up && c->state != CONNECTION_READY)
        span_of_connection(c, c->shared->place, TRACE_CONNECT, c->started_ns,
                           fault->status);
    connection_shut(c);
    c->pinged = false;
    if (was_up || !c->known)
        error_copy(&c->fault, fault);
    pending *list = c->pending;
    c->pending = NULL;
    while (list) {
        pending *p = list;
        list = p->next;
        if (p->fn)
            p->fn(p->cookie, c, 0, NULL);
        free(p);
    }
}

void connection_fail_for(connection *c, fanin_status status, int sys_errno,
                         const char *phase, const char *remedy, const char *what)
{
    fanin_error fault = FANIN_ERROR_INIT;
    error_place place = connection_place(c, phase);
    place.remedy = remedy;
    place.sys_errno = sys_errno;
    char who[CONNECTION_NAME];
    connection_name(c, who);
    if (sys_errno && sys_errno != EBADMSG)
        error_set_errno(&fault, status, sys_errno, &place, "%s %s", who, what);
    else
        error_set(&fault, status, &place, "%s %s", who, what);
    connection_fail(c, &fault);
}

void connection_fail_for_memory(connection *c)
{
    fanin_error fault = FANIN_ERROR_INIT;
    error_set_memory(&fault);
    connection_fail(c, &fault);
}

/* --------------------------------------------------------------- replies */

static void dispatch_frame(connection *c, const frame *f, body *b)
{
    if (c->state == CONNECTION_HELLO) {
        c->on_greeting(c, f->type, b);
        return;
    }
    if (f->request == 0 && f->type == MSG_ERROR) {
        fanin_error fault = FANIN_ERROR_INIT;
        connection_reply_error(c, "connection", f->type, b, &fault);
        /* The rank says that of what came to it, and of nothing else. */
        if (fault.status == FANIN_ERR_TRANSPORT && c->in.sealed)
            fault.sys_errno = EBADMSG;
        connection_fail(c, &fault);
        return;
    }
    for (pending **at = &c->pending; *at; at = &(*at)->next) {
        pending *p = *at;
        if (p->request != f->request)
            continue;
        if (p->keep) {
            p->fn(p->cookie, c, f->type, b);
            return;
        }
        *at = p->next;
        reply_fn fn = p->fn;
        void *cookie = p->cookie;
        free(p);
        if (fn)
            fn(cookie, c, f->type, b);
        return;
    }
    connection_fail_for(c, FANIN_ERR_PROTOCOL, 0, "connection", NULL,
                        "answered a request that was not made");
}

static void fail_for_frame(connection *c, const framed *bad)
{
    char what[160];
    if (bad->status == FANIN_ERR_TRANSPORT) {
        connection_fail_for(c, FANIN_ERR_TRANSPORT, EBADMSG, "connection", WAY_REMEDY,
                            "and this process do not agree on a frame: " SEAL_BROKEN);
    } else if (bad->head.length > LIMIT_REPLY) {
        connection_fail_for(c, FANIN_ERR_PROTOCOL, 0, "connection", NULL,
                            "announced a reply beyond the limit");
    } else {
        snprintf(what, sizeof what, "sent something else: %s", bad->why);
        connection_fail_for(c, bad->status, 0, "connection",
                            "is this port a fanin parameter server?", what);
    }
}

/* Hands over every complete frame; false: the connection is gone. */
static bool take_frames(connection *c)
{
    framed got;
    framing_result result;
    while ((result = framing_take(&c->in, &got)) == FRAMING_WHOLE) {
        c->out.bytes.sealed = c->in.sealed;
        uint64_t generation = c->generation;
        dispatch_frame(c, &got.head, &got.body);
        if (c->state <= CONNECTION_CONNECTING || c->source.fd < 0 ||
            (generation != c->generation && c->state != CONNECTION_READY))
            return false;
    }
    if (result == FRAMING_BAD)
        fail_for_frame(c, &got);
    return result == FRAMING_MORE;
}

/* A rank judges this end's certificate when this end believes hands shaken already. Whoever accepts
   and says nothing is a forwarder in front of a dead rank. */
static void fail_broken(connection *c, int sys_errno, const char *remedy,
                        const char *what)
{
    secure_fault why;
    bool is_ready = c->state == CONNECTION_READY;
    c->silent = false;
    if (secure_refused(c->tls, &why))
        connection_fail_for(c, why.status, 0, "connect", why.remedy, why.what);
    else if (secure_broken(c->tls, &why))
        connection_fail_for(c, why.status, EBADMSG, "connection", why.remedy, why.what);
    else
        connection_fail_for(c, is_ready ? FANIN_ERR_CLOSED : FANIN_ERR_UNREACHABLE,
                            sys_errno, "connection", remedy, what);
}

void connection_read(connection *c)
{
    for (;;) {
        size_t room;
        uint8_t *to = framing_room(&c->in, &room);
        if (!to) {
            connection_fail_for_memory(c);
            return;
        }
        ssize_t n = tls_receive(c->tls, c->source.fd, to, room);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK))
            return;
        if (n <= 0) {
            fail_broken(c, n < 0 ? errno : 0, CLOSED_REMEDY,
                        n < 0 ? "broke the connection" : "closed the connection");
            return;
        }
        framing_add(&c->in, (size_t)n);
        c->heard_ns = clock_ns();
        c->pinged = false;
        if (!take_frames(c) || ((size_t)n < room && !c->tls))
            return; /* what comes later wakes the loop again */
    }
}

void connection_flush(connection *c)
{
    int failed = outgoing_flush(&c->out, c->tls, c->source.fd);
    /* What the peer said before it closed (a refusal) is worth more than EPIPE: the reader
       finds it, then the end of the stream. */
    if (failed == EPIPE || failed == ECONNRESET) {
        outgoing_clear(&c->out);
    } else if (failed) {
        /* A request is lost, or half of it has left: nobody would answer. */
        fail_broken(c, failed, "is this host short of memory, or the network cut?",
                    "could not be sent a request");
        return;
    }
    bool is_sent = outgoing_is_empty(&c->out) && tls_unsent(c->tls) == 0;
    loop_want(c->shared->loop, &c->source, is_sent ? EPOLLIN : EPOLLIN | EPOLLOUT);
}

/* -------------------------------------------------------------- requests */

/* Whether anybody still waits for this rank. The answer to a question that was given up may lie
   unread until the next call: that silence is this side's, not the rank's. */
static bool awaited(const connection *c)
{
    bool any = c->owing;
    for (const pending *p = c->pending; p && !any; p = p->next)
        any = p->fn != NULL;
    return any;
}

static void listen_anew(connection *c)
{
    c->heard_ns = clock_ns();
    c->pinged = false;
    c->look_ns = 0;
}

buffer *connection_out(connection *c)
{
    return &c->out.bytes;
}

void connection_ask(connection *c, reply_fn fn, void *cookie)
{
    pending *p = calloc(1, sizeof *p);
    if (!p || c->out.bytes.failed || c->state != CONNECTION_READY) {
        free(p);
        if (c->state == CONNECTION_READY)
            connection_fail_for_memory(c);
        if (fn)
            fn(cookie, c, 0, NULL);
        return;
    }
    if (!awaited(c))
        listen_anew(c);
    *p = (pending){
        .next = c->pending, .request = c->next_request++, .fn = fn, .cookie = cookie};
    c->pending = p;
    connection_flush(c);
}

void connection_forget(connection *c, const void *cookie)
{
    /* The entry stays so that the late reply is recognised. */
    for (pending *p = c->pending; p; p = p->next) {
        if (p->cookie == cookie) {
            p->fn = NULL;
            p->cookie = NULL;
            p->keep = false;
        }
    }
}

void connection_keep(connection *c, const void *cookie)
{
    for (pending *p = c->pending; p; p = p->next)
        p->keep |= p->cookie == cookie;
}

bool connection_owes(const connection *c)
{
    bool owes = c->state == CONNECTION_READY && c->owing;
    for (const pending *p = c->pending; p; p = p->next)
        owes = owes || (p->fn && !p->keep);
    return owes;
}

void connection_set_owing(connection *c, bool owing)
{
    if (owing && !awaited(c))
        listen_anew(c);
    c->owing = owing;
}

void connection_give_up(connection *c)
{
    static const char stopped[] = STOPPED_REMEDY;
    bool accepted = c->state == CONNECTION_HELLO || c->tls;
    if (c->state == CONNECTION_DOWN)
        return;
    c->silent = true;
    if (c->state == CONNECTION_READY)
        connection_fail_for(c, FANIN_ERR_UNREACHABLE, 0, "connection",
                            "is the trainer process stopped, or the network cut?",
                            "owes an answer and fell silent");
    else
        connection_fail_for(c, FANIN_ERR_UNREACHABLE, 0, "connect", stopped,
                            accepted ? "accepted but did not answer in time"
                                     : "did not answer in time");
}

deadline connection_tick(connection *c)
{
    if (c->state == CONNECTION_DOWN)
        return UINT64_MAX;
    if (c->state != CONNECTION_READY) {
        if (deadline_passed(c->connect_by))
            connection_give_up(c);
        return c->state == CONNECTION_DOWN ? UINT64_MAX : c->connect_by;
    }
    if (!awaited(c))
        return UINT64_MAX;
    uint64_t lost_ns = (uint64_t)c->shared->lost_ms * 1000000;
    uint64_t now = clock_ns();
    /* This process came late, as it was stopped, or busy: what the rank has said since then has not
       been read, so that this is not the rank's silence. */
    if (c->look_ns > 0 && now > c->look_ns)
        c->heard_ns += now - (c->look_ns > c->heard_ns ? c->look_ns : c->heard_ns);
    if (now - c->heard_ns >= lost_ns) {
        connection_give_up(c);
        return UINT64_MAX;
    }
    if (now - c->heard_ns >= lost_ns / 2 && !c->pinged) {
        c->pinged = true;
        encode_empty(connection_out(c), c->next_request, MSG_PING);
        uint64_t heard = c->heard_ns;
        connection_ask(c, NULL, NULL); /* any byte is a sign of life */
        c->heard_ns = heard;
    }
    c->look_ns = c->heard_ns + (c->pinged ? lost_ns : lost_ns / 2);
    return c->look_ns;
}

fanin_status connection_reply_error(connection *c, const char *phase, message_type type,
                                    body *b, fanin_error *error)
{
    error_place place = connection_place(c, phase);
    if (type == 0)
        return error_copy(error, &c->fault);
    msg_error m;
    if (type != MSG_ERROR || decode_error(b, &m) != FANIN_OK) {
        char who[CONNECTION_NAME];
        place.remedy = "use the same fanin release on both ends";
        return error_set(error, FANIN_ERR_PROTOCOL, &place,
                         "%s sent a reply that does not fit the request (%s)",
                         connection_name(c, who), b->why ? b->why : "unexpected type");
    }
    place.remedy = m.remedy;
    place.key = m.key;
    fanin_status status = m.code < 0 ? m.code : FANIN_ERR_PROTOCOL;
    if (c->known)
        return error_set(error, status, &place, "rank %u at %s: %s", c->peer.rank,
                         c->text, m.message);
    return error_set(error, status, &place, "%s: %s", c->text, m.message);
}
