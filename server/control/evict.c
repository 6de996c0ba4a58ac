/* SPDX-License-Identifier: Apache-2.0 */
#include "control/evict.h"
#include "control/reply.h"

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
    if (s->phase != SESSION_OPEN || s->n_waits + s->n_watches > 0)
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
