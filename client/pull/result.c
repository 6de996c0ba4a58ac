/* SPDX-License-Identifier: Apache-2.0 */
#include "pull/result.h"

#include "adapter/adapter.h"
#include "error_set.h"
#include "versioned.h"
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

fanin_result *result_create(size_t n_peers)
{
    fanin_result *r = calloc(1, sizeof *r);
    if (!r)
        return NULL;
    r->served = calloc(n_peers, sizeof *r->served);
    r->n_peers = n_peers;
    if (!r->served)
        fanin_result_free(&r);
    return r;
}

void fanin_result_free(fanin_result **result)
{
    if (!result || !*result)
        return;
    free((*result)->ranks_json);
    free((*result)->served);
    free(*result);
    *result = NULL;
}

void fanin_result_get(const fanin_result *result, fanin_result_info *info)
{
    static const fanin_result_info nothing;
    versioned_write(info, result ? &result->info : &nothing, sizeof nothing);
}

/* How the bytes of one rank were guarded. */
static fanin_checksums guard_of(const peer *p, const path_reader *path)
{
    return path && path->guard ? path->guard(p->control) : FANIN_CHECKSUMS_LOCAL;
}

fanin_checksums result_guard(const fanin_result *r, const fanin_client *client,
                             const publication *p)
{
    bool any = false, all = true;
    for (size_t i = 0; i < r->n_peers; i++) {
        if (!r->served[i].used)
            continue;
        fanin_checksums guard = guard_of(&client->peers[i], path_taken(p, i)->path);
        any = any || guard == FANIN_CHECKSUMS_ALL;
        all = all && guard != FANIN_CHECKSUMS_NONE;
    }
    if (!all)
        return FANIN_CHECKSUMS_NONE;
    return any ? FANIN_CHECKSUMS_ALL : FANIN_CHECKSUMS_LOCAL;
}

static json_t *describe(const peer *p, const path_state *taken, const served *s)
{
    return json_pack(
        "{s:i,s:s,s:s,s:s,s:I,s:I,s:I,s:i,s:o}", "rank",
        connection_known(p->control) ? (int)connection_peer(p->control)->rank : -1,
        "address", connection_text(p->control), "path",
        s->used ? taken->path->name : "none", "reason", taken->reason, "bytes",
        (json_int_t)s->bytes, "reads", (json_int_t)s->reads, "read_ns",
        (json_int_t)s->read_ns, "connections", (int)s->connections, "checksums",
        guard_json(s->used ? guard_of(p, taken->path) : FANIN_CHECKSUMS_NONE));
}

fanin_status result_finish(fanin_result *r, const fanin_client *client,
                           const publication *p, fanin_error *error)
{
    json_t *list = json_array();
    uint64_t most = 0;
    r->info.reads = 0;
    for (size_t i = 0; list && i < r->n_peers; i++) {
        const served *s = &r->served[i];
        const path_state *taken = path_taken(p, i);
        r->info.reads += s->reads;
        if (s->used && s->bytes >= most) {
            most = s->bytes;
            r->info.path = taken->path->number;
            snprintf(r->reason, sizeof r->reason, "%s", taken->reason);
        }
        if (json_array_append_new(list, describe(&client->peers[i], taken, s)) != 0) {
            json_decref(list);
            list = NULL;
        }
    }
    free(r->ranks_json);
    r->ranks_json = list ? json_dumps(list, JSON_COMPACT) : NULL;
    json_decref(list);
    if (!r->ranks_json)
        return error_set_memory(error);
    r->info.ranks_json = r->ranks_json;
    r->info.path_reason = r->reason;
    return FANIN_OK;
}
