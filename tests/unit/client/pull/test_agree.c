/* SPDX-License-Identifier: Apache-2.0 */
/* Agreeing on a step: who is asked for which one, who is waited for, and for how long. */
#include "pull/pull.h"
#include "stub_ranks.h"
#include "testing.h"

#define PART 16
#define CALL_MS 10000
#define GRACE_MS 50 /* that replicas are given to catch up */

typedef struct scene {
    stub_world world;
    publication *run;
    fanin_pull_options options;
    early_begin *early; /* NULL: leases are not asked for */
    announcement announced[STUB_RANKS];
    bool use[STUB_RANKS];
    uint64_t call_ms, took_ms; /* what a call is given, and what it took */
    fanin_error error;
} scene;

static scene s;

/* One rank's answer to a wait, other than a server's. */
static struct {
    stub_rank *rank;
    fanin_status error; /* this one */
    uint64_t less;      /* a step that is so much less than it was asked for */
    bool hangs_up;      /* none, and it closes the connection */
    bool is_late;       /* none yet: late_request is to be answered */
    bool once;          /* that error, and no more */
    bool gives_lease;   /* of whatever catalog, asked for or not */
    uint64_t late_request;
} odd;

/* What leases may come with announcements; each rank's catalog is version 1 at first. */
static struct {
    uint64_t versions[STUB_RANKS];
    reader_lease leases[STUB_RANKS];
    early_begin begin;
} early;

static bool answer(stub_talk *t, const frame *f, body *in)
{
    msg_wait asked;
    if (t->rank != odd.rank || f->type != MSG_WAIT)
        return stub_answer(t, f, in);
    if (odd.error && odd.once)
        odd.rank = NULL;
    if (odd.error)
        return stub_answer_error(t, f->request, odd.error, "no such run here");
    if (odd.hangs_up)
        return false;
    if (odd.is_late) {
        odd.late_request = f->request;
        return true;
    }
    assert_int_equal(decode_wait(in, &asked), FANIN_OK);
    msg_wait_ok ok = {.step = asked.step - odd.less};
    static const uint8_t token[16] = {1};
    if (odd.gives_lease)
        ok = (msg_wait_ok){.step = 3, .catalog_version = 2, .token = {token, 16}};
    encode_wait_ok(&t->out, f->request, &ok);
    return true;
}

/* Every rank at step 3. */
static void start(size_t ranks, uint32_t parts)
{
    memset(&odd, 0, sizeof odd);
    memset(&early, 0, sizeof early);
    memset(&s, 0, sizeof s);
    s.error = (fanin_error)FANIN_ERROR_INIT;
    s.call_ms = CALL_MS;
    stub_world_start(&s.world, ranks, parts, PART);
    s.run = tables_of(s.world.client, STUB_RUN);
    assert_non_null(s.run);
    for (size_t i = 0; i < ranks; i++) {
        s.world.ranks[i].answer = answer;
        stub_rank_commit(&s.world.ranks[i], 3);
    }
    fanin_pull_options_init(&s.options, sizeof s.options);
    s.options.publication = STUB_RUN;
}

static int tear_down(void **state)
{
    stub_world_stop(&s.world);
    return 0;
}

#define CASE(name) TEST_WITH(name, NULL, tear_down)

static fanin_status ask_for(fanin_step_rule rule, uint64_t step, const agree_need *need)
{
    s.options.rule = rule;
    s.options.step = step;
    uint64_t before = clock_ns();
    fanin_status status =
        agree(s.world.client, s.run, &s.options, need, s.early,
              deadline_in_ms(s.call_ms), s.announced, s.use, &s.error);
    s.took_ms = (clock_ns() - before) / 1000000;
    return status;
}

static fanin_status ask_for_newest(void)
{
    return ask_for(FANIN_STEP_NEWEST, 0, NULL);
}

/* Those of @p mask are to be read, all at this step. */
static void assert_agreed(unsigned mask, uint64_t step)
{
    for (size_t i = 0; i < s.world.size; i++) {
        assert_int_equal(s.use[i], mask >> i & 1);
        if (!s.use[i])
            continue;
        assert_true(s.announced[i].valid);
        assert_int_equal(s.announced[i].step, step);
        assert_int_equal(s.announced[i].version, s.world.ranks[i].version);
    }
}

static void assert_error(const char *words)
{
    assert_says(s.error.message, words);
}

