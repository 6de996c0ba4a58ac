/* SPDX-License-Identifier: Apache-2.0 */
#include "pull/kept.h"

#include "path/path.h"
#include "pull/choose_path.h"
#include "pull/plan_cache.h"

/* An adapter's are a megabyte or so, over eight ranks. */
#define KEPT_MOST 64

static void drop(fanin_client *client, publication **at)
{
    plan_cache_free(*at);
    path_states_free(client, *at);
    tables_free(at);
}

publication *kept_of(fanin_client *client, const char *name)
{
    publication *p = tables_of(client, name), **at = &client->publications;
    for (unsigned i = 0; i < KEPT_MOST && *at; i++)
        at = &(*at)->next;
    while (*at) {
        path_unmap(client, *at);
        drop(client, at);
    }
    return p;
}

void kept_free(fanin_client *client)
{
    while (client->publications)
        drop(client, &client->publications);
    path_states_close(client);
}
