/* SPDX-License-Identifier: Apache-2.0 */
/* What is wrong with a run, in words that need no manual. */
#include "fetch/look.h"
#include "fetch/output.h"

#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    UPDATE_MS = 1000, /* an update of less is not worth a line */
    LEASE_MS = 2000,  /* nor is a lease */
    SLOW_MS = 1000,   /* nor is a rank that others wait for */
    STALE_LEAST = 5,  /* pulls that tell something */
};

/* The order in which they are told. */
enum {
    NO_ANSWER,
    OTHER_VERSION,
    NOT_THERE,
    STUCK,
    BEHIND,
    PAUSED,
    OLD,
    SLOW,
    LEASE,
    STALE
};

static const struct {
    const char *kind, *remedy;
} remedies[] = {
    {"no-answer", "see on its host whether the trainer's process still runs, and what "
                  "its log says last"},
    {"silent", "see on its host whether the process is stopped (a debugger, SIGSTOP, a "
               "frozen cgroup) or swaps, and whether a firewall drops packets"},
    {"version", "install one release of fanin for trainer and engines: pip show fanin, "
                "nixl-fetch --version"},
    {"protocol", "check the address and its port: another program listens there"},
    {"absent", "check the run's name (--run): nixl-fetch list tells those there are"},
    {"unpublished", "the trainer has to commit: publish(), or begin_update and commit"},
    {"draining", "see below who holds leases; the update goes on when they end, at the "
                 "latest after the lease time"},
    {"pending", "see what its device does: a kernel or a collective that never ends "
                "holds its stream up"},
    {"updating",
     "nobody can read it until its trainer commits: see what that process "
     "does (py-spy dump --pid PID); a collective may wait for another rank"},
    {"behind", "readers wait for it: see whether its process computes, waits in a "
               "collective, or skipped a commit"},
    {"slow", "see its host's network and CPU, and its log for sent-slowly; nixl-fetch "
             "pull --trace, then nixl-fetch trace, has the times of each rank"},
    {"lease", "an update waits for it until the lease time is over: see what that "
              "engine does, whether it is stopped or its network is slow"},
    {"stale", "let readers pull right after a commit, update less often, or raise the "
              "lease time so that updates wait for them"},
    {"paused", "readers wait until the trainer resumes the run"},
    {"old",
     "see what the trainer does: it computes for longer than --max-age, or hangs"},
};

static const char *remedy_of(const char *kind)
{
    size_t i = 0;
    while (strcmp(remedies[i].kind, kind) != 0)
        i++;
    return remedies[i].remedy;
}

static void problems_add(problems *p, int weight, const look_rank *r, const char *kind,
                         fanin_status status, const char *format, ...)
    __attribute__((format(printf, 6, 7)));

static void problems_add(problems *p, int weight, const look_rank *r, const char *kind,
                         fanin_status status, const char *format, ...)
{
    va_list arguments;
    p->list = output_room(p->list, p->count, &p->capacity, sizeof *p->list);
    problem *one = &p->list[p->count++];
    *one = (problem){.weight = weight,
                     .rank = r != NULL ? r->at.rank : -1,
                     .kind = kind,
                     .status = status,
                     .remedy = remedy_of(kind)};
    va_start(arguments, format);
    vsnprintf(one->text, sizeof one->text, format, arguments);
    va_end(arguments);
}

static void judge_missing(problems *p, const look_rank *r)
{
    fanin_status status = r->at.status;
    missing_text name = missing_name(&r->at);
    if (status == FANIN_ERR_VERSION)
        problems_add(p, OTHER_VERSION, r, "version", status,
                     "%s is of another release: %s", name.s, r->at.message);
    else if (status == FANIN_ERR_PROTOCOL)
        problems_add(p, OTHER_VERSION, r, "protocol", status,
                     "%s does not speak fanin's protocol: %s", name.s, r->at.message);
    else
        problems_add(p, NO_ANSWER, r, "no-answer", status, "%s does not answer%s: %s",
                     name.s, r->at.silent ? " (stopped?)" : "", r->at.message);
    if (r->at.silent)
        p->list[p->count - 1].remedy = remedy_of("silent");
}

