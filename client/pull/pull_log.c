/* SPDX-License-Identifier: Apache-2.0 */
#include "pull/pull_log.h"

#include "text.h"
#include <inttypes.h>
#include <stdlib.h>

#define LINES_A_SECOND 10
#define SECOND UINT64_C(1000000000)

void pull_log_part(const pull *p, trace_name name, fanin_status status, uint64_t ns)
{
    const fanin_client *client = p->client;
    if (!log_wants(&client->log, FANIN_LOG_DEBUG))
        return;
    log_write(&client->log, FANIN_LOG_DEBUG, "phase",
              "trace %s/%u attempt %u: %s %.3f ms%s%s", client->shared.trace_id,
              client->place.pull, client->place.attempt, trace_name_text(name),
              (double)ns / 1e6, status == FANIN_OK ? "" : ", ",
              status == FANIN_OK ? "" : fanin_status_name(status));
}

static bool may_tell(fanin_client *client, uint64_t now, unsigned *left_out)
{
    if (now - client->pulls_told.since_ns >= SECOND) {
        client->pulls_told.since_ns = now;
        client->pulls_told.told = 0;
    }
    if (client->pulls_told.told == LINES_A_SECOND) {
        client->pulls_told.left_out++;
        return false;
    }
    client->pulls_told.told++;
    *left_out = client->pulls_told.left_out;
    client->pulls_told.left_out = 0;
    return true;
}

static void add_phases(text *line, const fanin_result_info *info)
{
    const struct {
        const char *name;
        uint64_t ns;
    } phases[] = {{"connect", info->connect_ns}, {"wait", info->wait_ns},
                  {"catalog", info->catalog_ns}, {"plan", info->plan_ns},
                  {"begin", info->begin_ns},     {"read", info->read_ns},
                  {"scatter", info->scatter_ns}, {"verify", info->verify_ns},
                  {"end", info->end_ns},         {"write", info->write_ns}};
    for (size_t i = 0; i < sizeof phases / sizeof *phases; i++)
        text_add(line, "%s%s %.2f", i ? ", " : "", phases[i].name,
                 (double)phases[i].ns / 1e6);
}

/* Those that it read, or wanted to. */
static void add_ranks(text *line, const pull *p)
{
    char ranks[200];
    bool any = false;
    for (size_t i = 0; i < p->client->n_peers; i++)
        any = any || p->needed[i];
    if (any)
        rank_list_text(p->client, p->needed, ranks, sizeof ranks);
    text_add(line, " of %s,", any ? ranks : "no rank");
}

void pull_log_whole(pull *p, fanin_status status, const fanin_error *error)
{
    fanin_client *client = p->client;
    unsigned left_out = 0;
    uint64_t now = clock_ns();
    if (!log_wants(&client->log, FANIN_LOG_INFO) || !p->result || !p->needed ||
        !may_tell(client, now, &left_out))
        return;
    const fanin_result_info *info = &p->result->info;
    char chars[900];
    text line = text_in(chars, sizeof chars);
    text_add(&line, "trace %s/%u: %s step %" PRIu64, client->shared.trace_id,
             client->place.pull, p->options->publication, p->identity.step);
    add_ranks(&line, p);
    text_add(&line, " %" PRIu64 " tensors, %" PRIu64 " bytes", p->tensors, p->bytes);
    if (status == FANIN_OK && info->reused)
        text_add(&line, ", which were there");
    else if (status == FANIN_OK)
        text_add(&line, " by %s", fanin_path_name(info->path));
    text_add(&line, ", %.2f ms (", (double)(now - p->started_ns) / 1e6);
    add_phases(&line, info);
    text_add(&line, "), %u restarts, %u stale", info->restarts, info->stale);
    if (left_out > 0)
        text_add(&line, "; %u pulls before it were not told", left_out);
    if (status != FANIN_OK)
        text_add(&line, "; %s: %s", fanin_status_name(status),
                 error ? error->message : fanin_status_text(status));
    log_write(&client->log, FANIN_LOG_INFO, "pull", "%s", chars);
}
