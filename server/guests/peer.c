/* SPDX-License-Identifier: Apache-2.0 */
#include "guests/peer.h"
#include "array.h"

#include <arpa/inet.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define NETWORK_BYTES 8 /* of an IPv6 address: its /64 */

static void make_key(const socket_address *a, bool is_own, uint8_t key[17])
{
    int family;
    const uint8_t *bytes;
    memset(key, 0, 17);
    key[0] = is_own ? AF_UNIX : AF_INET;
    if (is_own)
        return;
    if (!socket_ip_bytes(a, &family, &bytes) || socket_is_loopback(a)) {
        key[1] = 127;
    } else if (family == AF_INET) {
        memcpy(key + 1, bytes, 4);
    } else {
        key[0] = AF_INET6;
        memcpy(key + 1, bytes, NETWORK_BYTES);
    }
}

static void make_name(peer_share *p)
{
    char text[INET6_ADDRSTRLEN] = "";
    if (p->is_own)
        snprintf(p->name, sizeof p->name, "this user");
    else if (p->key[0] == AF_INET && p->key[1] == 127)
        snprintf(p->name, sizeof p->name, "this host");
    else if (inet_ntop(p->key[0], p->key + 1, text, sizeof text))
        snprintf(p->name, sizeof p->name, "%s%s", text,
                 p->key[0] == AF_INET6 ? "/64" : "");
}

static int compare(const void *key, const void *element)
{
    const peer_share *p = *(peer_share *const *)element;
    return memcmp(key, p->key, sizeof p->key);
}

static void forget(fanin_server *s, size_t at)
{
    s->unsaid_forgotten += atomic_load(&s->peers[at]->unsaid);
    free(s->peers[at]);
    s->n_peers--;
    memmove(&s->peers[at], &s->peers[at + 1], (s->n_peers - at) * sizeof *s->peers);
}

/* What is to be remembered of it for longest. */
static uint64_t remembered_until(const peer_share *p)
{
    uint64_t work = atomic_load(&p->work.full_at);
    uint64_t lines = atomic_load(&p->lines[true].full_at);
    return work > lines ? work : lines;
}

/* If there are too many, the one that has no connection, is of no session that is told why it is
   refused, and has least to be remembered makes room. */
static void make_room(fanin_server *s)
{
    size_t found = s->n_peers;
    uint64_t least = UINT64_MAX;
    if (s->n_peers < PEERS_KEPT)
        return;
    for (size_t i = 0; i < s->n_peers; i++)
        if (s->peers[i]->connections == 0 && s->peers[i]->held == 0 &&
            remembered_until(s->peers[i]) < least) {
            least = remembered_until(s->peers[i]);
            found = i;
        }
    if (found < s->n_peers)
        forget(s, found);
}

static peer_share *add(fanin_server *s, const uint8_t key[17])
{
    bool found;
    make_room(s);
    peer_share *p = calloc(1, sizeof *p);
    if (!p || !array_reserve(&s->peers, &s->peers_capacity, s->n_peers + 1,
                             sizeof *s->peers)) {
        free(p);
        return NULL;
    }
    memcpy(p->key, key, sizeof p->key);
    p->is_own = key[0] == AF_UNIX;
    make_name(p);
    size_t at =
        array_search(key, s->peers, s->n_peers, sizeof *s->peers, compare, &found);
    memmove(&s->peers[at + 1], &s->peers[at], (s->n_peers - at) * sizeof *s->peers);
    s->peers[at] = p;
    s->n_peers++;
    return p;
}

peer_share *peer_share_of(fanin_server *s, const socket_address *a, bool is_own)
{
    uint8_t key[17];
    make_key(a, is_own, key);
    peer_share *const *found =
        array_find(key, s->peers, s->n_peers, sizeof *s->peers, compare);
    return found ? *found : add(s, key);
}

void peers_free(fanin_server *s)
{
    while (s->n_peers > 0)
        forget(s, s->n_peers - 1);
    free(s->peers);
    s->peers = NULL;
    s->peers_capacity = 0;
}
