/* SPDX-License-Identifier: Apache-2.0 */
#include "control/dispatch.h"
#include "control/open_path.h"
#include "control/relays.h"
#include "control/session.h"
#include "control/requests.h"
#include "control/rest.h"
#include "control/waits.h"

#include <sys/epoll.h>

/* So many requests are handled before their CPU time is counted. */
#define FRAMES_A_LOOK 32

static fanin_status handle_ping(session *s, uint64_t request, body *in)
{
    fanin_status status = decode_empty(in);
    if (status == FANIN_OK)
        encode_empty(&s->out.bytes, request, MSG_PONG);
    return status;
}

static fanin_status dispatch(session *s, const frame *f, body *in)
{
    switch (f->type) {
    case MSG_OPEN_PATH:
        return handle_open_path(s, f->request, in);
    case MSG_LIST:
        return handle_list(s, f->request, in);
    case MSG_STATS:
        return handle_stats(s, f->request, in);
    case MSG_KEYS:
    case MSG_BOXES:
    case MSG_REGIONS:
        return handle_blob(s, f->request, f->type, in);
    case MSG_WAIT:
        return handle_wait(s, f->request, in);
    case MSG_BEGIN:
        return handle_begin(s, f->request, in);
    case MSG_END:
        return handle_end(s, f->request, in);
    case MSG_WATCH:
        return handle_watch(s, f->request, in);
    case MSG_OFFER:
        return handle_offer(s, f->request, in);
    case MSG_HOLDERS:
        return handle_holders(s, f->request, in);
    case MSG_LANDED:
        return handle_landed(s, f->request, in);
    case MSG_PING:
        return handle_ping(s, f->request, in);
    case MSG_HELLO:
        in->why = "hello came twice";
        return FANIN_ERR_PROTOCOL;
    case MSG_READ:
    case MSG_DIGEST:
        in->why = "reads belong on a data connection";
        return FANIN_ERR_PROTOCOL;
    default:
        in->why = "this server does not know the request";
        return message_kind(f->type) == KIND_REPLY ? FANIN_ERR_PROTOCOL
                                                   : FANIN_ERR_UNSUPPORTED;
    }
}

static void handle_request(session *s, const frame *f, body *in)
{
    fanin_status status = dispatch(s, f, in);
    if (status == FANIN_ERR_UNSUPPORTED)
        reply_fault(s, f->request, status, in->why);
    else if (status != FANIN_OK)
        session_reject(s, f->request, status, in->why);
}

/* Handles one frame; false: there is no whole one, or none may be taken now. */
static bool next_frame(session *s)
{
    framed got;
    if (s->phase > SESSION_OPEN || outgoing_left(&s->out) >= OUTPUT_PAUSE ||
        must_rest(s))
        return false;
    framing_result result = framing_take(&s->in, &got);
    if (result == FRAMING_BAD)
        session_reject(s, got.head.request, got.status, got.why);
    else if (result == FRAMING_WHOLE && s->phase == SESSION_HELLO)
        handle_hello(s, &got.head, &got.body);
    else if (result == FRAMING_WHOLE)
        handle_request(s, &got.head, &got.body);
    if (result != FRAMING_MORE || !framing_has_begun(&s->in))
        s->begun_at = UINT64_MAX;
    else if (s->begun_at == UINT64_MAX)
        s->begun_at = deadline_in_ms(STALL_MS);
    return result == FRAMING_WHOLE;
}

void session_serve(session *s)
{
    unsigned taken = 0;
    work_begin(s);
    while (next_frame(s))
        if (++taken % FRAMES_A_LOOK == 0)
            work_look(s);
    session_send(s);
    work_charge(s);
    session_note_due(s);
}

