/* SPDX-License-Identifier: Apache-2.0 */
#include "net/client_state.h"

#include "text.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Kept free for " and 65536 more". */
#define ROOM_FOR_REST 24

static int compare(const void *a, const void *b)
{
    uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;
    return (x > y) - (x < y);
}

/* Appends @p item after a comma; false: there is no room for it. */
static bool append(text *t, bool first, const char *item)
{
    return text_add_whole(t, ROOM_FOR_REST, "%s%s", first ? "" : ", ", item);
}

/* @p ranks sorted; the number of them that found room. */
static size_t write_ranks(const uint32_t *ranks, size_t n, text *t)
{
    size_t written = 0;
    while (written < n) {
        size_t end = written + 1;
        char item[32];
        while (end < n && ranks[end] <= ranks[end - 1] + 1)
            end++;
        if (ranks[end - 1] > ranks[written])
            snprintf(item, sizeof item, "%u-%u", ranks[written], ranks[end - 1]);
        else
            snprintf(item, sizeof item, "%u", ranks[written]);
        if (!append(t, written == 0, item))
            break;
        written = end;
    }
    return written;
}

static size_t write_addresses(const fanin_client *client, const bool *mask,
                              bool nothing_before, text *t)
{
    size_t written = 0;
    for (size_t i = 0; i < client->n_peers; i++) {
        const connection *c = client->peers[i].control;
        if (!mask[i] || connection_known(c))
            continue;
        if (!append(t, nothing_before && written == 0, connection_text(c)))
            break;
        written++;
    }
    return written;
}

void rank_list_text(const fanin_client *client, const bool *mask, char *out,
                    size_t size)
{
    size_t n = 0, all = 0;
    const connection *last = NULL;
    uint32_t *ranks = calloc(client->n_peers + 1, sizeof *ranks);
    for (size_t i = 0; i < client->n_peers; i++) {
        const connection *c = client->peers[i].control;
        if (!mask[i])
            continue;
        all++;
        last = c;
        if (ranks && connection_known(c))
            ranks[n++] = connection_peer(c)->rank;
    }
    text t = text_in(out, size);
    if (all == 1 || !ranks) {
        char who[CONNECTION_NAME];
        text_add(&t, "%s", last ? connection_name(last, who) : "");
        free(ranks);
        return;
    }
    if (n > 0) {
        qsort(ranks, n, sizeof *ranks, compare);
        text_add(&t, "rank%s ", n == 1 ? "" : "s");
    }
    size_t written = write_ranks(ranks, n, &t);
    if (written == n)
        written += write_addresses(client, mask, n == 0, &t);
    free(ranks);
    if (written < all)
        text_add(&t, " and %zu more", all - written);
}