/* What it is at, unless it publishes a step. */
static void judge_state(problems *p, const look_rank *r, fanin_status wrong)
{
    missing_text name = missing_name(&r->at);
    uint64_t age = r->is.update_age_ms > 0 ? r->is.update_age_ms : r->is.state_age_ms;
    bool tell = wrong != FANIN_OK || age >= UPDATE_MS;
    if (r->is.state == FANIN_PUBLICATION_PAUSED)
        problems_add(p, PAUSED, r, "paused", wrong, "%s is paused for %s%s%s", name.s,
                     output_age(r->is.state_age_ms).s, r->reason[0] != '\0' ? ": " : "",
                     r->reason);
    else if (r->is.state == FANIN_PUBLICATION_DRAINING && tell)
        problems_add(p, STUCK, r, "draining", wrong,
                     "%s: its update waits for readers for %s", name.s,
                     output_age(r->is.state_age_ms).s);
    else if (r->is.state == FANIN_PUBLICATION_WRITING && r->is.pending && tell)
        problems_add(
            p, STUCK, r, "pending", wrong,
            "%s has committed, and its device is not done: in its update for %s",
            name.s, output_age(age).s);
    else if (r->is.state == FANIN_PUBLICATION_WRITING && tell)
        problems_add(p, STUCK, r, "updating", wrong,
                     "%s: in its update for %s, its last step is %" PRIu64, name.s,
                     output_age(age).s, r->is.step);
    else if (r->is.state == FANIN_PUBLICATION_UNPUBLISHED)
        problems_add(p, NOT_THERE, r, "unpublished", FANIN_ERR_STALE,
                     "%s has nothing to read: %s", name.s,
                     r->is.commit_age_ms > 0
                         ? "its last update was aborted, or its last step "
                           "taken back"
                         : "nothing was committed yet");
}

static void judge_step(problems *p, const look *l, const look_rank *r,
                       uint64_t max_age_ms)
{
    missing_text name = missing_name(&r->at);
    fanin_status wrong = max_age_ms > 0 ? FANIN_OK : FANIN_ERR_STALE;
    if (!r->there) {
        problems_add(p, NOT_THERE, r, "absent", FANIN_ERR_NOT_FOUND,
                     "%s does not publish this run", name.s);
        return;
    }
    judge_state(p, r, wrong);
    if (r->is.commit_age_ms > 0 && r->is.step < l->newest)
        problems_add(p, BEHIND, r, "behind", wrong,
                     "%s is behind: step %" PRIu64 ", the furthest %" PRIu64, name.s,
                     r->is.step, l->newest);
    if (max_age_ms > 0 && r->is.commit_age_ms > max_age_ms)
        problems_add(p, OLD, r, "old", FANIN_ERR_TIMEOUT,
                     "%s has committed nothing for %s", name.s,
                     output_age(r->is.commit_age_ms).s);
}

/* A holder of several ranks' leases is told once, by its oldest. */
static bool told_already(const problems *p, const char *text_begin)
{
    for (size_t i = 0; i < p->count; i++)
        if (p->list[i].weight == LEASE &&
            strncmp(p->list[i].text, text_begin, strlen(text_begin)) == 0)
            return true;
    return false;
}

static void judge_leases(problems *p, const look_rank *r)
{
    char begin[96] = "an engine";
    for (size_t i = 0; i < r->n_holders; i++) {
        const look_holder *h = &r->holders[i];
        bool address = strpbrk(h->who, "0123456789") != NULL;
        snprintf(begin, sizeof begin, "engine %s %s has held", address ? "at" : "of",
                 h->who);
        if (h->age_ms >= LEASE_MS && !told_already(p, begin))
            problems_add(p, LEASE, r, "lease", FANIN_OK, "%s a lease for %s (%s)",
                         begin, output_age(h->age_ms).s, missing_name(&r->at).s);
    }
    if (r->n_holders == 0 && r->is.lease_age_ms >= LEASE_MS &&
        !told_already(p, "an engine has held"))
        problems_add(p, LEASE, r, "lease", FANIN_OK,
                     "an engine has held a lease for %s (%s)",
                     output_age(r->is.lease_age_ms).s, missing_name(&r->at).s);
}