static void commit_4(void *rank)
{
    stub_rank_commit(rank, 4);
}

static void hang_up(void *rank)
{
    stub_rank_hang_up(rank);
}

/* ------------------------------------------------------------------- steps */

CASE(all_at_one_step_agree_at_once)
{
    start(3, 3);
    assert_ok(ask_for_newest(), s.error);
    assert_agreed(7, 3);
    assert_int_equal(s.took_ms, 0);
    assert_int_equal(stub_world_asked(&s.world, MSG_WAIT), 3);
    digest id = digest_of(s.world.ranks[0].keys.data, s.world.ranks[0].keys.size);
    assert_true(digest_equal(&s.announced[2].keys, &id));
}

CASE(a_step_to_come_is_waited_for)
{
    static const fanin_step_rule rules[] = {FANIN_STEP_EXACT, FANIN_STEP_AT_LEAST};
    start(2, 2);
    for (size_t i = 0; i < 2; i++) {
        stub_rank_commit(&s.world.ranks[0], 3);
        stub_rank_commit(&s.world.ranks[1], 3);
        stub_time_at_ms(700, commit_4, &s.world.ranks[0]);
        stub_time_at_ms(2500, commit_4, &s.world.ranks[1]);
        assert_ok(ask_for(rules[i], 4, NULL), s.error);
        assert_agreed(3, 4);
        assert_int_equal(s.took_ms, 2500);
    }
    assert_int_equal(stub_world_asked(&s.world, MSG_WAIT), 4);
}

CASE(a_step_that_has_passed_does_not_come_again)
{
    start(2, 2);
    assert_int_equal(ask_for(FANIN_STEP_EXACT, 2, NULL), FANIN_ERR_SUPERSEDED);
    assert_error("step 2 of lora:0 has passed: the trainer is at step 3");
    assert_int_equal(s.error.rank, 0);
    stub_rank_commit(&s.world.ranks[1], 4);
    assert_int_equal(ask_for(FANIN_STEP_EXACT, 3, NULL), FANIN_ERR_SUPERSEDED);
    assert_int_equal(s.error.rank, 1); /* and no other one has passed it */
    stub_rank_commit(&s.world.ranks[0], 4);
    assert_ok(ask_for(FANIN_STEP_AT_LEAST, 2, NULL), s.error);
    assert_agreed(3, 4);
}

/* Who is behind the furthest rank is asked again, for that rank's step. */
CASE(the_furthest_rank_is_the_target)
{
    start(3, 3);
    stub_rank_commit(&s.world.ranks[1], 4);
    stub_time_at_ms(10, commit_4, &s.world.ranks[0]);
    stub_time_at_ms(900, commit_4, &s.world.ranks[2]);
    assert_ok(ask_for_newest(), s.error);
    assert_agreed(7, 4);
    assert_int_equal(s.took_ms, 900);
    assert_int_equal(s.world.ranks[0].asked[MSG_WAIT], 2);
    assert_int_equal(s.world.ranks[1].asked[MSG_WAIT], 1);
    assert_int_equal(stub_rank_talk(&s.world.ranks[2], ROLE_CONTROL)->wait.step, 4);
}

CASE(a_step_before_the_one_asked_for_is_no_answer)
{
    start(2, 2);
    odd.rank = &s.world.ranks[1];
    odd.less = 1;
    assert_int_equal(ask_for(FANIN_STEP_AT_LEAST, 3, NULL), FANIN_ERR_PROTOCOL);
    assert_error("announced step 2 when asked for step 3 or later");
    assert_int_equal(s.error.rank, 1);
}

CASE(who_does_not_publish_it_says_so)
{
    start(2, 2);
    odd.rank = &s.world.ranks[1];
    odd.error = FANIN_ERR_NOT_FOUND;
    assert_int_equal(ask_for_newest(), FANIN_ERR_NOT_FOUND);
    assert_error("no such run here");
    assert_int_equal(s.error.rank, 1);
    assert_int_equal(s.took_ms, 0);
}

/* ------------------------------------------------------------ early leases */

static void ask_for_leases(void)
{
    early.begin = (early_begin){.versions = early.versions, .leases = early.leases};
    for (size_t i = 0; i < s.world.size; i++)
        early.versions[i] = s.world.ranks[i].version;
    s.early = &early.begin;
}

