/* SPDX-License-Identifier: Apache-2.0 */
/* Begin and end on all ranks of a pull at once: who is asked, what is held afterwards. */
#include "pull/pull.h"
#include "stub_ranks.h"
#include "testing.h"

#define RANKS 3
#define PART 16
#define CALL_MS 1000

typedef struct scene {
    stub_world world;
    publication *run;
    announcement announced[RANKS];
    bool use[RANKS];
    reader_lease leases[RANKS];
    fanin_error error;
} scene;

/* What one rank does instead of what a server does, and what its last end said. */
static struct {
    uint32_t rank;
    message_type of;
    enum {
        AS_EVER,
        REFUSES,
        TALKS_NONSENSE,
        IS_PAUSED,
        HANGS_UP,
        IS_SILENT,
        IS_STALE,
        IS_BEHIND
    } act;
    bool abandoned[RANKS], kept[RANKS];
    uint8_t tokens[RANKS][16];
    uint64_t begun[RANKS], given_back[RANKS]; /* requests */
} odd;

static bool answer(stub_talk *t, const frame *f, body *in)
{
    uint32_t rank = t->rank->hello.rank;
    msg_end end;
    if (f->type == MSG_END) {
        body copy = *in;
        assert_int_equal(decode_end(&copy, &end), FANIN_OK);
        odd.abandoned[rank] = end.abandon;
        odd.kept[rank] = end.keep;
        odd.given_back[rank] = end.begin;
        memcpy(odd.tokens[rank], end.token, sizeof end.token);
    }
    if (f->type == MSG_BEGIN)
        odd.begun[rank] = f->request;
    if (odd.act == AS_EVER || f->type != odd.of || rank != odd.rank)
        return stub_answer(t, f, in);
    switch (odd.act) {
    case REFUSES:
        return stub_answer_error(t, f->request, FANIN_ERR_LIMIT, "too many readers");
    case IS_PAUSED:
        return stub_answer_error(t, f->request, FANIN_ERR_PAUSED, "the run is paused");
    case TALKS_NONSENSE:
        encode_empty(&t->out, f->request, f->type + 1);
        return true;
    case IS_BEHIND:
        encode_end_ok(&t->out, f->request, &(msg_end_ok){.good = true, .step = 0});
        return true;
    case IS_STALE:
        encode_end_ok(&t->out, f->request, &(msg_end_ok){.good = false, .step = 9});
        return true;
    default:
        return odd.act == IS_SILENT;
    }
}

static int set_up(void **state)
{
    static scene s;
    s = (scene){.error = FANIN_ERROR_INIT};
    memset(&odd, 0, sizeof odd);
    stub_world_start(&s.world, RANKS, RANKS, PART);
    s.run = tables_of(s.world.client, STUB_RUN);
    assert_non_null(s.run);
    for (size_t i = 0; i < RANKS; i++) {
        s.world.ranks[i].answer = answer;
        s.announced[i] = (announcement){.valid = true, .step = 1, .version = 1};
        s.use[i] = true;
    }
    *state = &s;
    return 0;
}

static int tear_down(void **state)
{
    scene *s = *state;
    stub_world_stop(&s->world);
    return 0;
}

#define CASE(name) TEST_WITH(name, set_up, tear_down)

/* Ranks 0 and 1 have served, if @p some. */
static pull pull_of(scene *s, bool some)
{
    static served served[RANKS];
    static fanin_result result = {.served = served};
    served[0].used = served[1].used = some;
    return (pull){.client = s->world.client,
                  .publication = s->run,
                  .announced = s->announced,
                  .needed = s->use,
                  .leases = s->leases,
                  .result = &result,
                  .at = deadline_in_ms(CALL_MS)};
}

static fanin_status begin(scene *s)
{
    pull p = pull_of(s, false);
    return lease_round_begin(&p, &s->error);
}

static fanin_status end(scene *s)
{
    pull p = pull_of(s, false);
    return lease_round_end(&p, &s->error);
}

static fanin_status confirm(scene *s)
{
    pull p = pull_of(s, true);
    return lease_round_confirm(&p, &s->error);
}

static void acts(uint32_t rank, message_type of, int act)
{
    odd.rank = rank;
    odd.of = of;
    odd.act = act;
}

static size_t count_held(const scene *s)
{
    size_t n = 0;
    for (size_t i = 0; i < RANKS; i++)
        n += s->leases[i].held;
    return n;
}

/* The error is that of rank 1. */
static void assert_blames_1(const scene *s, const char *words)
{
    assert_int_equal(s->error.rank, 1);
    assert_string_equal(s->error.address, s->world.ranks[1].address);
    if (!strstr(s->error.message, words))
        fail_msg("\"%s\" does not say \"%s\"", s->error.message, words);
}

