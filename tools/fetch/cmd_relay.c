/* SPDX-License-Identifier: Apache-2.0 */
#include "fetch/cache.h"
#include "fetch/command.h"
#include "fetch/failure.h"
#include "fetch/interrupt.h"
#include "fetch/output.h"
#include "clock.h"

#include <ctype.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum {
    LOOK_MS = 2000,  /* how long a step is waited for before the ranks are looked at */
    AGAIN_MS = 1000, /* after a failure */
    LIARS_MOST = 16, /* before the first step; each is told of, and done without */
};

typedef struct relay_options {
    char *memory, *network, *place, *rate;
    int keep, verify;
    bool json;
    bool ever;       /**< a step was held */
    int liars;       /**< relays that --verify has found before that */
    char told[1024]; /**< the last failure */
} relay_options;

/* ------------------------------------------------------------------------- telling */

static void relay_print(const char *format, ...) __attribute__((format(printf, 1, 2)));

static void relay_print(const char *format, ...)
{
    char text[512], clock[16];
    struct tm local;
    time_t seconds = time(NULL);
    va_list list;
    va_start(list, format);
    vsnprintf(text, sizeof text, format, list);
    va_end(list);
    strftime(clock, sizeof clock, "%H:%M:%S", localtime_r(&seconds, &local));
    terminal_print("%s  %s", clock, text);
    output_flush();
}

static json_t *relay_event(const char *event)
{
    return output_object("event", output_string(event), "time_ns",
                         output_u64(clock_unix_ns()), NULL);
}

static void tell_step(const relay_options *o, const cache_step *s)
{
    if (!o->json) {
        relay_print("step %" PRIu64 "  %s in %s  %s", s->step, output_bytes(s->bytes).s,
                    output_duration(s->total_ns).s, s->how);
        return;
    }
    json_t *object = relay_event("step");
    output_set(object, "step", output_u64(s->step), "world_id",
               output_digits(s->world_id), "bytes", output_u64(s->bytes),
               "bytes_from_origin", output_u64(s->from_origin), "bytes_from_relays",
               output_u64(s->from_relays), "total_ns", output_u64(s->total_ns), NULL);
    output_json_line(object);
}

static void tell_withdrawn(const relay_options *o, uint64_t step)
{
    if (!o->json) {
        relay_print("step %" PRIu64 " was taken back by the trainer", step);
        return;
    }
    json_t *object = relay_event("withdrawn");
    output_set(object, "step", output_u64(step), NULL);
    output_json_line(object);
}

static void tell_launch(const relay_options *o, const cache *c, size_t dropped)
{
    if (!o->json) {
        relay_print("the trainer is another launch, %s: %zu steps are dropped",
                    output_hex(c->world_id).s, dropped);
        return;
    }
    json_t *object = relay_event("launch");
    output_set(object, "world_id", output_digits(c->world_id), "dropped",
               output_u64(dropped), NULL);
    output_json_line(object);
}

/* Each once, as long as it stays the same. */
static void tell_trouble(relay_options *o, const fanin_error *error)
{
    if (strcmp(o->told, error->message) != 0) {
        snprintf(o->told, sizeof o->told, "%s", error->message);
        failure_warn("%s%s%s; what is held is handed on meanwhile", error->message,
                     error->remedy[0] != '\0' ? ": " : "", error->remedy);
    }
}

/* ----------------------------------------------------------------------- following */

static fanin_status follow_launch(cache *c, const relay_options *o, fanin_error *error)
{
    size_t dropped;
    fanin_status status = cache_follow_launch(c, &dropped, error);
    if (dropped > 0)
        tell_launch(o, c, dropped);
    return status;
}

/* Waits for a step and pulls it, or waits in vain. */
static fanin_status take_next_step(cache *c, relay_options *o, fanin_error *error)
{
    uint64_t step, withdrawn;
    cache_step done;
    fanin_status status = cache_await(c, LOOK_MS, &step, error);
    bool waits = status == FANIN_ERR_TIMEOUT || status == FANIN_ERR_PAUSED;
    if (status != FANIN_OK && !waits)
        return status;
    if (cache_drop_withdrawn(c, &withdrawn))
        tell_withdrawn(o, withdrawn);
    /* Also while it waits: the client goes on with a launch that has the world id of the one
       before, whose steps may be earlier ones. */
    fanin_status followed = follow_launch(c, o, error);
    if (waits || followed != FANIN_OK)
        return followed != FANIN_OK ? followed : status;
    status = cache_pull(c, step, &done, error);
    if (status == FANIN_OK) {
        o->ever = true;
        o->told[0] = '\0';
        tell_step(o, &done);
    }
    return status;
}

static void wait_before_retry(void)
{
    const struct timespec time = {.tv_sec = AGAIN_MS / 1000};
    if (!interrupt_requested())
        nanosleep(&time, NULL);
}

static bool is_to_try_again(relay_options *o, fanin_status status)
{
    bool lied = o->verify && !o->ever && status == FANIN_ERR_TRANSPORT;
    return (status <= FANIN_ERR_STALE && status > -300) ||
           (lied && o->liars++ < LIARS_MOST);
}

/* Whether another try would fail as well. */
static bool is_final(const relay_options *o, fanin_status status, bool again)
{
    switch (status) {
    case FANIN_ERR_ARGUMENT:
    case FANIN_ERR_IO:
    case FANIN_ERR_MEMORY:
    case FANIN_ERR_FORKED:
    case FANIN_ERR_INTERNAL:
        return true;
    default:
        return !o->ever && !again;
    }
}