/* Ranks of @p mask; of the others none was kept. */
static void assert_held(unsigned mask)
{
    for (size_t i = 0; i < s.world.size; i++) {
        assert_int_equal(early.leases[i].held, mask >> i & 1);
        if (early.leases[i].held)
            assert_int_equal(early.leases[i].token[0], 0x10 + i);
    }
}

/* How often each rank got a lease back. */
static void assert_given_back(unsigned first, unsigned second, unsigned third)
{
    const unsigned want[] = {first, second, third};
    stub_world_settle(&s.world);
    for (size_t i = 0; i < s.world.size; i++)
        assert_int_equal(s.world.ranks[i].asked[MSG_END], want[i]);
}

CASE(leases_come_with_announcements)
{
    start(3, 3);
    ask_for_leases();
    early.versions[2] = 0; /* nothing is read from it */
    assert_ok(ask_for_newest(), s.error);
    assert_agreed(7, 3);
    assert_held(1 | 2);
    assert_int_equal(early.leases[1].lease_ms, 1000);
    assert_int_not_equal(early.begin.since_ns, 0);
    assert_given_back(0, 0, 0);
    assert_int_equal(stub_world_asked(&s.world, MSG_BEGIN), 0);
}

/* Who does not know them, or has another catalog, announces as ever. */
CASE(who_grants_none_announces)
{
    start(3, 3);
    ask_for_leases();
    s.world.ranks[0].old = true;
    early.versions[1] += 1;
    assert_ok(ask_for_newest(), s.error);
    assert_agreed(7, 3);
    assert_held(4);
    assert_given_back(0, 0, 0);
}

CASE(early_leases_of_other_steps_go_back)
{
    start(3, 3);
    stub_rank_commit(&s.world.ranks[1], 4);
    ask_for_leases();
    stub_time_at_ms(EARLY_MS - 1, commit_4, &s.world.ranks[0]);
    stub_time_at_ms(EARLY_MS - 1, commit_4, &s.world.ranks[2]);
    assert_ok(ask_for_newest(), s.error);
    assert_agreed(7, 4);
    assert_held(2);
    assert_given_back(1, 0, 1);
}

CASE(nobody_waits_under_a_lease)
{
    start(3, 3);
    ask_for_leases();
    s.world.ranks[1].state = WIRE_STATE_WRITING;
    stub_time_at_ms(700, commit_4, &s.world.ranks[0]);
    stub_time_at_ms(700, commit_4, &s.world.ranks[1]);
    stub_time_at_ms(EARLY_MS + 1, commit_4, &s.world.ranks[2]);
    assert_ok(ask_for_newest(), s.error);
    assert_agreed(7, 4);
    assert_int_equal(s.took_ms, 700);
    assert_held(0);
    assert_int_equal(early.begin.since_ns, 0);
    assert_given_back(1, 0, 1);
}

CASE(leases_go_back_when_nothing_is_agreed)
{
    start(3, 3);
    ask_for_leases();
    odd.rank = &s.world.ranks[1];
    odd.error = FANIN_ERR_NOT_FOUND;
    assert_int_equal(ask_for_newest(), FANIN_ERR_NOT_FOUND);
    assert_held(0);
    assert_given_back(1, 0, 1);
}

CASE(a_lost_ranks_lease_is_not_kept)
{
    start(4, 2);
    ask_for_leases();
    s.world.ranks[2].state = WIRE_STATE_WRITING; /* all wait for it */
    stub_time_at_ms(EARLY_MS - 1, hang_up, &s.world.ranks[0]);
    stub_time_at_ms(700, commit_4, &s.world.ranks[1]);
    stub_time_at_ms(700, commit_4, &s.world.ranks[2]);
    stub_time_at_ms(700, commit_4, &s.world.ranks[3]);
    assert_ok(ask_for_newest(), s.error);
    assert_false(s.use[0]);
    assert_held(0);
}

CASE(lies_about_leases_are_refused)
{
    for (int i = 0; i < 2; i++) {
        start(2, 2);
        odd.rank = &s.world.ranks[1];
        odd.gives_lease = true;
        if (i == 1) /* it is asked for, but of catalog 1 */
            ask_for_leases();
        assert_int_equal(ask_for_newest(), FANIN_ERR_PROTOCOL);
        assert_error("granted a lease that it was not asked for");
        assert_int_equal(s.error.rank, 1);
        assert_held(0);
        if (i == 0)
            stub_world_stop(&s.world);
    }
}

