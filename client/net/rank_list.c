/* SPDX-License-Identifier: Apache-2.0 */
#include "net/rank_list.h"

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
static bool append(char *text, size_t size, bool first, const char *item)
{
    size_t used = strlen(text), more = strlen(item) + 2;
    if (used + more + ROOM_FOR_REST >= size)
        return false;
    snprintf(text + used, size - used, "%s%s", first ? "" : ", ", item);
    return true;
}

/* @p ranks sorted; the number of them that found room. */
static size_t write_ranks(const uint32_t *ranks, size_t n, char *text, size_t size)
{
    size_t written = 0;
    while (written < n) {
        size_t end = written + 1;
        char item[32];
        while (end < n && ranks[end] <= ranks[end - 1] + 1)
            end++;
        if (ranks[end - 1] > ranks[written])
            snprintf(item, sizeof(item), "%u-%u", ranks[written], ranks[end - 1]);
        else
            snprintf(item, sizeof(item), "%u", ranks[written]);
        if (!append(text, size, written == 0, item))
            break;
        written = end;
    }
    return written;
}

static size_t write_addresses(const fanin_client *client, const bool *mask,
                              bool nothing_before, char *text, size_t size)
{
    size_t written = 0;
    for (size_t i = 0; i < client->n_peers; i++) {
        const connection *c = client->peers[i].control;
        if (!mask[i] || connection_known(c))
            continue;
        if (!append(text, size, nothing_before && written == 0, connection_text(c)))
            break;
        written++;
    }
    return written;
}

void rank_list_text(const fanin_client *client, const bool *mask, char *text,
                    size_t size)
{
    size_t n = 0, all = 0;
    const connection *last = NULL;
    uint32_t *ranks = calloc(client->n_peers + 1, sizeof(*ranks));
    for (size_t i = 0; i < client->n_peers; i++) {
        const connection *c = client->peers[i].control;
        if (!mask[i])
            continue;
        all++;
        last = c;
        if (ranks && connection_known(c))
            ranks[n++] = connection_peer(c)->rank;
    }
    text[0] = '\0';
    if (all == 1 || !ranks) {
        char who[CONNECTION_NAME];
        snprintf(text, size, "%s", last ? connection_name(last, who) : "");
        free(ranks);
        return;
    }
    if (n > 0) {
        qsort(ranks, n, sizeof(*ranks), compare);
        snprintf(text, size, "rank%s ", n == 1 ? "" : "s");
    }
    size_t written = write_ranks(ranks, n, text, size);
    if (written == n)
        written += write_addresses(client, mask, n == 0, text, size);
    free(ranks);
    size_t used = strlen(text);
    if (written < all)
        snprintf(text + used, size - used, " and %zu more", all - written);
}