CASE(only_ranks_in_use_are_asked)
{
    scene *s = *state;
    s->use[1] = false;
    assert_ok(begin(s), s->error);
    assert_false(s->leases[1].held);
    assert_int_equal(s->world.ranks[1].asked[MSG_BEGIN], 0);
    assert_ok(end(s), s->error);
    assert_int_equal(count_held(s), 0);
    assert_int_equal(s->world.ranks[1].asked[MSG_END], 0);
    for (size_t i = 0; i < RANKS; i += 2) {
        assert_int_equal(s->world.ranks[i].asked[MSG_END], 1);
        assert_int_equal(odd.tokens[i][0], 0x10 + i); /* the one that the rank gave */
        assert_false(odd.abandoned[i]);
        assert_int_equal(s->leases[i].lease_ms, 1000);
    }
}

CASE(who_has_served_confirms_and_keeps_its_lease)
{
    scene *s = *state;
    assert_ok(begin(s), s->error);
    assert_ok(confirm(s), s->error);
    assert_ok(confirm(s), s->error);
    assert_int_equal(count_held(s), RANKS);
    assert_true(odd.kept[0] && odd.kept[1]);
    assert_int_equal(s->world.ranks[2].asked[MSG_END], 0);
    assert_ok(end(s), s->error);
    assert_false(odd.kept[0] || odd.kept[2]);
    assert_int_equal(count_held(s), 0);
}

CASE(who_rewrote_confirms_nothing)
{
    scene *s = *state;
    acts(1, MSG_END, IS_STALE);
    assert_ok(begin(s), s->error);
    assert_int_equal(confirm(s), FANIN_ERR_STALE);
    assert_blames_1(s, "rewrote the weights while they were read");
    assert_false(s->leases[1].held);
    assert_int_equal(count_held(s), RANKS - 1);
    acts(1, MSG_END,
         AS_EVER); /* what it has served since is not confirmed by the others */
    assert_int_equal(confirm(s), FANIN_ERR_STALE);
    assert_blames_1(s, "has ended already");
}

/* Who is not waited for is told as one who is. */
static void on_confirmed(void *cookie, fanin_status status, const fanin_error *why)
{
    (void)why;
    assert_int_equal(*(fanin_status *)cookie, 1);
    *(fanin_status *)cookie = status;
}

static fanin_status confirm_later(scene *s, fanin_status *heard, confirmation **list)
{
    pull p = pull_of(s, true);
    *heard = 1;
    return lease_confirm_later(&p, on_confirmed, heard, list, &s->error);
}

CASE(a_confirmation_comes_later)
{
    scene *s = *state;
    confirmation *list = NULL;
    fanin_status heard[3];
    assert_ok(begin(s), s->error);
    assert_ok(confirm_later(s, &heard[0], &list), s->error);
    assert_int_equal(heard[0], 1);
    stub_world_settle(&s->world);
    assert_int_equal(heard[0], FANIN_OK);
    acts(1, MSG_END, IS_STALE);
    assert_ok(confirm_later(s, &heard[1], &list), s->error);
    assert_ok(confirm_later(s, &heard[2], &list), s->error);
    stub_world_settle(&s->world);
    assert_int_equal(heard[1], FANIN_ERR_STALE);
    assert_int_equal(heard[2], FANIN_ERR_STALE);
    assert_null(list);
    assert_int_equal(confirm_later(s, &heard[0], &list), FANIN_ERR_STALE);
    assert_int_equal(heard[0], 1);
}

CASE(a_confirmation_that_is_forgotten_is_not_told)
{
    scene *s = *state;
    confirmation *list = NULL;
    fanin_status heard;
    assert_ok(begin(s), s->error);
    assert_ok(confirm_later(s, &heard, &list), s->error);
    lease_confirm_forget(s->world.client, &list);
    assert_null(list);
    stub_world_settle(&s->world);
    assert_int_equal(heard, 1);
}

/* It would take the lease back, and say that all is well. */
CASE(an_older_rank_is_not_asked_to_confirm)
{
    scene *s = *state;
    assert_ok(begin(s), s->error);
    s->world.client->peers[1].control->peer.features &= ~FEATURE_RELAYS;
    assert_int_equal(confirm(s), FANIN_ERR_UNSUPPORTED);
    assert_blames_1(s, "does not confirm");
    assert_int_equal(stub_world_asked(&s->world, MSG_END), 0);
}

CASE(without_leases_nobody_is_asked)
{
    scene *s = *state;
    assert_ok(end(s), s->error);
    lease_round_abandon(s->world.client, s->leases);
    stub_world_settle(&s->world);
    assert_int_equal(stub_world_asked(&s->world, MSG_END), 0);
}