void session_handle_event(session *s, uint32_t events)
{
    if (s->phase == SESSION_DEAD)
        return;
    work_begin(s);
    bool rests = must_rest(s);
    bool waits = !rests && !session_secure(s);
    uint32_t ends =
        rests ? EPOLLHUP | EPOLLERR : 0; /* of a peer that is gone nothing waits */
    bool has_come = events & (EPOLLIN | EPOLLHUP | EPOLLERR) || tls_pending(s->tls);
    if (events & ends || (!rests && !waits && has_come && !session_receive(s)))
        session_close(s, s->phase == SESSION_OPEN ? "the peer closed" : NULL);
    else if (rests)
        session_send(s);
    work_charge(s);
    if (!rests && !waits)
        session_serve(s);
    session_note_due(s);
}

/* As if bytes had just come. What it owed meanwhile was not its fault. */
void session_take_turn(session *s)
{
    s->begun_at = UINT64_MAX;
    if (s->phase == SESSION_HELLO)
        s->due = deadline_in_ms(HELLO_MS);
    work_begin(s);
    if (s->n_waits + s->n_watches > 0)
        waits_review(s);
    (void)parked_stir(s);
    (void)parked_look(s);
    if (session_secure(s) && !session_receive(s))
        session_close(s, s->phase == SESSION_OPEN ? "the peer closed" : NULL);
    work_charge(s);
    session_serve(s);
}

/* --------------------------------------------------------------- deadlines */

/* Waits and watches, and bytes on data connections, show that somebody is there. */
static deadline idle_deadline(const session *s)
{
    if (s->phase != SESSION_OPEN || s->n_waits + s->n_watches > 0 || parked_lives(s) ||
        s->turn.waits)
        return UINT64_MAX;
    return s->idle;
}

/* Bytes that come one by one are no sign of life. */
static deadline begun_deadline(const session *s)
{
    return s->phase == SESSION_OPEN && !s->turn.waits ? s->begun_at : UINT64_MAX;
}

static deadline session_due(const session *s)
{
    bool waits = s->phase == SESSION_HELLO && s->turn.waits;
    deadline at = s->phase == SESSION_OPEN || waits ? UINT64_MAX : s->due;
    at = deadline_sooner(at, s->stalled_at);
    at = deadline_sooner(at, begun_deadline(s));
    at = deadline_sooner(at, idle_deadline(s));
    return deadline_sooner(at, deadline_sooner(waits_due(s), parked_due(s)));
}

void session_note_due(session *s)
{
    if (s->phase != SESSION_DEAD)
        s->control->due = deadline_sooner(s->control->due, session_due(s));
}

static bool data_was_active(session *s)
{
    fanin_server *server = s->control->server;
    pthread_mutex_lock(&server->lock);
    uint64_t active = s->reader->active_ns;
    pthread_mutex_unlock(&server->lock);
    deadline until = active + (uint64_t)server->idle_ms * 1000000;
    if (active == 0 || deadline_passed(until))
        return false;
    s->idle = until;
    return true;
}

void session_expire(session *s)
{
    if (!deadline_passed(session_due(s)))
        return;
    if (deadline_passed(s->stalled_at)) {
        session_close(s, "it took no bytes for 10 s");
    } else if (s->phase == SESSION_CLOSING && deadline_passed(s->due)) {
        session_close(s, NULL);
    } else if (s->tls && !s->secured && !s->turn.waits && deadline_passed(s->due)) {
        session_close(s, "no TLS handshake within 2 s");
    } else if (s->phase == SESSION_HELLO && !s->turn.waits && deadline_passed(s->due)) {
        session_reject(s, 0, FANIN_ERR_TIMEOUT, "no hello within 2 s");
        session_serve(s);
    } else if (deadline_passed(begun_deadline(s))) {
        session_reject(s, 0, FANIN_ERR_TIMEOUT,
                       "a request was begun and not whole within 10 s");
        session_serve(s);
    } else if (s->phase == SESSION_OPEN) {
        waits_expire(s);
        (void)parked_look(s);
        if (deadline_passed(idle_deadline(s)) && !data_was_active(s))
            session_close(s, "it was idle for too long");
        else
            session_serve(s);
    }
}