/* The answer that was waited for no longer: its lease must not hold an update up. */
static void answer_late(void *rank)
{
    static uint8_t token[16] = {7};
    stub_talk *t = stub_rank_talk(rank, ROLE_CONTROL);
    msg_wait_ok ok = {.step = 3,
                      .catalog_version = 1,
                      .token = {token, sizeof token},
                      .lease_ms = 1000};
    digest id = digest_of(t->rank->keys.data, t->rank->keys.size);
    memcpy(ok.key_digest, id.bytes, sizeof ok.key_digest);
    encode_wait_ok(&t->out, odd.late_request, &ok);
    stub_talk_flush(t);
}

CASE(a_lease_that_comes_late_goes_back)
{
    start(2, 2);
    ask_for_leases();
    odd.rank = &s.world.ranks[1];
    odd.is_late = true;
    stub_time_at_ms(EARLY_MS + 5, answer_late, &s.world.ranks[1]);
    assert_ok(ask_for_newest(), s.error);
    assert_agreed(3, 3);
    assert_held(0);
    assert_given_back(1, 1, 0);
}

CASE(a_lease_that_comes_after_the_end_goes_back)
{
    start(2, 2);
    ask_for_leases();
    odd.rank = &s.world.ranks[1];
    odd.is_late = true;
    assert_int_equal(ask_for_newest(), FANIN_ERR_TIMEOUT);
    assert_held(0);
    assert_given_back(
        1, 1, 0); /* before it is there: this client may never be called again */
    answer_late(&s.world.ranks[1]);
    assert_given_back(1, 1, 0);
}

/* ---------------------------------------------------------------- replicas */

/* Ranks 0 and 2 hold the same, and so do 1 and 3. */
CASE(replicas_that_lag_are_done_without)
{
    start(4, 2);
    stub_rank_commit(&s.world.ranks[0], 4);
    stub_rank_commit(&s.world.ranks[3], 4);
    assert_ok(ask_for_newest(), s.error);
    assert_agreed(1 << 0 | 1 << 3, 4);
    assert_int_equal(s.took_ms, GRACE_MS);
    /* Unless they catch up in time. */
    stub_rank_commit(&s.world.ranks[1], 3);
    stub_time_at_ms(GRACE_MS - 1, commit_4, &s.world.ranks[1]);
    stub_time_at_ms(GRACE_MS - 1, commit_4, &s.world.ranks[2]);
    assert_ok(ask_for_newest(), s.error);
    assert_agreed(15, 4);
}

CASE(who_holds_what_nobody_else_has_is_waited_for)
{
    start(4, 2);
    stub_rank_commit(&s.world.ranks[0], 4);
    stub_rank_commit(&s.world.ranks[2], 4);
    stub_time_at_ms(3000, commit_4, &s.world.ranks[1]);
    assert_ok(ask_for_newest(), s.error);
    assert_agreed(7, 4);
    assert_int_equal(s.took_ms, 3000);
}

CASE(paused_replicas_are_done_without)
{
    start(4, 2);
    s.world.ranks[1].state = WIRE_STATE_PAUSED;
    assert_ok(ask_for_newest(), s.error);
    assert_agreed(13, 3);
    s.world.ranks[3].state = WIRE_STATE_PAUSED;
    assert_int_equal(ask_for_newest(), FANIN_ERR_PAUSED);
    assert_error("the run is paused");
    assert_in_range(s.took_ms, 0, GRACE_MS);
}

CASE(lost_replicas_are_done_without)
{
    start(4, 2);
    odd.rank = &s.world.ranks[2];
    odd.hangs_up = true;
    assert_ok(ask_for_newest(), s.error);
    assert_agreed(11, 3);
}

/* What it announced is not waited for any more. */
CASE(a_lost_rank_sets_no_target)
{
    start(4, 2);
    stub_rank_commit(&s.world.ranks[3], 4);
    stub_time_at_ms(GRACE_MS / 2, hang_up, &s.world.ranks[3]);
    assert_ok(ask_for_newest(), s.error);
    assert_agreed(7, 3);
}

/* ---------------------------------------------------------------- in vain */

typedef struct judge {
    bool in_vain;
    unsigned asked;
    bool use[STUB_RANKS];
} judge;

