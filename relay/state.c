/* SPDX-License-Identifier: Apache-2.0 */
/* What a relay has from pull to pull: the ranks that it reads, clients of others, numbers. */
#include "inside.h"

#include "array.h"
#include "error_set.h"
#include "versioned.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* ------------------------------------------------------------------------------- ranks */

typedef struct ranked {
    uint32_t rank;
    const connection *at;
} ranked;

static int compare_ranked(const void *a, const void *b)
{
    uint32_t x = ((const ranked *)a)->rank, y = ((const ranked *)b)->rank;
    return (x > y) - (x < y);
}

/* In the order of ranks those that are there. Their number; 0 also: no memory. */
static size_t list_ranks(const fanin_relay *r, list_rank **out)
{
    size_t n = 0;
    ranked *ranks = calloc(r->n_addresses, sizeof *ranks);
    list_rank *all = *out = calloc(r->n_addresses, sizeof *all);
    for (size_t i = 0; ranks && all && i < r->origin->n_peers; i++) {
        const connection *c = r->origin->peers[i].control;
        if (c->known)
            ranks[n++] = (ranked){c->peer.rank, c};
    }
    if (n > 0)
        qsort(ranks, n, sizeof *ranks, compare_ranked);
    for (size_t i = 0; i < n; i++) {
        snprintf(all[i].address, sizeof all[i].address, "%s", ranks[i].at->text);
        memcpy(all[i].incarnation, ranks[i].at->peer.incarnation,
               sizeof all[i].incarnation);
    }
    if (!ranks) {
        free(all);
        *out = NULL;
    }
    free(ranks);
    return n;
}

static bool is_known(const fanin_relay *r, const uint8_t incarnation[16])
{
    for (size_t i = 0; i < r->n_ranks; i++) {
        if (memcmp(r->ranks[i].incarnation, incarnation,
                   sizeof r->ranks[i].incarnation) == 0)
            return true;
    }
    return false;
}

bool relay_has_same_ranks(const fanin_relay *r)
{
    for (size_t i = 0; i < r->origin->n_peers; i++) {
        const peer *p = &r->origin->peers[i];
        if (peer_ready(p) && !is_known(r, p->control->peer.incarnation))
            return false;
    }
    return true;
}

fanin_status relay_take_ranks(fanin_relay *r, bool *same_out, fanin_error *error)
{
    list_rank *now;
    size_t n = list_ranks(r, &now);
    *same_out = true;
    for (size_t i = 0; i < n; i++)
        *same_out = *same_out && is_known(r, now[i].incarnation);
    free(r->ranks);
    r->ranks = now;
    r->n_ranks = n;
    if (n > 0)
        return FANIN_OK;
    return now ? error_set(error, FANIN_ERR_CLOSED, NULL, "all ranks are gone")
               : error_set_memory(error);
}

/* -------------------------------------------------------------------- idle clients */

#define IDLE_MOST 128

static fanin_client *take_idle(fanin_relay *r, size_t at)
{
    fanin_client *client = r->idle[at].client;
    memmove(&r->idle[at], &r->idle[at + 1], (--r->n_idle - at) * sizeof *r->idle);
    return client;
}

fanin_client *relay_take_client(fanin_relay *r, const member *who)
{
    for (size_t i = 0; i < r->n_idle; i++) {
        if (member_compare(&r->idle[i].who, who) == 0)
            return take_idle(r, i);
    }
    return NULL;
}

void relay_keep_client(fanin_relay *r, const member *who, fanin_client *client)
{
    if (r->n_idle == IDLE_MOST) {
        fanin_client *oldest = take_idle(r, 0);
        fanin_client_destroy(&oldest);
    }
    if (array_reserve(&r->idle, &r->idle_capacity, r->n_idle + 1, sizeof *r->idle))
        r->idle[r->n_idle++] = (idle_client){.who = *who, .client = client};
    else
        fanin_client_destroy(&client);
}

void relay_forget_clients(fanin_relay *r, const holder *all, size_t n)
{
    for (size_t i = r->n_idle; i-- > 0;) {
        size_t at = 0;
        while (at < n && member_compare(&all[at].who, &r->idle[i].who) != 0)
            at++;
        if (at < n)
            continue;
        fanin_client *gone = take_idle(r, i);
        fanin_client_destroy(&gone);
    }
}

/* ----------------------------------------------------------------------------- numbers */

uint64_t relay_handed_on(fanin_server *server)
{
    fanin_server_stats s = {.struct_size = sizeof s};
    if (!server || fanin_server_get_stats(server, &s) != FANIN_OK)
        return 0;
    return s.bytes_streamed + s.bytes_cma + s.bytes_rdma + s.bytes_cuda_ipc;
}

void fanin_relay_get_stats(fanin_relay *relay, fanin_relay_stats *stats)
{
    fanin_relay_stats s = {0};
    if (relay && relay->pid == getpid()) {
        pthread_mutex_lock(&relay->lock);
        s = relay->stats;
        s.bytes_handed_on = relay->handed_on + relay_handed_on(relay->server);
        pthread_mutex_unlock(&relay->lock);
        s.forbidden = list_is_refused(relay->list);
    }
    versioned_write(stats, &s, sizeof s);
}

msg_offer relay_numbers(fanin_relay *r)
{
    fanin_relay_stats s = {.struct_size = sizeof s};
    fanin_relay_get_stats(r, &s);
    return (msg_offer){.units = s.units,
                       .landed = s.landed,
                       .bytes_origin = s.bytes_from_origin,
                       .bytes_relays = s.bytes_from_relays,
                       .bytes_handed_on = s.bytes_handed_on,
                       .late = s.late,
                       .taken_over = s.taken_over};
}

void relay_tell(fanin_relay *r)
{
    msg_offer numbers = relay_numbers(r);
    list_tell(r->list, &numbers);
}
