/* SPDX-License-Identifier: Apache-2.0 */
/* Who may connect, how many, and how much memory all of them may take. */
#include "core/admission.h"
#include "error_set.h"
#include "neighbour.h"

#include <stdlib.h>
#include <string.h>

static void address_key(const socket_address *a, uint8_t key[17])
{
    int family;
    const uint8_t *bytes;
    memset(key, 0, 17);
    if (!socket_ip_bytes(a, &family, &bytes))
        return;
    key[0] = (uint8_t)family;
    memcpy(key + 1, bytes, family == AF_INET ? 4 : 16);
}

/* Finds or makes the count of an address; NULL: no memory. Lock held. */
static peer_count *count_of(fanin_server *s, const socket_address *a)
{
    uint8_t key[17];
    address_key(a, key);
    for (peer_count *p = s->peers; p; p = p->next)
        if (memcmp(p->address, key, sizeof key) == 0)
            return p;
    peer_count *p = calloc(1, sizeof *p);
    if (!p)
        return NULL;
    memcpy(p->address, key, sizeof key);
    p->next = s->peers;
    s->peers = p;
    return p;
}

static void forget_if_unused(fanin_server *s, peer_count *counted)
{
    if (counted->connections > 0)
        return;
    peer_count **link = &s->peers;
    while (*link != counted)
        link = &(*link)->next;
    *link = counted->next;
    free(counted);
}

unsigned most_per_peer(const fanin_server *s)
{
    return s->max_sessions / 2 > 2 ? s->max_sessions / 2 : 2;
}

const char *sessions_remedy(const fanin_server *s)
{
    return s->sessions_limited
               ? "close idle clients, or raise the trainer's hard limit of open files "
                 "(ulimit -Hn, LimitNOFILE, --ulimit nofile)"
               : "close idle clients, or raise max_sessions";
}

static fanin_status count_in(fanin_server *s, const socket_address *peer, bool own,
                             peer_count **counted_out, fanin_error *error)
{
    error_place place = {.phase = "connect", .remedy = sessions_remedy(s)};
    if (s->stopping)
        return error_set(error, FANIN_ERR_CLOSED, NULL, "the server is shutting down");
    if (s->stats.sessions >= s->max_sessions)
        return error_set(error, FANIN_ERR_LIMIT, &place,
                         "the server has all of its %u connections",
                         (unsigned)s->max_sessions);
    if (!own) {
        peer_count *counted = count_of(s, peer);
        if (!counted)
            return error_set_memory(error);
        if (counted->connections >= most_per_peer(s)) {
            forget_if_unused(s, counted);
            return error_set(error, FANIN_ERR_LIMIT, &place,
                             "one peer may have %u connections", most_per_peer(s));
        }
        counted->connections++;
        *counted_out = counted;
    }
    s->stats.sessions++;
    s->stats.sessions_opened++;
    return FANIN_OK;
}

fanin_status admit(fanin_server *s, int fd, const socket_address *peer,
                   unsigned *differs_out, peer_count **counted_out, fanin_error *error)
{
    bool is_unix = peer->storage.ss_family == AF_UNIX;
    unsigned differs = is_unix ? neighbour_differs(fd) : NEIGHBOUR_UID;
    *counted_out = NULL;
    fanin_status status = FANIN_OK;
    if (!(differs & NEIGHBOUR_UID) && (s->flags & FANIN_SERVER_TRUST_CONTAINERS))
        differs = 0;
    *differs_out = differs;
    if (is_unix && (differs & NEIGHBOUR_UID))
        status = error_set(error, FANIN_ERR_AUTH, NULL,
                           "this socket is for the server's own user; use TCP");
    else if (!is_unix && (s->flags & FANIN_SERVER_OPEN) &&
             !networks_contain(s->allow, s->n_allow, peer))
        status = error_set(error, FANIN_ERR_AUTH, NULL,
                           "the address is in no network that the server allows");
    pthread_mutex_lock(&s->lock);
    if (status == FANIN_OK)
        status = count_in(s, peer, !(differs & NEIGHBOUR_STRANGER), counted_out, error);
    if (status != FANIN_OK)
        s->stats.sessions_refused++;
    pthread_mutex_unlock(&s->lock);
    return status;
}

void dismiss(fanin_server *s, peer_count *counted)
{
    pthread_mutex_lock(&s->lock);
    s->stats.sessions--;
    if (counted) {
        counted->connections--;
        forget_if_unused(s, counted);
    }
    pthread_mutex_unlock(&s->lock);
}

bool memory_account(fanin_server *s, size_t *counted, size_t now)
{
    /* Wraps when it shrinks, and so does the sum. */
    uint64_t before = *counted, more = (uint64_t)now - before;
    uint64_t total = atomic_fetch_add(&s->memory, more) + more;
    *counted = now;
    return now <= before || total <= s->max_memory;
}

bool memory_fits(const fanin_server *s, size_t more)
{
    uint64_t used = atomic_load(&s->memory);
    return used <= s->max_memory && more <= s->max_memory - used;
}
