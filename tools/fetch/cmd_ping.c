/* SPDX-License-Identifier: Apache-2.0 */
#include "fetch/command.h"
#include "fetch/failure.h"
#include "fetch/missing.h"
#include "fetch/output.h"
#include "fetch/terminal.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

typedef struct report {
    struct libscols_table *table; /**< NULL with --json */
    json_t *ranks;
    const session *session;
    json_t *notes;   /**< lines below the table */
    char facts[200]; /**< the last of what ranks say of themselves */
    uint32_t answered, asked;
    fanin_error first; /**< of the first rank that did not answer */
} report;

static void add_json(report *r, const fanin_rank_info *info, int32_t rank,
                     uint64_t rtt_ns)
{
    json_t *o = json_object();
    json_object_set_new(o, "rank", rank >= 0 ? json_integer(rank) : json_null());
    output_set_string(o, "address", info->address);
    output_set_string(o, "status", fanin_status_name(info->status));
    output_set_string(o, "message", info->message);
    if (info->status == FANIN_OK) {
        output_set_u64(o, "rtt_ns", rtt_ns);
        output_set_u64(o, "world_size", info->world_size);
        output_set_string(o, "server_name", info->server_name);
        output_set_hex(o, "world_id", info->world_id, sizeof(info->world_id));
        output_set_hex(o, "incarnation", info->incarnation, sizeof(info->incarnation));
        output_set_string(o, "software", info->software);
        output_set_string(o, "ucx_version", info->ucx_version);
    }
    json_array_append_new(r->ranks, o);
}

static void note(report *r, const char *format, ...)
    __attribute__((format(printf, 2, 3)));

static void note(report *r, const char *format, ...)
{
    char text[1024];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof(text), format, arguments);
    va_end(arguments);
    json_array_append_new(r->notes, output_string(text));
}

static void add_row(report *r, const fanin_rank_info *info, int32_t number,
                    uint64_t rtt_ns)
{
    bool good = info->status == FANIN_OK;
    output_text rank = {"-"};
    if (number >= 0) {
        rank = output_number((uint64_t)number);
    }
    output_text rtt = output_duration(rtt_ns);
    const char *cells[] = {rank.s, info->address, good ? rtt.s : "-",
                           good ? info->server_name : "-",
                           good ? "ok" : fanin_status_text(info->status)};
    output_row(r->table, NULL, cells, sizeof(cells) / sizeof(cells[0]));
}

/* Below the table: why a rank does not answer; what the others say of themselves, each time that
   it is something else than before. */
static void add_note(report *r, const fanin_rank_info *info, int32_t rank)
{
    char facts[sizeof(r->facts)];
    bool ucx = info->ucx_version != NULL && info->ucx_version[0] != '\0';
    if (info->status != FANIN_OK) {
        note(r, "%s: %s", info->address,
             info->message[0] != '\0' ? info->message
                                      : fanin_status_text(info->status));
        return;
    }
    snprintf(facts, sizeof(facts), "world %.32s of %u ranks, %.63s, UCX %.31s",
             output_hex(info->world_id, 16).s, info->world_size, info->software,
             ucx ? info->ucx_version : "none");
    if (r->facts[0] == '\0') {
        note(r, "%s", facts);
    } else if (strcmp(facts, r->facts) != 0) {
        note(r, "from rank %d on: %s", (int)rank, facts);
    }
    memcpy(r->facts, facts, sizeof(r->facts));
}

static bool on_rank(void *cookie, const fanin_rank_info *info, uint64_t rtt_ns)
{
    report *r = cookie;
    bool placed = info->rank < 0 && r->session->target.in_rank_order;
    int32_t rank = placed ? (int32_t)r->asked : info->rank;
    r->asked++;
    if (info->status == FANIN_OK) {
        r->answered++;
    } else if (r->first.status == FANIN_OK) {
        failure_set(&r->first, info->status, missing_remedy(info->silent), "%s",
                    info->message[0] != '\0' ? info->message
                                             : fanin_status_text(info->status));
        r->first.rank = rank;
        snprintf(r->first.address, sizeof(r->first.address), "%s", info->address);
    }
    if (r->table != NULL) {
        add_row(r, info, rank, rtt_ns);
        add_note(r, info, rank);
    } else {
        add_json(r, info, rank, rtt_ns);
    }
    return true;
}

static int finish(report *r, const session *s)
{
    char what[96];
    bool good = r->answered == s->target.count;
    if (r->table != NULL) {
        output_print(r->table);
        for (size_t i = 0; i < json_array_size(r->notes); i++) {
            terminal_print("%s", json_string_value(json_array_get(r->notes, i)));
        }
    } else {
        output_json(json_pack("{s:b, s:i, s:i, s:O}", "healthy", good ? 1 : 0,
                              "answered", (int)r->answered, "addresses",
                              (int)s->target.count, "ranks", r->ranks));
    }
    if (good) {
        return 0;
    }
    if (r->first.status == FANIN_OK) {
        failure_set(&r->first, FANIN_ERR_UNREACHABLE, "start the missing ranks",
                    "nobody answers");
    }
    snprintf(what, sizeof(what), "%u of %u ranks answered", r->answered,
             s->target.count);
    failure_use_json(false); /* the object above tells it all */
    return failure_report(what, &r->first);
}

static int ping(session *s, const common_options *common)
{
    static const output_column columns[] = {
        {"RANK", true, false},  {"ADDRESS", false, false}, {"RTT", true, false},
        {"NAME", false, false}, {"STATUS", false, false},
    };
    fanin_error error = FANIN_ERROR_INIT;
    report r = {.session = s,
                .ranks = json_array(),
                .notes = json_array(),
                .first = FANIN_ERROR_INIT};
    if (!common->json) {
        r.table = output_table(columns, sizeof(columns) / sizeof(columns[0]));
    }
    fanin_status status =
        fanin_client_connect_any(s->client, (const char *const *)s->target.addresses,
                                 s->target.count, session_left_ms(s), &error);
    if (status == FANIN_OK) {
        status = fanin_client_ping(s->client, session_left_ms(s), on_rank, &r, &error);
    }
    int code;
    char what[96];
    if (status == FANIN_OK || r.asked > 0) {
        code = finish(&r, s);
    } else {
        scols_unref_table(r.table);
        bool nobody = status == FANIN_ERR_UNREACHABLE;
        snprintf(what, sizeof(what), "0 of %u ranks answered", s->target.count);
        code = session_failure(s, nobody ? what : "no ping", &error);
    }
    json_decref(r.ranks);
    json_decref(r.notes);
    return code;
}

static int run(const command *self, int argc, const char **argv)
{
    invocation line = {.common.timeout_ms = 5000};
    struct poptOption table[] = {SESSION_TABLE(&line), POPT_TABLEEND};
    session s = {0};
    int code;
    const char *where = session_begin(self, &line, argc, argv, table, 0, &code);
    if (where != NULL) {
        code = session_open(&s, self, &line, where, line.run);
        if (code == 0) {
            code = ping(&s, &line.common);
        }
        session_close(&s);
    }
    session_end(&line);
    return code;
}

const command cmd_ping = {
    .name = "ping",
    .arguments = "TARGET [OPTION...]",
    .summary = "ask every rank whether it lives",
    .help =
        "Examples:\n"
        "  nixl-fetch ping 127.0.0.1:6000 --world-size 8\n"
        "  nixl-fetch ping nixl_info.json --timeout 500ms --json\n"
        "\n"
        "Exit status 0: all ranks answered, and they are of one world. The address of "
        "one\n"
        "rank, without --world-size, asks that rank alone.",
    .of_some = true,
    .run = run,
};