/* The others' leases stay, and are given back unread. */
CASE(one_that_moved_on_makes_it_stale)
{
    scene *s = *state;
    stub_rank_commit(&s->world.ranks[1], 2);
    assert_int_equal(begin(s), FANIN_ERR_STALE);
    assert_blames_1(s, "has moved on: another step");
    assert_false(s->leases[1].held);
    assert_int_equal(count_held(s), 2);
    lease_round_abandon(s->world.client, s->leases);
    assert_int_equal(count_held(s), 0);
    stub_world_settle(&s->world);
    assert_true(odd.abandoned[0] && odd.abandoned[2]);
    assert_int_equal(s->world.ranks[1].asked[MSG_END], 0);
    assert_int_equal(odd.tokens[2][0], 0x12);
}

/* Whether the others suffice is for the next agreement to say. */
CASE(one_that_paused_makes_it_stale)
{
    scene *s = *state;
    acts(1, MSG_BEGIN, IS_PAUSED);
    assert_int_equal(begin(s), FANIN_ERR_STALE);
    assert_int_equal(s->error.status, FANIN_ERR_STALE);
    assert_blames_1(s, "the run is paused");
}

CASE(other_errors_are_the_ranks)
{
    scene *s = *state;
    acts(1, MSG_BEGIN, REFUSES);
    assert_int_equal(begin(s), FANIN_ERR_LIMIT);
    assert_blames_1(s, "too many readers");
    acts(1, MSG_BEGIN, TALKS_NONSENSE);
    assert_int_equal(begin(s), FANIN_ERR_PROTOCOL);
    assert_blames_1(s, "does not fit the request");
    acts(1, MSG_END, TALKS_NONSENSE);
    assert_ok(begin(s), s->error);
    assert_int_equal(end(s), FANIN_ERR_PROTOCOL);
    assert_blames_1(s, "does not fit the request");
    assert_int_equal(count_held(s), 0);
}

CASE(one_that_rewrote_makes_it_stale)
{
    scene *s = *state;
    acts(1, MSG_END, IS_STALE);
    assert_ok(begin(s), s->error);
    assert_int_equal(end(s), FANIN_ERR_STALE);
    assert_blames_1(s,
                    "rewrote the weights while they were read (it is at step 9 now)");
    assert_int_equal(count_held(s), 0);
}

/* What stands was committed. */
CASE(one_that_contradicts_itself_is_told_of)
{
    scene *s = *state;
    acts(1, MSG_END, IS_BEHIND);
    assert_ok(begin(s), s->error);
    assert_int_equal(end(s), FANIN_ERR_PROTOCOL);
    assert_blames_1(s, "says that step 1 stands, and is at step 0");
}

CASE(one_that_goes_away_is_told_of)
{
    scene *s = *state;
    acts(1, MSG_BEGIN, HANGS_UP);
    assert_int_equal(begin(s), FANIN_ERR_CLOSED);
    assert_blames_1(s, "closed the connection");
    assert_int_equal(count_held(s), 2);
    s->leases[1].held = true; /* of a rank that is gone nothing is given back */
    lease_round_abandon(s->world.client, s->leases);
    assert_int_equal(count_held(s), 0);
    stub_world_settle(&s->world);
    assert_int_equal(stub_world_asked(&s->world, MSG_END), 2);
}

/* Its answer to a begin, when nobody waits for it any more. */
static void answer_late(stub_rank *r, const msg_begin_ok *m)
{
    stub_talk *t = stub_rank_talk(r, ROLE_CONTROL);
    encode_begin_ok(&t->out, odd.begun[r->hello.rank], m);
    stub_talk_flush(t);
}

/* What nobody waits for any more is given back before it is there, by its request: the rank's next
   update does not wait for it, whether this client is called again or not. */
CASE(a_lease_that_comes_late_was_given_back)
{
    static const uint8_t none[16] = {0};
    scene *s = *state;
    acts(1, MSG_BEGIN, IS_SILENT);
    assert_int_equal(begin(s), FANIN_ERR_TIMEOUT);
    assert_blames_1(s, "waiting for rank 1");
    assert_false(s->leases[1].held);
    assert_int_equal(count_held(s), 2);
    stub_world_settle(&s->world); /* the rank reads what was sent at the deadline */
    assert_int_equal(stub_world_asked(&s->world, MSG_END), 1);
    assert_true(odd.abandoned[1]);
    assert_true(odd.begun[1] > 0);
    assert_int_equal(odd.given_back[1], odd.begun[1]);
    assert_memory_equal(odd.tokens[1], none, sizeof none);
}

/* Its answer says nothing to anybody. */
CASE(a_late_answer_is_of_no_effect)
{
    scene *s = *state;
    acts(1, MSG_BEGIN, IS_SILENT);
    assert_int_equal(begin(s), FANIN_ERR_TIMEOUT);
    answer_late(&s->world.ranks[1],
                &(msg_begin_ok){.granted = true, .epoch = 1, .token = {0x77}});
    stub_world_settle(&s->world);
    assert_false(s->leases[1].held);
    assert_true(peer_ready(&s->world.client->peers[1]));
    assert_int_equal(s->world.ranks[1].asked[MSG_END], 1);
}