static fanin_status without(void *cookie, const bool *use, bool *vain,
                            fanin_error *error)
{
    judge *j = cookie;
    j->asked++;
    memcpy(j->use, use, s.world.size * sizeof *use);
    *vain = j->in_vain;
    if (!j->in_vain)
        return FANIN_OK;
    size_t culprit = agree_culprit(s.world.client, s.run, use, UINT64_MAX);
    assert_in_range(culprit, 0, s.world.size - 1);
    const connection *c = s.world.client->peers[culprit].control;
    if (error)
        *error = *&c->fault;
    return c->fault.status;
}

CASE(a_wait_in_vain_ends)
{
    judge j = {.in_vain = true};
    agree_need need = {.without = without, .cookie = &j};
    start(2, 2);
    stub_time_at_ms(1000, hang_up, &s.world.ranks[1]);
    assert_int_equal(ask_for(FANIN_STEP_EXACT, 4, &need), FANIN_ERR_CLOSED);
    assert_int_equal(s.error.rank, 1);
    assert_int_equal(j.asked, 1);
    assert_true(j.use[0] && !j.use[1]);
    assert_in_range(s.took_ms, 1000, 1000 + 2 * GRACE_MS);
}

CASE(one_that_is_not_goes_on)
{
    judge j = {.in_vain = false};
    agree_need need = {.without = without, .cookie = &j};
    start(3, 1);
    stub_time_at_ms(1000, hang_up, &s.world.ranks[1]);
    stub_time_at_ms(2000, commit_4, &s.world.ranks[0]);
    stub_time_at_ms(2000, commit_4, &s.world.ranks[2]);
    assert_ok(ask_for(FANIN_STEP_EXACT, 4, &need), s.error);
    assert_agreed(5, 4);
    assert_int_equal(j.asked, 1);
}

CASE(nobody_is_left)
{
    start(2, 2);
    stub_time_at_ms(100, hang_up, &s.world.ranks[0]);
    stub_time_at_ms(200, hang_up, &s.world.ranks[1]);
    assert_int_equal(ask_for(FANIN_STEP_EXACT, 4, NULL), FANIN_ERR_CLOSED);
    assert_error("closed the connection");
    assert_int_equal(s.took_ms, 200);
}

/* ------------------------------------------------------------------ the end */

CASE(time_is_up)
{
    start(3, 3);
    stub_rank_commit(&s.world.ranks[0], 5);
    stub_rank_commit(&s.world.ranks[2], 4);
    assert_int_equal(ask_for_newest(), FANIN_ERR_TIMEOUT);
    assert_error("step 5 of lora:0 was not committed on all ranks in time: ");
    assert_int_equal(s.took_ms, CALL_MS);
}

/* All have the step, but one is in its next update and stays there. */
CASE(one_is_stuck_in_its_update)
{
    start(3, 3);
    for (size_t i = 0; i < 3; i++)
        s.world.ranks[i].impatient = true;
    s.world.ranks[1].state = WIRE_STATE_WRITING;
    s.world.ranks[1].state_age_ms = 2500;
    assert_int_equal(ask_for_newest(), FANIN_ERR_TIMEOUT);
    assert_error("step 3 of lora:0 could not be read in time: rank 1 at ");
    assert_error(" is at step 3 (writing for 2.5 s)");
    assert_int_equal(s.error.rank, 1);
}

CASE(one_has_not_committed_anything)
{
    start(3, 3);
    for (size_t i = 0; i < 3; i++)
        s.world.ranks[i].impatient = true;
    s.world.ranks[1].step = 0;
    s.world.ranks[1].state = WIRE_STATE_WRITING;
    assert_int_equal(ask_for_newest(), FANIN_ERR_TIMEOUT);
    assert_error("has not committed it yet (writing)");
    assert_int_equal(s.error.rank, 1);
}

/* A rank says so a little before: time enough to ask where all are. */
CASE(a_ranks_time_is_up)
{
    start(3, 3);
    for (size_t i = 0; i < 3; i++)
        s.world.ranks[i].impatient = true;
    stub_rank_commit(&s.world.ranks[0], 5);
    stub_rank_commit(&s.world.ranks[2], 4);
    assert_int_equal(ask_for_newest(), FANIN_ERR_TIMEOUT);
    assert_error("in time: rank 1 at ");
    assert_error(" is at step 3 (stable); rank 2 at ");
    assert_error(" is at step 4 (stable)");
    assert_int_equal(s.error.rank, 1);
    assert_int_equal(stub_world_asked(&s.world, MSG_LIST), 3);
}