/* A reader has all leases until the last rank has sent all: the one that still sends is the cause,
   or is only the last of a pull. The ranks' number; l->count: none. */
static uint32_t find_last(const look *l, uint32_t *through_out)
{
    uint32_t last = l->count, sending = 0, through = 0;
    for (uint32_t i = 0; i < l->count; i++) {
        const look_rank *r = &l->ranks[i];
        if (r->stats.sends_waiting > 0 && r->is.lease_age_ms >= SLOW_MS) {
            last = i;
            sending++;
        }
        through += r->stats.sends_waiting == 0 && r->is.lease_age_ms >= SLOW_MS;
    }
    *through_out = through;
    return sending == 1 && through > 0 ? last : l->count;
}

bool problems_need_another(const look *l)
{
    uint32_t through;
    return find_last(l, &through) < l->count;
}

/* By stream as the rank sent them, by the others as readers have told. */
static uint64_t bytes_of(const look_rank *r)
{
    const fanin_rank_stats *s = &r->stats;
    return s->bytes_streamed + s->bytes_cma + s->bytes_rdma + s->bytes_cuda_ipc;
}

/* Of whom readers have got nothing since the look before. */
static void judge_slow(problems *p, const look *l, const look *before, uint64_t ns)
{
    uint32_t through, last = find_last(l, &through);
    if (before == NULL || last == l->count || last >= before->count)
        return;
    const look_rank *slow = &l->ranks[last], *then = &before->ranks[last];
    if (!look_answered(then) || !then->stats.counted || !slow->stats.counted ||
        strcmp(then->at.address, slow->at.address) != 0 ||
        bytes_of(then) != bytes_of(slow))
        return;
    problems_add(
        p, SLOW, slow, "slow", FANIN_OK,
        "%s is slow: readers have waited %s for what it sends, for %s the network or "
        "they have taken nothing; %" PRIu32 " of the others have sent all",
        missing_name(&slow->at).s, output_age(slow->is.lease_age_ms).s,
        output_age(ns / 1000000).s, through);
}

/* Of all pulls since the rank was started; the first rank of which it is true speaks for all. */
static void judge_stale(problems *p, const look *l)
{
    for (uint32_t i = 0; i < l->count; i++) {
        const look_rank *r = &l->ranks[i];
        uint64_t stale = r->stats.pulls_stale;
        uint64_t all = stale + r->stats.pulls_good;
        if (all >= STALE_LEAST && stale > all / 2) {
            problems_add(
                p, STALE, NULL, "stale", FANIN_OK,
                "readers are too slow or updates too soon: %" PRIu64 " of %" PRIu64
                " pulls were overtaken by an update and had to be begun again (%s)",
                stale, all, missing_name(&r->at).s);
            return;
        }
    }
}

static int by_weight(const void *a, const void *b)
{
    const problem *x = a, *y = b;
    return x->weight != y->weight ? x->weight - y->weight
                                  : (x->rank > y->rank) - (x->rank < y->rank);
}

void problems_find(const look *l, const look *before, uint64_t ns, uint64_t max_age_ms,
                   problems *out)
{
    *out = (problems){0};
    for (uint32_t i = 0; i < l->count; i++) {
        const look_rank *r = &l->ranks[i];
        if (r->at.status != FANIN_OK) {
            judge_missing(out, r);
            continue;
        }
        judge_step(out, l, r, max_age_ms);
        judge_leases(out, r);
    }
    judge_slow(out, l, before, ns);
    judge_stale(out, l);
    if (out->count > 0)
        qsort(out->list, out->count, sizeof *out->list, by_weight);
}

fanin_status problems_verdict(const problems *p)
{
    for (size_t i = 0; i < p->count; i++)
        if (p->list[i].status != FANIN_OK)
            return p->list[i].status;
    return FANIN_OK;
}

void problems_free(problems *p)
{
    free(p->list);
    *p = (problems){0};
}
