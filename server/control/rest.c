/* SPDX-License-Identifier: Apache-2.0 */
#include "control/rest.h"
#include "guests/peer.h"

/* Who has proven the secret is no stranger. */
static bool is_rest_counted(const session *s)
{
    return !(s->tls && s->secured) && peer_is_counted(s->control->server, s->from);
}

void work_begin(session *s)
{
    struct control *c = s->control;
    if (peer_is_counted(c->server, s->from))
        c->mark = thread_cpu_ns();
}

void work_charge(session *s)
{
    struct control *c = s->control;
    if (!is_rest_counted(s)) {
        /* Handshakes of those that have the key would use up what strangers may. */
        peer_refund(c->server, s->from, s->handshake_ns);
        s->from->has_proven = s->from->has_proven || (s->tls && s->secured);
        s->handshake_ns = 0;
        return;
    }
    uint64_t now = thread_cpu_ns();
    peer_charge(c->server, s->from, now - c->mark);
    s->handshake_ns += s->tls ? now - c->mark : 0;
    c->mark = now;
}

void work_look(session *s)
{
    work_charge(s);
    s->control->served = NULL;
}

/* Whether it has to wait for others of all strangers. */
static bool is_behind(const session *s)
{
    return s->control->crowded && !s->from->has_proven;
}

/* Whose turn it is has the whole of it, be the share used up by what it takes to read the requests:
   a turn
   without an answer would be none. */
bool must_rest(session *s)
{
    struct control *c = s->control;
    if (s->turn.waits || c->served == s || !is_rest_counted(s) ||
        !(is_behind(s) || peer_must_rest(c->server, s->from)))
        return s->turn.waits;
    turns_append(&c->resting, &s->turn, s, s->from);
    c->crowded = c->crowded || strangers_must_rest(c->server);
    if (c->rest_until == UINT64_MAX)
        c->rest_until = deadline_in_ms(REST_MS);
    atomic_fetch_add(&c->server->rests, 1);
    return true;
}

void rest_leave(session *s)
{
    turns_leave(&s->control->resting, &s->turn);
}

static bool may_go_on(void *server, void *of)
{
    return !peer_must_rest(server, ((const session *)of)->from);
}

void rest_turns(struct control *c, void (*turn)(session *))
{
    session *s;
    /* Who goes on and has to rest again has its next turn later: others wait for the thread too. */
    size_t most = c->resting.n;
    while (most-- > 0 && (s = turns_next(&c->resting, may_go_on, c->server))) {
        c->served = s;
        turn(s);
    }
    c->served = NULL;
    c->crowded = c->resting.n > 0 && strangers_must_rest(c->server);
    c->rest_until = c->resting.n > 0 ? deadline_in_ms(REST_MS) : UINT64_MAX;
}