/* Its word would end the pull long before its time. */
CASE(who_has_not_waited_is_not_believed)
{
    start(2, 2);
    odd.rank = &s.world.ranks[1];
    odd.error = FANIN_ERR_TIMEOUT;
    assert_int_equal(ask_for_newest(), FANIN_ERR_PROTOCOL);
    assert_error(
        " says that its time is up after 0 ms of the 9500 ms that it was given, twice");
    assert_int_equal(s.error.rank, 1);
}

/* Of a host that stood still the clock is behind: the ranks' time is up long before the pull's. */
CASE(who_waited_by_another_clock_is_asked_again)
{
    start(2, 2);
    odd.rank = &s.world.ranks[1];
    odd.error = FANIN_ERR_TIMEOUT;
    odd.once = true;
    stub_time_at_ms(2000, commit_4, &s.world.ranks[0]);
    stub_time_at_ms(2000, commit_4, &s.world.ranks[1]);
    assert_ok(ask_for(FANIN_STEP_EXACT, 4, NULL), s.error);
    assert_agreed(3, 4);
}

/* Ranks are not given as long at once. */
CASE(a_pull_waits_for_hours)
{
    start(2, 2);
    for (size_t i = 0; i < 2; i++)
        s.world.ranks[i].impatient = true;
    s.call_ms = 3 * 3600000;
    assert_int_equal(ask_for(FANIN_STEP_EXACT, 4, NULL), FANIN_ERR_TIMEOUT);
    assert_in_range(s.took_ms, s.call_ms / 100 * 94, s.call_ms);
    stub_time_at_ms(2 * 3600000, commit_4, &s.world.ranks[0]);
    stub_time_at_ms(2 * 3600000, commit_4, &s.world.ranks[1]);
    assert_ok(ask_for(FANIN_STEP_EXACT, 4, NULL), s.error);
    assert_agreed(3, 4);
}

static void cancel(void *client)
{
    fanin_client_cancel(client);
}

CASE(a_wait_can_be_cancelled)
{
    start(2, 2);
    stub_time_at_ms(300, cancel, s.world.client);
    assert_int_equal(ask_for(FANIN_STEP_EXACT, 4, NULL), FANIN_ERR_CANCELLED);
    assert_int_equal(s.took_ms, 300);
    /* Who answers now answers nobody; the next call is a new one. */
    stub_rank_commit(&s.world.ranks[0], 4);
    stub_rank_commit(&s.world.ranks[1], 4);
    assert_ok(ask_for(FANIN_STEP_EXACT, 4, NULL), s.error);
    assert_agreed(3, 4);
}

/* ---------------------------------------------------------------- enough */

CASE(enough_is_what_holds_everything)
{
    static const struct {
        bool use[4];
        bool enough;
    } cases[] = {{{1, 1, 1, 1}, true},
                 {{1, 1, 0, 0}, true},
                 {{0, 1, 1, 0}, true},
                 {{1, 0, 1, 0}, false},
                 {{0, 0, 0, 1}, false}};
    start(4, 2);
    assert_ok(ask_for_newest(), s.error);
    assert_ok(tables_sync(s.world.client, s.run, s.announced, s.use,
                          deadline_in_ms(CALL_MS), &s.error),
              s.error);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        bool enough = !cases[i].enough;
        assert_ok(agree_sufficient(s.world.client, s.run, cases[i].use,
                                   deadline_in_ms(CALL_MS), &enough, &s.error),
                  s.error);
        assert_int_equal(enough, cases[i].enough);
    }
}

/* Of two that are gone the one without which the others do not do. */
CASE(the_culprit_is_who_is_needed)
{
    const bool use[] = {true, false, false, false};
    start(4, 2);
    assert_ok(ask_for_newest(), s.error);
    assert_ok(tables_sync(s.world.client, s.run, s.announced, s.use,
                          deadline_in_ms(CALL_MS), &s.error),
              s.error);
    assert_int_equal(agree_culprit(s.world.client, s.run, use, UINT64_MAX), 4);
    stub_rank_hang_up(&s.world.ranks[2]);
    stub_rank_hang_up(&s.world.ranks[3]);
    stub_world_settle(&s.world);
    assert_int_equal(agree_culprit(s.world.client, s.run, use, UINT64_MAX), 3);
}
