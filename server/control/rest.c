/* SPDX-License-Identifier: Apache-2.0 */
#include "control/rest.h"
#include "core/peer_work.h"

/* Who has proven the secret is no stranger. */
static bool is_counted(const session *s)
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
    if (!is_counted(s)) {
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

static void append(struct control *c, session *s)
{
    s->resting = true;
    s->next_resting = NULL;
    if (c->last_resting)
        c->last_resting->next_resting = s;
    else
        c->first_resting = s;
    c->last_resting = s;
    if (c->rest_until == UINT64_MAX)
        c->rest_until = deadline_in_ms(REST_MS);
}

bool must_rest(session *s)
{
    fanin_server *server = s->control->server;
    if (s->resting || !is_counted(s) || !peer_must_rest(server, s->from))
        return s->resting;
    append(s->control, s);
    atomic_fetch_add(&server->rests, 1);
    return true;
}

void rest_leave(session *s)
{
    struct control *c = s->control;
    session *before = NULL, *at = c->first_resting;
    for (; at && at != s; at = at->next_resting)
        before = at;
    s->resting = false;
    if (!at)
        return;
    if (before)
        before->next_resting = s->next_resting;
    else
        c->first_resting = s->next_resting;
    if (c->last_resting == s)
        c->last_resting = before;
}

void rest_turns(struct control *c, void (*turn)(session *))
{
    session *s = c->first_resting, *next;
    c->first_resting = c->last_resting = NULL;
    c->rest_until = UINT64_MAX;
    for (; s; s = next) {
        next = s->next_resting;
        if (s->phase == SESSION_DEAD)
            continue;
        if (peer_must_rest(c->server, s->from)) {
            append(c, s);
        } else {
            s->resting = false;
            turn(s);
        }
    }
}
