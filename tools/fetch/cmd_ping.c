/* SPDX-License-Identifier: Apache-2.0 */
#include "fetch/command.h"
#include "fetch/failure.h"
#include "fetch/missing.h"
#include "fetch/output.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct report {
    struct libscols_table *table; /**< NULL with --json */
    json_t *ranks;
    const session *session;
    FILE *notes;     /**< lines below the table */
    char facts[200]; /**< the last of what ranks say of themselves */
    uint32_t asked;
} report;

static void add_json(report *r, const fanin_rank_info *info, int32_t rank,
                     uint64_t rtt_ns)
{
    json_t *o = output_object("rank", output_rank(rank), "address",
                              output_string(info->address), "status",
                              output_string(fanin_status_name(info->status)), "message",
                              output_string(info->message), NULL);
    if (info->status == FANIN_OK)
        output_set(
            o, "rtt_ns", output_u64(rtt_ns), "world_size", output_u64(info->world_size),
            "server_name", output_string(info->server_name), "world_id",
            output_digits(info->world_id), "incarnation",
            output_digits(info->incarnation), "software", output_string(info->software),
            "ucx_version", output_string(info->ucx_version), NULL);
    json_array_append_new(r->ranks, o);
}

static void ping_add_row(report *r, const fanin_rank_info *info, int32_t rank,
                         uint64_t rtt_ns)
{
    bool good = info->status == FANIN_OK;
    output_row(r->table, NULL, rank >= 0 ? output_number((uint64_t)rank).s : "-",
               info->address, good ? output_duration(rtt_ns).s : "-",
               good ? info->server_name : "-",
               good           ? "ok"
               : info->silent ? "no answer in time"
                              : fanin_status_text(info->status));
}

/* Below the table: why a rank does not answer; what the others say of themselves, each time that
   it is something else than before. */
static void add_note(report *r, const fanin_rank_info *info, int32_t rank)
{
    char facts[sizeof r->facts];
    bool ucx = info->ucx_version != NULL && info->ucx_version[0] != '\0';
    if (info->status != FANIN_OK) {
        terminal_write(r->notes, "%s: %s", info->address, missing_why(info));
        return;
    }
    snprintf(facts, sizeof facts, "world %.32s of %u ranks, %.63s, UCX %.31s",
             output_hex(info->world_id).s, info->world_size, info->software,
             ucx ? info->ucx_version : "none");
    if (r->facts[0] == '\0')
        terminal_write(r->notes, "%s", facts);
    else if (strcmp(facts, r->facts) != 0)
        terminal_write(r->notes, "from rank %d on: %s", (int)rank, facts);
    memcpy(r->facts, facts, sizeof r->facts);
}

static bool ping_on_rank(void *cookie, const fanin_rank_info *info, uint64_t rtt_ns)
{
    report *r = cookie;
    int32_t rank = missing_number(r->session, info, r->asked++);
    if (r->table != NULL) {
        ping_add_row(r, info, rank, rtt_ns);
        add_note(r, info, rank);
    } else {
        add_json(r, info, rank, rtt_ns);
    }
    return true;
}

/* @p notes: what was written below the table. @p error: what is wrong with ranks that answer, if @p
   status says so. */
static int ping_finish(const report *r, const char *notes, fanin_status status,
                       fanin_error *error)
{
    missing m;
    missing_gather(r->session, &m);
    bool apart = status != FANIN_OK && m.count < m.asked;
    if (r->table != NULL) {
        output_print(r->table);
        fputs(notes, stdout);
    } else {
        output_json(output_object("healthy", json_boolean(m.count == 0 && !apart),
                                  "answered", output_u64(m.asked - m.count),
                                  "addresses", output_u64(m.asked), "ranks", r->ranks,
                                  NULL));
    }
    int code = missing_report(&m);
    if (apart) {
        output_use_json(false); /* the data are told */
        code = session_failure(r->session, "not one world", error);
    }
    missing_free(&m);
    return code;
}

static int ping(session *s, const invocation *line, void *cookie)
{
    (void)cookie;
    fanin_error error = FANIN_ERROR_INIT;
    char *notes = NULL, what[96];
    size_t size = 0;
    report r = {.session = s, .notes = output_require(open_memstream(&notes, &size))};
    if (line->common.json)
        r.ranks = json_array();
    else
        r.table = output_table("RANK> ADDRESS RTT> NAME STATUS");
    fanin_status status = session_try(s, &error);
    if (status == FANIN_OK)
        status =
            fanin_client_ping(s->client, session_left_ms(s), ping_on_rank, &r, &error);
    fclose(r.notes);
    int code;
    if (status == FANIN_OK || r.asked > 0) {
        code = ping_finish(&r, notes, status, &error);
    } else {
        bool nobody = status == FANIN_ERR_UNREACHABLE;
        snprintf(what, sizeof what, "0 of %u ranks answered", s->target.count);
        code = session_failure(s, nobody ? what : "no ping", &error);
        scols_unref_table(r.table);
        json_decref(r.ranks);
    }
    free(notes);
    return code;
}

static int run(const command *self, int argc, const char **argv)
{
    invocation line = {.common.timeout_ms = 5000};
    struct poptOption table[] = {SESSION_TABLE(&line), POPT_TABLEEND};
    return session_run(self, argc, argv, &line, table, 0, ping, NULL);
}

static const char help[] =
    "Examples:\n"
    "  nixl-fetch ping 127.0.0.1:6000 --world-size 8\n"
    "  nixl-fetch ping nixl_info.json --timeout 500ms --json\n"
    "\n"
    "Exit status 0: all ranks answered, and they are of one world. The address of\n"
    "one rank, without --world-size, asks that rank alone.";

const command cmd_ping = {
    .name = "ping",
    .arguments = "TARGET [OPTION...]",
    .summary = "ask every rank whether it lives",
    .help = help,
    .of_some = true,
    .run = run,
};
