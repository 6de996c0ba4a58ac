/* SPDX-License-Identifier: Apache-2.0 */
/* The data connections that a client keeps to its ranks. */
#include "stream/stream_link.h"

#include "error_set.h"
#include <stdlib.h>

/* Of one peer. */
struct stream_end {
    stream_link *link;
    uint64_t generation; /* of the connection that it was made for */
};

/* NULL: there are none, or none that are of use. */
static stream_link *find_link(const fanin_client *client, size_t peer)
{
    const struct stream_end *end = client->streams ? &client->streams[peer] : NULL;
    bool is_current = end && end->generation == client->peers[peer].generation;
    /* They may have been closed while they rested. */
    return is_current && end->link && stream_link_is_whole(end->link) ? end->link
                                                                      : NULL;
}

bool stream_at_hand(const fanin_client *client, size_t peer)
{
    const stream_link *link = find_link(client, peer);
    return link && stream_link_is_made(link);
}

fanin_status stream_open(fanin_client *client, size_t peer, unsigned count,
                         stream_link **out, fanin_error *error)
{
    const struct peer *p = &client->peers[peer];
    fanin_status status = FANIN_OK;
    *out = find_link(client, peer);
    if (!client->streams)
        client->streams = calloc(client->n_peers, sizeof *client->streams);
    if (!client->streams)
        return error_set_memory(error);
    struct stream_end *end = &client->streams[peer];
    end->generation = p->generation;
    if (!*out)
        stream_link_destroy(&end->link);
    if (!end->link)
        status = stream_link_create(client, p->control, 1, &end->link, error);
    fanin_error why = FANIN_ERROR_INIT;
    *out = end->link;
    if (status != FANIN_OK || stream_link_widen(end->link, count, &why) == FANIN_OK ||
        client->config.streams_per_rank == 0)
        return status; /* more are faster; one does */
    return error_copy(error, &why);
}

void stream_end_work(fanin_client *client, size_t peer)
{
    stream_link **link = &client->streams[peer].link;
    if (*link && !stream_link_stop(*link))
        stream_link_destroy(link);
}

void stream_disconnect(fanin_client *client)
{
    for (size_t i = 0; client->streams && i < client->n_peers; i++)
        stream_link_destroy(&client->streams[i].link);
    free(client->streams);
    client->streams = NULL;
}