/* The exit status; only the end of the program is no failure. */
static int follow_trainer(cache *c, const invocation *line, relay_options *o)
{
    bool connected = true;
    while (!interrupt_requested() && output_errno() == 0) {
        fanin_error error = FANIN_ERROR_INIT;
        fanin_status status = FANIN_OK;
        if (!connected) {
            status = session_renew(c->session, line, &error);
            status = status != FANIN_OK ? status : follow_launch(c, o, &error);
            connected = status == FANIN_OK;
        }
        status = status != FANIN_OK ? status : take_next_step(c, o, &error);
        if (cache_is_forbidden(c, &error))
            return failure_report("nothing is handed on", &error);
        if (status == FANIN_OK || status == FANIN_ERR_TIMEOUT || interrupt_requested())
            continue;
        bool again = is_to_try_again(o, status);
        if (connected && is_final(o, status, again))
            return session_failure(c->session, "cannot keep steps", &error);
        connected = connected && again;
        tell_trouble(o, &error);
        wait_before_retry();
    }
    return 0;
}

/* ------------------------------------------------------------------------- command */

/* In bytes a second; 0: it is no such number. */
static uint64_t parse_rate(const char *text)
{
    char *end;
    bool digits = isdigit((unsigned char)text[0]) || text[0] == '.';
    double value = strtod(text, &end);
    bool good = digits && *end == '\0' && value >= 0.001 && value <= 1000;
    return good ? (uint64_t)(value * 1e9) : 0;
}

static int relay_check_usage(const session *s, const relay_options *o)
{
    if (o->rate != NULL && parse_rate(o->rate) == 0)
        return failure_usage(s->command->name,
                             "--rate '%s' is no GB/s from 0.001 to 1000", o->rate);
    if (o->rate != NULL && o->network == NULL)
        return failure_usage(s->command->name,
                             "--rate is for readers on other hosts; give --network");
    if (!options_is_model(s->publication))
        return failure_usage(s->command->name,
                             "%s is an adapter, which is small: engines pull it from "
                             "the trainer; give full:R",
                             s->publication);
    if (o->memory != NULL && strcmp(o->memory, "host") != 0 &&
        strchr(o->memory, '/') == NULL)
        return failure_usage(s->command->name,
                             "--memory '%s' is neither host nor a path with a '/'",
                             o->memory);
    return 0;
}

static int relay_target(session *s, const invocation *line, void *cookie)
{
    relay_options *o = cookie;
    fanin_error error = FANIN_ERROR_INIT;
    o->json = line->common.json != 0;
    int code = session_need_run(s);
    code = code != 0 ? code : relay_check_usage(s, o);
    if (code != 0)
        return code;
    cache c = {.session = s,
               .networks = o->network,
               .place = o->place,
               .rate = o->rate != NULL ? parse_rate(o->rate) : 0,
               .trust_containers = line->connect.trust_containers != 0,
               .verify = o->verify != 0,
               .n = (size_t)o->keep};
    if (o->memory != NULL && strcmp(o->memory, "host") != 0)
        c.directory = o->memory;
    c.copies = output_require(calloc(c.n, sizeof c.copies[0]));
    if (cache_memory_check(c.directory, &error) != FANIN_OK)
        code = failure_report("cannot keep steps", &error);
    code = code != 0 ? code : session_reach(s);
    if (code == 0 && follow_launch(&c, o, &error) != FANIN_OK)
        code = session_failure(s, "cannot keep steps", &error);
    code = code != 0 ? code : follow_trainer(&c, line, o);
    cache_free(&c);
    return code;
}

static int relay_run(const command *self, int argc, const char **argv)
{
    invocation line = {.common.timeout_ms = 10000};
    relay_options o = {.keep = 1};
    struct poptOption table[] = {
        {"memory", 0, POPT_ARG_STRING, &o.memory, 0,
         "host (default): this process's; or a directory on a tmpfs or disk", "WHERE"},
        {"keep", 0, POPT_ARG_INT, &o.keep, 0, "so many steps, the newest (default 1)",
         "K"},
        {"network", 0, POPT_ARG_STRING, &o.network, 0,
         "hand on to hosts in these networks: 10.0.0.0/8,fd00::/8 (default: to this "
         "host alone)",
         "NETWORKS"},
        {"place", 0, POPT_ARG_STRING, &o.place, 0,
         "where this host is, site or site/rack: sites hand nothing on to each other "
         "(default: FANIN_PLACE)",
         "PLACE"},
        {"rate", 0, POPT_ARG_STRING, &o.rate, 0,
         "hand on no more than this in a second, all readers together (default: no "
         "limit)",
         "GB/s"},
        {"verify", 0, POPT_ARG_NONE, &o.verify, 0,
         "compare each step with digests that the ranks make", NULL},
        SESSION_TABLE(&line),
        POPT_TABLEEND,
    };
    return session_run(self, argc, argv, &line, table, 0, relay_target, &o);
}

static const char help[] =
    "Examples:\n"
    "  nixl-fetch relay 10.0.0.1:6000 full:0 --world-size 8 --network 10.0.0.0/8\n"
    "  nixl-fetch relay nixl_info.json full:0 --keep 3 --memory /mnt/nvme/me\n"
    "\n"
    "Pulls each step as soon as all ranks have committed it, from the trainer and\n"
    "from other relays, and hands it on to engines with FANIN_RELAY. Prints a line a\n"
    "step. Each step has memory of its own; the oldest one makes room. Files in a\n"
    "directory have no names, so that nothing is left of them. When the trainer is\n"
    "started again, the steps of the launch before are dropped. Ends by SIGINT or\n"
    "SIGTERM (exit status 0). --timeout is for the connection.";

const command cmd_relay = {
    .name = "relay",
    .arguments = "TARGET full:R [OPTION...]",
    .summary = "keep the last steps of a model on this host, and hand them on",
    .help = help,
    .run = relay_run,
};
