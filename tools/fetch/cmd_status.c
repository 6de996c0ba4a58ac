/* SPDX-License-Identifier: Apache-2.0 */
/* What a run is at, once. */
#include "fetch/command.h"
#include "fetch/failure.h"
#include "fetch/look.h"
#include "fetch/output.h"
#include "fetch/missing.h"
#include "clock.h"

#include <poll.h>
#include <stdio.h>
#include <stdlib.h>

typedef struct request {
    char *max_age;
    uint32_t max_age_ms;
} request;

static void status_add_row(struct libscols_table *table, const look_rank *r)
{
    bool good = look_answered(r) && r->there, known = good && r->stats.counted;
    uint64_t p99 = look_drain_ns(&r->stats, 99);
    output_row(table, NULL,
               r->at.rank >= 0 ? output_number((uint64_t)r->at.rank).s : "-",
               good               ? rank_state_name(r->is.state)
               : look_answered(r) ? "absent"
                                  : "no answer",
               good ? output_number(r->is.step).s : "-",
               good ? output_age(r->is.commit_age_ms).s : "-",
               known ? output_number(r->is.leases).s : "-",
               known ? output_age(r->is.lease_age_ms).s : "-",
               known ? output_number(r->stats.pulls_stale).s : "-",
               known && p99 > 0 ? output_duration(p99).s : "-");
}

enum { COMMIT_TEXT = 256 };

/* A trainer that hangs outside of an update answers well: only this shows it. */
static const char *last_commit(const look *l, char text[static COMMIT_TEXT])
{
    uint64_t age = UINT64_MAX;
    for (uint32_t i = 0; i < l->count; i++) {
        const look_rank *r = &l->ranks[i];
        uint64_t its = look_answered(r) && r->there ? r->is.commit_age_ms : 0;
        age = its > 0 && its < age ? its : age;
    }
    text[0] = '\0';
    if (age != UINT64_MAX)
        snprintf(text, COMMIT_TEXT, ", last commit %s ago", output_age(age).s);
    return text;
}

static void print_relays(const look_rank *r)
{
    if (r->n_relays == 0)
        return;
    struct libscols_table *table = output_table(
        "RELAY STEP> UNITS> OF> ORIGIN> RELAYS> HANDED> LATE> TAKEN> PLACE");
    for (size_t i = 0; i < r->n_relays; i++) {
        const fanin_told_relay *t = &r->relays[i].told;
        output_row(table, NULL, r->relays[i].address, output_number(t->step).s,
                   output_number(t->landed).s, output_number(t->units).s,
                   output_bytes(t->bytes_origin).s, output_bytes(t->bytes_relays).s,
                   output_bytes(t->bytes_handed_on).s, output_number(t->late).s,
                   output_number(t->taken_over).s, r->relays[i].place);
    }
    output_print(table);
}

static void print_text(const session *s, const look *l, const problems *p)
{
    char commit[COMMIT_TEXT], *summary = look_summary(s, l, p);
    terminal_print("%s%s", summary, last_commit(l, commit));
    free(summary);
    for (size_t i = 0; i < p->count; i++) {
        const problem *one = &p->list[i];
        terminal_print("  %s", one->text);
        if (i + 1 == p->count || one[1].remedy != one->remedy) /* once for them all */
            terminal_print("    %s", one->remedy);
    }
    struct libscols_table *table =
        output_table("RANK> STATE STEP> AGE> LEASES> HELD> STALE> DRAIN>");
    for (uint32_t i = 0; i < l->count; i++)
        status_add_row(table, &l->ranks[i]);
    output_print(table);
    for (uint32_t i = 0; i < l->count; i++)
        print_relays(&l->ranks[i]);
}

/* 0 or the exit status after a message: there are addresses from here on, whoever answers. */
static int reach(const session *s)
{
    fanin_error error = FANIN_ERROR_INIT;
    fanin_status status = session_try(s, &error);
    return status == FANIN_OK ? 0 : session_failure(s, "nobody answers", &error);
}

enum { AGAIN_MS = 250 };

/* A second one, if time is left, where only that tells what is wrong: then *@p before is the first,
   taken *@p ns_out earlier. */
static fanin_status take_looks(const session *s, look *l, look *before,
                               uint64_t *ns_out, fanin_error *error)
{
    fanin_status status = look_take(s, session_left_ms(s), l, error);
    uint64_t first = clock_ns();
    if (status == FANIN_OK && problems_need_another(l) &&
        session_left_ms(s) >= 2 * AGAIN_MS) {
        *before = *l;
        poll(NULL, 0, AGAIN_MS);
        status = look_take(s, session_left_ms(s), l, error);
        *ns_out = clock_ns() - first;
    }
    return status;
}

static int status(session *s, const invocation *line, void *cookie)
{
    const request *r = cookie;
    fanin_error error = FANIN_ERROR_INIT;
    look l = {0}, before = {0};
    uint64_t ns = 0;
    problems p;
    int code = session_need_run(s);
    code = code != 0 ? code : reach(s);
    if (code != 0)
        return code;
    if (take_looks(s, &l, &before, &ns, &error) != FANIN_OK) {
        look_free(&l);
        look_free(&before);
        return session_failure(s, "no status", &error);
    }
    problems_find(&l, before.ranks != NULL ? &before : NULL, ns, r->max_age_ms, &p);
    look_free(&before);
    if (line->common.json)
        output_json(look_json(s, &l, &p));
    else
        print_text(s, &l, &p);
    code = exit_code_of(problems_verdict(&p));
    problems_free(&p);
    look_free(&l);
    return code;
}

static int checked(session *s, const invocation *line, void *cookie)
{
    request *r = cookie;
    if (r->max_age != NULL && !options_duration(r->max_age, &r->max_age_ms))
        return failure_usage("status", "--max-age '%s' is no time such as 30s or 10m",
                             r->max_age);
    return status(s, line, cookie);
}

static int run(const command *self, int argc, const char **argv)
{
    invocation line = {.common.timeout_ms = 1500};
    request r = {0};
    struct poptOption table[] = {
        {"max-age", 0, POPT_ARG_STRING, &r.max_age, 0,
         "fine is whose last commit is no older, whatever it is at now", "TIME"},
        SESSION_TABLE(&line),
        POPT_TABLEEND,
    };
    return session_run(self, argc, argv, &line, table, 0, checked, &r);
}

static const char help[] =
    "Examples:\n"
    "  nixl-fetch status nixl_info.json\n"
    "  nixl-fetch status 127.0.0.1:6000 --world-size 8 --max-age 10m --json\n"
    "\n"
    "Asks all ranks at once, takes no lease, and tells first what is wrong, the\n"
    "worst first. Exit status 0: all ranks answer and publish one step; with\n"
    "--max-age: all answer and have committed within that time. 11: a rank does not\n"
    "publish the run; 12: a rank is in an update, paused, behind, too old or has\n"
    "nothing committed; 13: a rank does not answer; 14: other releases or worlds.\n"
    "The worst counts.";

const command cmd_status = {
    .name = "status",
    .arguments = "TARGET [--run R] [OPTION...]",
    .summary = "every rank's state, and what is wrong with a run",
    .help = help,
    .of_some = true,
    .run = run,
};
