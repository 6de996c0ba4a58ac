/* SPDX-License-Identifier: Apache-2.0 */
/* Who may connect, how many, and how much memory all of them may take. */
#include "guests/admission.h"
#include "error_set.h"
#include "neighbour.h"

#include <stdlib.h>
#include <string.h>

/* ------------------------------------------------------------------ shares */

static unsigned at_least_two(unsigned n)
{
    return n > 2 ? n : 2;
}

static unsigned most_per_peer(const fanin_server *s)
{
    return at_least_two(s->max_sessions / 2);
}

/* Of all others than its own user, for whom a quarter is kept where there is a way to tell. */
static unsigned most_of_network(const fanin_server *s)
{
    return s->max_sessions - (s->has_unix ? s->max_sessions / 4 : 0);
}

const char *sessions_remedy(const fanin_server *s)
{
    return s->sessions_limited
               ? "close idle clients, or raise the trainer's hard limit of open files "
                 "(ulimit -Hn, LimitNOFILE, --ulimit nofile)"
               : "close idle clients, or raise max_sessions of fanin_server_config";
}

/* Lock held. */
static admission_room connections_left(const fanin_server *s, const peer_share *from)
{
    if (!from->is_own && from->connections >= most_per_peer(s))
        return ROOM_NOT_FOR_PEER;
    if (s->stats.sessions >= s->max_sessions ||
        (!from->is_own && s->network_connections >= most_of_network(s)))
        return ROOM_NONE;
    return ROOM_LEFT;
}

/* A session without room for a data connection could look, and never pull: every other connection
   is kept for that. */
admission_room sessions_left(const fanin_server *s, const peer_share *from)
{
    if (!from->is_own && from->sessions >= most_per_peer(s) / 2)
        return ROOM_NOT_FOR_PEER;
    if (s->control_sessions >= s->max_sessions / 2 ||
        (!from->is_own && s->network_sessions >= at_least_two(most_of_network(s)) / 2))
        return ROOM_NONE;
    return ROOM_LEFT;
}

/* --------------------------------------------------------------- admission */

/* @p differs: in what a peer on the Unix socket is none of the server's own. */
static fanin_status check_peer(const fanin_server *s, const socket_address *peer,
                               unsigned differs, fanin_error *error)
{
    bool is_unix = peer->storage.ss_family == AF_UNIX;
    /* Who is none of the server's own has to know the secret, if there is one. */
    if (is_unix && (differs & (s->tls ? NEIGHBOUR_STRANGER : NEIGHBOUR_UID)))
        return error_set(error, FANIN_ERR_AUTH, NULL,
                         "this socket is for the server's own user; use TCP");
    if (!is_unix && (s->flags & FANIN_SERVER_OPEN) &&
        !networks_contain(s->allow, s->n_allow, peer))
        return error_set(error, FANIN_ERR_AUTH, NULL,
                         "the address is in no network that the server allows");
    return FANIN_OK;
}

/* Lock held. */
static fanin_status count_in(fanin_server *s, newcomer *who, fanin_error *error)
{
    peer_share *from = who->share;
    error_place place = {.phase = "connect", .remedy = sessions_remedy(s)};
    if (s->stopping)
        return error_set(error, FANIN_ERR_CLOSED, NULL, "the server is shutting down");
    who->room = connections_left(s, from);
    switch (who->room) {
    case ROOM_NOT_FOR_PEER:
        return error_set(error, FANIN_ERR_LIMIT, &place,
                         "one peer (%s) may have %u connections", from->name,
                         most_per_peer(s));
    case ROOM_NONE:
        return error_set(error, FANIN_ERR_LIMIT, &place,
                         "the server has all of its %u connections",
                         from->is_own ? (unsigned)s->max_sessions : most_of_network(s));
    case ROOM_LEFT:
        break;
    }
    from->connections++;
    s->network_connections += !from->is_own;
    s->stats.sessions++;
    s->stats.sessions_opened++;
    return FANIN_OK;
}

fanin_status admit(fanin_server *s, int fd, const socket_address *peer, newcomer *out,
                   fanin_error *error)
{
    bool is_unix = peer->storage.ss_family == AF_UNIX;
    unsigned differs = is_unix ? neighbour_differs(fd) : NEIGHBOUR_UID;
    if (!(differs & NEIGHBOUR_UID) && (s->flags & FANIN_SERVER_TRUST_CONTAINERS))
        differs = 0;
    fanin_status status = check_peer(s, peer, differs, error);
    *out = (newcomer){.differs = differs};
    pthread_mutex_lock(&s->lock);
    out->share = peer_share_of(s, peer, is_unix && !(differs & NEIGHBOUR_STRANGER));
    if (!out->share)
        status = error_set_memory(error);
    else if (status == FANIN_OK)
        status = count_in(s, out, error);
    pthread_mutex_unlock(&s->lock);
    return status;
}

void dismiss(fanin_server *s, peer_share *from)
{
    pthread_mutex_lock(&s->lock);
    s->stats.sessions--;
    from->connections--;
    s->network_connections -= !from->is_own;
    pthread_mutex_unlock(&s->lock);
}

void count_session(fanin_server *s, peer_share *from, int change)
{
    from->sessions += (unsigned)change;
    s->control_sessions += (unsigned)change;
    s->network_sessions += from->is_own ? 0 : (unsigned)change;
}

/* ------------------------------------------------------------------ memory */

static uint64_t memory_of_peer(const fanin_server *s)
{
    return s->max_memory / 2;
}

/* As most_of_network(). */
uint64_t memory_of_network(const fanin_server *s)
{
    return s->max_memory - (s->has_unix ? s->max_memory / 4 : 0);
}

bool memory_account(fanin_server *s, peer_share *of, size_t *counted, size_t now)
{
    /* Wraps when it shrinks, and so do the sums. */
    uint64_t before = *counted, more = (uint64_t)now - before;
    uint64_t total = atomic_fetch_add(&s->memory, more) + more;
    uint64_t share = of ? atomic_fetch_add(&of->memory, more) + more : 0, network = 0;
    bool is_network = !of || !of->is_own;
    if (is_network)
        network = atomic_fetch_add(&s->network_memory, more) + more;
    *counted = now;
    if (now <= before)
        return true;
    return total <= s->max_memory && (!is_network || (share <= memory_of_peer(s) &&
                                                      network <= memory_of_network(s)));
}

/* Whether @p more still fits into @p most of which @p used is used. */
static bool fits(uint64_t used, uint64_t most, uint64_t more)
{
    return used <= most && more <= most - used;
}

bool memory_fits(const fanin_server *s, const peer_share *of, size_t more)
{
    if (!fits(atomic_load(&s->memory), s->max_memory, more))
        return false;
    return of->is_own ||
           (fits(atomic_load(&of->memory), memory_of_peer(s), more) &&
            fits(atomic_load(&s->network_memory), memory_of_network(s), more));
}
