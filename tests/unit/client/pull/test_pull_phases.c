/* SPDX-License-Identifier: Apache-2.0 */
/* A pull as a whole, step by step: what ranks are asked in which order, what begins it anew, how it
   ends. */
#include "catalog/tables.h"
#include "ends.h"
#include "log_catcher.h"
#include "stub_ranks.h"
#include "testing.h"
#include <sys/socket.h>

#define RANKS 2
#define PART 100
#define BYTES (RANKS * PART)
#define CALL_MS 20000

static struct {
    stub_world world;
    uint8_t memory[BYTES + 1];
    fanin_pull_options options;
    fanin_result_info info;
    uint64_t took_ms;
    fanin_error error;
} s;

/* What happens when a rank is asked, as often as `times` says: before it answers, or instead. */
static struct {
    message_type of;
    uint32_t rank; /* RANKS: whichever it is */
    unsigned times;
    enum {
        MOVES_ON,
        IS_STALE,
        PAUSES,
        IS_FULL,
        IS_BROKEN,
        STOPS_US,
        LIES,
        SHRINKS,
        HANGS_UP,
        LOSES_DATA,
        SILENCES_ALL, /* and hangs up */
        IS_SILENT
    } act;
    size_t lie;   /* LIES: the byte of its hello that is another one */
    bool of_data; /* hellos: of data connections alone */
    unsigned abandoned, ended;
    unsigned leases;    /* that were asked for, and have not ended */
    unsigned late;      /* hellos of data connections under leases */
    unsigned waits;     /* that the rank had been asked when the last hello came */
    uint64_t last_read; /* its number */
} odd;

/* All of its key table, as part of one that has so many more bytes. */
static bool answer_keys(stub_talk *t, uint64_t request, body *in, uint64_t more)
{
    msg_blob_request m;
    const buffer *keys = &t->rank->keys;
    assert_int_equal(decode_blob_request(in, MSG_KEYS, &m), FANIN_OK);
    msg_blob_page page = {.total = keys->size + more,
                          .offset = m.offset,
                          .data = {keys->data + m.offset, keys->size - m.offset}};
    encode_blob_page(&t->out, request, MSG_KEYS_OK, &page);
    return true;
}

static bool act(stub_talk *t, const frame *f, body *in)
{
    uint8_t *lie = (uint8_t *)&t->rank->hello + odd.lie;
    switch (odd.act) {
    case MOVES_ON:
        for (size_t i = 0; i < RANKS; i++)
            stub_rank_commit(&s.world.ranks[i], s.world.ranks[i].step + 1);
        return stub_answer(t, f, in);
    case PAUSES:
        t->rank->state = WIRE_STATE_PAUSED;
        return stub_answer_error(t, f->request, FANIN_ERR_PAUSED, "the run is paused");
    case IS_FULL:
        return stub_answer_error(t, f->request, FANIN_ERR_LIMIT,
                                 "a session may have 16 data connections");
    case IS_BROKEN:
        return stub_answer_error(t, f->request, FANIN_ERR_TRANSPORT,
                                 "the memory of \"t\" cannot be read");
    case STOPS_US:
        stub_time_pass_ms(60000);
        return stub_answer(t, f, in);
    case LIES:
        *lie ^= 1;
        (void)stub_answer(t, f, in);
        *lie ^= 1;
        return true;
    case LOSES_DATA:
        shutdown(stub_rank_talk(t->rank, ROLE_DATA)->source.fd, SHUT_RDWR);
        return stub_answer(t, f, in);
    case SHRINKS:
        return answer_keys(t, f->request, in, odd.times);
    case SILENCES_ALL:
        odd.of = MSG_WAIT;
        odd.rank = RANKS;
        odd.times = RANKS;
        odd.act = IS_SILENT;
        return false;
    case IS_STALE:
        encode_end_ok(&t->out, f->request, &(msg_end_ok){.good = false, .step = 1});
        return true;
    default:
        return odd.act == IS_SILENT;
    }
}

/* Whether it is a data connection's hello. */
static bool note_asked(const stub_rank *r, const frame *f, const body *in)
{
    msg_end end;
    msg_wait wait;
    msg_hello hello = {0};
    body copy = *in;
    if (f->type == MSG_END) {
        assert_int_equal(decode_end(&copy, &end), FANIN_OK);
        odd.abandoned += end.abandon;
        odd.ended += !end.abandon;
        odd.leases -= odd.leases > 0;
    } else if (f->type == MSG_WAIT) {
        assert_int_equal(decode_wait(&copy, &wait), FANIN_OK);
        odd.leases += wait.begin_version != 0;
    } else if (f->type == MSG_HELLO) {
        assert_int_equal(decode_hello(&copy, &hello), FANIN_OK);
        odd.late += hello.role == ROLE_DATA && odd.leases > 0;
        odd.waits = r->asked[MSG_WAIT];
    }
    odd.leases += f->type == MSG_BEGIN;
    if (f->type == MSG_READ)
        odd.last_read = f->request;
    return hello.role == ROLE_DATA;
}

static bool answer(stub_talk *t, const frame *f, body *in)
{
    bool of_data = note_asked(t->rank, f, in);
    if (odd.times == 0 || f->type != odd.of || (odd.of_data && !of_data) ||
        (odd.rank < RANKS && t->rank->hello.rank != odd.rank))
        return stub_answer(t, f, in);
    odd.times--;
    return act(t, f, in);
}

static void acts(message_type of, uint32_t rank, unsigned times, int what)
{
    odd.of = of;
    odd.rank = rank;
    odd.times = times;
    odd.act = what;
}

/* The tensor is in two parts, one a rank, or both ranks have all of it. */
static void begin_with(bool replicas, const fanin_client_config *config)
{
    memset(&s, 0, sizeof s);
    memset(&odd, 0, sizeof odd);
    s.error = (fanin_error)FANIN_ERROR_INIT;
    stub_world_start_with(&s.world, RANKS, replicas ? 1 : RANKS,
                          replicas ? BYTES : PART, config);
    s.world.client->plan_seed = 0; /* rank 0 gives the keys */
    for (size_t i = 0; i < RANKS; i++)
        s.world.ranks[i].answer = answer;
    s.options = make_options(FANIN_STEP_NEWEST, 0);
}

static void begin(bool replicas)
{
    fanin_client_config config;
    fanin_client_config_init(&config, sizeof config);
    config.no_ucx = true;
    begin_with(replicas, &config);
}

static int tear_down(void **state)
{
    stub_world_stop(&s.world);
    return 0;
}

#define CASE(name) TEST_WITH(name, NULL, tear_down)

static fanin_status pull(void)
{
    fanin_box box;
    fanin_result *result = NULL;
    fanin_tensor t = make_tensor("t", FANIN_DTYPE_U8, BYTES, 0, &box, s.memory);
    memset(s.memory, 0xcc, sizeof s.memory);
    uint64_t before = clock_ns();
    fanin_status status =
        fanin_client_pull(s.world.client, &s.options, &t, 1, &result, &s.error);
    s.took_ms = (clock_ns() - before) / 1000000;
    s.info = (fanin_result_info){.struct_size = sizeof s.info};
    if (status == FANIN_OK)
        fanin_result_get(result, &s.info);
    s.info.path_reason = s.info.ranks_json = NULL;
    fanin_result_free(&result);
    return status;
}

/* All bytes, of this step. */
static void expect_pull(uint64_t step)
{
    assert_ok(pull(), s.error);
    assert_int_equal(s.info.step, step);
    assert_int_equal(s.info.path, FANIN_PATH_STREAM);
    for (uint64_t i = 0; i < BYTES; i++)
        assert_int_equal(s.memory[i], stub_byte(i));
    assert_int_equal(s.memory[BYTES], 0xcc);
}

static void assert_asked(message_type type, unsigned first, unsigned second)
{
    assert_int_equal(s.world.ranks[0].asked[type], first);
    assert_int_equal(s.world.ranks[1].asked[type], second);
}

static void forget_asked(void)
{
    for (size_t i = 0; i < RANKS; i++)
        memset(s.world.ranks[i].asked, 0, sizeof s.world.ranks[i].asked);
    odd.abandoned = odd.ended = 0;
}

/* ------------------------------------------------------------------ phases */

CASE(each_phase_asks_once)
{
    begin(false);
    expect_pull(1);
    assert_int_equal(s.info.restarts, 0);
    assert_asked(MSG_WAIT, 1, 1);
    assert_asked(MSG_KEYS, 1, 0);
    assert_asked(MSG_BOXES, 1, 1);
    assert_asked(MSG_REGIONS, 0, 0);
    assert_asked(MSG_BEGIN, 1, 1);
    assert_asked(MSG_READ, 1, 1);
    assert_asked(MSG_END, 1, 1);
    assert_int_equal(odd.ended, RANKS);
}

/* What was learnt stays: catalogs, plan, connections. */
CASE(the_next_pull_asks_less)
{
    begin(false);
    expect_pull(1);
    for (size_t i = 0; i < RANKS; i++)
        stub_rank_commit(&s.world.ranks[i], 2);
    forget_asked();
    expect_pull(2);
    assert_asked(MSG_HELLO, 0, 0);
    assert_asked(MSG_KEYS, 0, 0);
    assert_asked(MSG_BOXES, 0, 0);
    assert_asked(MSG_READ, 1, 1);
    assert_int_equal(odd.ended, RANKS);
}

static void look_at_runs(unsigned n)
{
    uint64_t step;
    char name[32];
    for (unsigned i = 0; i < n; i++) {
        fanin_pull_options options = make_options(FANIN_STEP_NEWEST, 0);
        snprintf(name, sizeof name, "lora:other-%u", i);
        options.publication = name;
        assert_ok(fanin_client_wait(s.world.client, &options, &step, &s.error),
                  s.error);
    }
}

/* Runs come and go while a client lives. */
CASE(of_many_runs_the_last_are_kept)
{
    size_t n = 0;
    begin(false);
    expect_pull(1);
    look_at_runs(20);
    forget_asked();
    expect_pull(1);
    assert_asked(MSG_BOXES, 0, 0);
    look_at_runs(500);
    for (const publication *p = s.world.client->publications; p; p = p->next)
        n++;
    assert_in_range(n, 20, 100);
    expect_pull(1);
    assert_asked(MSG_BOXES, 1, 1);
}

/* Everything is at hand: one round before the reads, and one behind them. */
CASE(a_warm_pull_begins_with_the_announcements)
{
    begin(false);
    expect_pull(1);
    forget_asked();
    expect_pull(1);
    assert_asked(MSG_WAIT, 1, 1);
    assert_asked(MSG_BEGIN, 0, 0);
    assert_asked(MSG_READ, 1, 1);
    assert_asked(MSG_END, 1, 1);
    assert_int_equal(odd.ended, RANKS);
}

CASE(ranks_that_know_no_early_leases_are_begun)
{
    begin(false);
    s.world.ranks[1].old = true;
    expect_pull(1);
    forget_asked();
    expect_pull(1);
    assert_asked(MSG_BEGIN, 0, 1);
    assert_asked(MSG_END, 1, 1);
    assert_int_equal(odd.ended, RANKS);
}

/* New tables are fetched without a lease: rank 0, whose catalog is the same, gets its lease back.
   */
CASE(no_table_is_fetched_under_a_lease)
{
    begin(false);
    expect_pull(1);
    stub_rank_commit(&s.world.ranks[1], 1);
    s.world.ranks[1].version++;
    forget_asked();
    expect_pull(1);
    assert_asked(MSG_BOXES, 0, 1);
    assert_asked(MSG_BEGIN, 1, 1);
    assert_asked(MSG_END, 2, 1);
    assert_int_equal(odd.abandoned, 1);
    assert_int_equal(odd.ended, RANKS);
}

/* Neither is a connection made, nor are hands shaken, however the pull begins. */
CASE(no_connection_is_made_under_a_lease)
{
    fanin_box box;
    fanin_session *session = NULL;
    fanin_tensor t = make_tensor("t", FANIN_DTYPE_U8, BYTES, 0, &box, s.memory);
    begin(false);
    expect_pull(1);
    for (unsigned i = 0; i < 2; i++) {
        shutdown(stub_rank_talk(&s.world.ranks[1], ROLE_DATA)->source.fd, SHUT_RDWR);
        stub_world_settle(&s.world);
        forget_asked();
        if (i == 0) {
            expect_pull(1);
        } else {
            assert_ok(fanin_client_begin(s.world.client, &s.options, &t, 1, &session,
                                         &s.error),
                      s.error);
            assert_ok(fanin_session_read(session, 0, 1, &s.error), s.error);
            assert_ok(fanin_session_end(&session, NULL, &s.error), s.error);
        }
        assert_asked(MSG_HELLO, 0, 1);
        assert_int_equal(odd.ended, RANKS);
    }
    assert_int_equal(odd.late, 0);
}

/* Leases that came with the announcements go back before a connection that was lost with these is
   made again. */
CASE(no_lease_waits_for_a_lost_connection)
{
    begin(false);
    expect_pull(1);
    forget_asked();
    acts(MSG_WAIT, 1, 1, LOSES_DATA);
    expect_pull(1);
    assert_int_equal(s.info.restarts, 0);
    assert_asked(MSG_HELLO, 0, 1);
    assert_int_equal(odd.late, 0);
    assert_asked(MSG_BEGIN, 1, 1);
    assert_int_equal(odd.ended, RANKS);
}

/* The other one's connection is there. */
CASE(who_answers_no_connection_is_named)
{
    for (uint32_t i = 0; i < RANKS; i++) {
        char silent[80];
        begin(false);
        s.options.timeout_ms = 1000;
        acts(MSG_HELLO, i, 1, IS_SILENT);
        odd.of_data = true;
        assert_int_equal(pull(), FANIN_ERR_TIMEOUT);
        assert_int_equal(s.took_ms, 1000);
        assert_int_equal(s.error.rank, i);
        snprintf(silent, sizeof silent, "in phase connect, waiting for rank %u at %s",
                 (unsigned)i, s.world.ranks[i].address);
        assert_says(s.error.message, silent);
        if (i + 1 < RANKS)
            tear_down(NULL);
    }
}

/* An attempt that begins anew has its connections when the next step is announced: made after that,
   they would be what the next update meets, again and again. */
CASE(connections_are_made_again_before_a_step_is_agreed)
{
    begin(false);
    acts(MSG_READ, 1, 1, HANGS_UP);
    expect_pull(1);
    assert_int_equal(s.info.restarts, 1);
    assert_asked(MSG_HELLO, 2, 3);
    assert_asked(MSG_WAIT, 2, 2);
    assert_int_equal(odd.waits, 1);
}

/* Who has one connection reads: one that is not answered costs a moment once, and no lease. */
CASE(a_silent_connection_is_not_waited_for_long)
{
    fanin_client_config config;
    fanin_client_config_init(&config, sizeof config);
    config.no_ucx = true;
    config.streams_per_rank = 3;
    begin_with(false, &config);
    acts(MSG_HELLO, 1, 1, IS_SILENT);
    odd.of_data = true;
    expect_pull(1);
    assert_int_equal(odd.times, 0);
    assert_in_range(s.took_ms, 1, 999);
    assert_int_equal(odd.late, 0);
    expect_pull(1);
    assert_int_equal(s.took_ms, 0);
    assert_asked(MSG_HELLO, 4, 4);
    stub_time_pass_ms(20000); /* it is given up, and made again beside what is read */
    expect_pull(1);
    assert_asked(MSG_HELLO, 4, 4);
    expect_pull(1);
    assert_asked(MSG_HELLO, 4, 5);
    assert_int_equal(s.info.restarts, 0);
}

/* A stale end begins all anew, with leases of its own. */
CASE(a_stale_end_asks_for_leases_again)
{
    begin(false);
    expect_pull(1);
    forget_asked();
    acts(MSG_END, 1, 1, IS_STALE);
    expect_pull(1);
    assert_int_equal(s.info.restarts, 1);
    assert_asked(MSG_WAIT, 2, 2);
    assert_asked(MSG_BEGIN, 0, 0);
    assert_asked(MSG_END, 2, 2);
}

CASE(of_replicas_one_is_read)
{
    begin(true);
    expect_pull(1);
    assert_int_equal(stub_world_asked(&s.world, MSG_READ), 1);
}

typedef struct told {
    unsigned calls;
    uint64_t last;
} told;

static void on_progress(void *cookie, uint64_t done, uint64_t total)
{
    told *t = cookie;
    assert_true(done >= t->last && done <= total);
    assert_int_equal(total, BYTES);
    t->calls++;
    t->last = done;
}

CASE(progress_is_told)
{
    told t = {0};
    begin(false);
    s.options.progress = on_progress;
    s.options.progress_cookie = &t;
    expect_pull(1);
    assert_true(t.calls > 0);
}

typedef struct ranks_told {
    unsigned calls;
    uint64_t quiet_ms; /* of the slowest rank, last */
    uint64_t done[RANKS];
} ranks_told;

static void on_rank_progress(void *cookie, const fanin_pull_progress *p)
{
    ranks_told *t = cookie;
    uint64_t sum = 0;
    t->calls++;
    assert_int_equal(p->struct_size, sizeof *p);
    assert_int_equal(p->bytes_total, BYTES);
    assert_int_equal(p->n_ranks, RANKS);
    for (size_t i = 0; i < p->n_ranks; i++) {
        const fanin_rank_progress *r = p->ranks[i];
        assert_int_equal(r->rank, i);
        assert_int_equal(r->bytes_total, PART);
        assert_int_equal(r->path, FANIN_PATH_STREAM);
        assert_string_equal(r->address, s.world.ranks[i].address);
        sum += t->done[i] = r->bytes_done;
    }
    assert_int_equal(sum, p->bytes_done);
    if (!p->slowest)
        return;
    assert_int_equal(p->slowest->rank, 1);
    assert_true(p->slowest->quiet_ms >= 1000);
    t->quiet_ms = p->slowest->quiet_ms;
}

CASE(it_is_told_which_rank_holds_it_up)
{
    ranks_told t = {0};
    begin(false);
    acts(MSG_READ, 1, 9, IS_SILENT);
    s.options.rank_progress = on_rank_progress;
    s.options.progress_cookie = &t;
    assert_int_equal(pull(), FANIN_ERR_TIMEOUT);
    assert_int_equal(t.done[0], PART);
    assert_int_equal(t.done[1], 0);
    assert_in_range(t.quiet_ms, CALL_MS - 1000, CALL_MS);
    assert_in_range(t.calls, CALL_MS / 50 - 20, CALL_MS / 50 + 20);
    stub_world_settle(&s.world);
    odd.times = 0;
    t = (ranks_told){0};
    expect_pull(1);
    assert_int_equal(t.quiet_ms, 0);
}

/* Who asks for nothing finds it in the log: after 5 s, 10 s and so on. */
CASE(the_log_says_it_too)
{
    begin(false);
    s.world.client->log = (logger){.fn = log_catch};
    log_listen("slow-rank");
    acts(MSG_READ, 1, 9, IS_SILENT);
    assert_int_equal(pull(), FANIN_ERR_TIMEOUT);
    log_expect(2, "lora:0 waits for rank 1 at ");
    log_expect(2, "no byte for 10 s, 0.0 of 0.0 MB are here");
}

/* ------------------------------------------------------------ begun anew */

/* Between the agreement and the begin. */
CASE(ranks_that_moved_on_are_asked_anew)
{
    begin(false);
    acts(MSG_BEGIN, 0, 1, MOVES_ON);
    expect_pull(2);
    assert_int_equal(odd.ended, RANKS);
    assert_asked(MSG_READ, 1, 1);
}

/* One was granted, the other was not: what was granted is given back. */
CASE(half_a_begin_is_given_back)
{
    begin(false);
    acts(MSG_BEGIN, 1, 1, MOVES_ON);
    expect_pull(2);
    assert_true(odd.abandoned <= 1);
    assert_int_equal(odd.ended, RANKS);
}

CASE(bytes_that_were_rewritten_are_read_anew)
{
    begin(false);
    acts(MSG_END, 1, 2, IS_STALE);
    expect_pull(1);
    assert_int_equal(s.info.restarts, 2);
    assert_asked(MSG_READ, 3, 3);
}

CASE(as_often_as_it_may)
{
    begin(false);
    s.options.max_attempts = 2;
    acts(MSG_END, 1, 2, IS_STALE);
    assert_int_equal(pull(), FANIN_ERR_STALE);
    assert_int_equal(s.error.rank, 1);
    assert_asked(MSG_READ, 2, 2);
    expect_pull(1); /* the client is as good as before */
}

CASE(an_exact_step_is_not_exchanged)
{
    begin(false);
    s.options = make_options(FANIN_STEP_EXACT, 1);
    acts(MSG_BEGIN, 0, 1, MOVES_ON);
    assert_int_equal(pull(), FANIN_ERR_SUPERSEDED);
    assert_says(s.error.message,
                "step 1 of lora:0 has passed: the trainer is at step 2");
}

CASE(a_replica_steps_in)
{
    static const message_type when[] = {MSG_BEGIN, MSG_READ, MSG_END};
    for (size_t i = 0; i < sizeof when / sizeof *when; i++) {
        begin(true);
        acts(when[i], RANKS, 1, HANGS_UP);
        expect_pull(1);
        assert_int_equal(odd.times, 0);
        if (i < 2)
            tear_down(NULL);
    }
}

/* It answers what it is asked, and gives no data connection, as long as it is asked for one: all
   that it has comes from the other one. */
CASE(a_replica_serves_for_one_without_connections)
{
    static const int how[] = {HANGS_UP, IS_FULL, IS_SILENT};
    for (uint32_t i = 0; i < RANKS * sizeof how / sizeof *how; i++) {
        begin(true);
        acts(MSG_HELLO, i % RANKS, 1000, how[i / RANKS]);
        odd.of_data = true;
        expect_pull(1);
        assert_in_range(s.info.restarts, 0, 1);
        expect_pull(1); /* it is known now */
        assert_int_equal(s.info.restarts, 0);
        if (i + 1 < RANKS * sizeof how / sizeof *how)
            tear_down(NULL);
    }
}

/* Nor need it be lost: the other one can read its memory. */
CASE(a_replica_serves_for_one_with_unreadable_memory)
{
    for (uint32_t i = 0; i < RANKS; i++) {
        begin(true);
        acts(MSG_READ, i, 1000, IS_BROKEN);
        expect_pull(1);
        assert_in_range(s.info.restarts, 0, 1);
        if (i + 1 < RANKS)
            tear_down(NULL);
    }
}

static fanin_status read_by_session(void)
{
    fanin_box box;
    fanin_session *session = NULL;
    fanin_tensor t = make_tensor("t", FANIN_DTYPE_U8, BYTES, 0, &box, s.memory);
    assert_ok(fanin_client_begin(s.world.client, &s.options, &t, 1, &session, &s.error),
              s.error);
    fanin_status status = fanin_session_read(session, 0, 1, &s.error);
    fanin_session_abandon(&session);
    return status;
}

/* A session that loses a rank is over; the next one knows. */
CASE(the_next_session_reads_from_the_replica)
{
    for (uint32_t i = 0; i < RANKS; i++) {
        begin(true);
        acts(MSG_READ, i, 1000, HANGS_UP);
        (void)read_by_session();
        assert_ok(read_by_session(), s.error);
        if (i + 1 < RANKS)
            tear_down(NULL);
    }
}

/* Both are tried in turn. */
CASE(of_two_without_connections_each_is_tried)
{
    begin(true);
    acts(MSG_HELLO, RANKS, 3, HANGS_UP);
    odd.of_data = true;
    expect_pull(1);
    assert_int_equal(s.info.restarts, 3);
    assert_int_equal(odd.times, 0);
}

/* ------------------------------------------------------------------- ends */

CASE(a_run_that_pauses_ends_it)
{
    begin(false);
    acts(MSG_BEGIN, 1, 1, PAUSES);
    assert_int_equal(pull(), FANIN_ERR_PAUSED);
    assert_int_equal(s.error.rank, 1);
    assert_says(s.error.message, "the run is paused");
    s.world.ranks[1].state = WIRE_STATE_STABLE;
    expect_pull(1);
}

CASE(a_rank_that_serves_nothing_ends_it_in_time)
{
    begin(false);
    acts(MSG_READ, 1, 9, IS_SILENT);
    assert_int_equal(pull(), FANIN_ERR_TIMEOUT);
    assert_int_equal(s.took_ms, CALL_MS);
    stub_world_settle(&s.world);
    assert_int_equal(odd.abandoned, RANKS); /* the leases are given back */
    odd.times = 0;
    expect_pull(1);
}

/* It has not seen yet that those of pulls before are closed. */
CASE(a_rank_with_too_many_connections_is_asked_again)
{
    begin(false);
    acts(MSG_HELLO, 1, 5, IS_FULL);
    expect_pull(1);
    assert_int_equal(s.info.restarts, 5);
    assert_int_equal(odd.abandoned, 0); /* it never came to leases */
}

/* It is asked less and less often, and told of in the end. */
CASE(as_long_as_there_is_time)
{
    begin(false);
    acts(MSG_HELLO, 1, 1000000, IS_FULL);
    assert_int_equal(pull(), FANIN_ERR_TIMEOUT);
    assert_int_equal(s.error.rank, 1);
    assert_says(s.error.message, "a session may have 16 data connections");
    assert_int_equal(s.took_ms, CALL_MS);
    assert_in_range(1000000 - odd.times, CALL_MS / 512, CALL_MS / 128);
}

/* Nobody had the time to answer since: what was lost used it up, and not they. */
CASE(time_that_went_by_with_losses_is_told_of)
{
    begin(false);
    s.options.timeout_ms = 100;
    acts(MSG_READ, 1, 1, SILENCES_ALL);
    assert_int_equal(pull(), FANIN_ERR_TIMEOUT);
    assert_int_equal(s.error.rank, 1);
    assert_says(s.error.message,
                "the deadline passed after 1 restarts (last: rank 1 at ");
    assert_says(s.error.message, " closed a data connection");
    assert_int_equal(odd.times, 0);
}

/* If they had it, it is their silence. */
CASE(a_silence_after_a_loss_is_told_of)
{
    begin(false);
    acts(MSG_READ, 1, 1, SILENCES_ALL);
    assert_int_equal(pull(), FANIN_ERR_TIMEOUT);
    assert_says(s.error.message, "was not committed on all ranks in time: ranks 0-1 ");
}

CASE(a_table_has_one_size)
{
    begin(false);
    acts(MSG_KEYS, 0, 2, SHRINKS);
    assert_int_equal(pull(), FANIN_ERR_PROTOCOL);
    assert_int_equal(s.error.rank, 0);
    assert_says(s.error.message, " sent a page of a table of ");
    expect_pull(1);
}

/* A data connection leads to the rank, and into the session, of its control connection. */
CASE(data_connections_lead_to_the_rank)
{
    static const size_t lies[] = {offsetof(msg_hello_ok, world_id),
                                  offsetof(msg_hello_ok, session),
                                  offsetof(msg_hello_ok, rank)};
    begin(false);
    for (size_t i = 0; i < sizeof lies / sizeof *lies; i++) {
        acts(MSG_HELLO, 1, 1, LIES);
        odd.lie = lies[i];
        assert_int_equal(pull(), FANIN_ERR_PROTOCOL);
        assert_int_equal(s.error.rank, 1);
        assert_says(s.error.message, "answers a data connection as another world's");
    }
    expect_pull(1);
}

/* A reply too many to one pull fits no request of the next one. */
CASE(numbers_of_reads_are_used_once)
{
    begin(false);
    expect_pull(1);
    uint64_t first = odd.last_read;
    expect_pull(1);
    assert_true(odd.last_read > first);
    assert_asked(MSG_HELLO, 2, 2);
}

/* Whoever is on the way may close it while nothing is read. */
CASE(a_data_connection_that_was_closed_is_made_again)
{
    begin(false);
    expect_pull(1);
    stub_talk *t = stub_rank_talk(&s.world.ranks[1], ROLE_DATA);
    assert_non_null(t);
    shutdown(t->source.fd, SHUT_RDWR);
    stub_world_settle(&s.world);
    forget_asked();
    expect_pull(1);
    assert_int_equal(s.info.restarts, 0);
    assert_asked(MSG_HELLO, 0, 1);
}

/* While this process was stopped nobody read what the ranks said: that is not their silence. */
CASE(who_was_stopped_blames_nobody)
{
    static const message_type when[] = {MSG_KEYS, MSG_WAIT, MSG_READ, MSG_END};
    begin(false);
    s.options.timeout_ms = 100 * CALL_MS;
    for (size_t i = 0; i < sizeof when / sizeof *when; i++) {
        acts(when[i], RANKS, 1, STOPS_US);
        expect_pull(1);
        assert_int_equal(s.info.restarts, 0);
        assert_int_equal(odd.times, 0);
    }
}

static void cancel(void *client)
{
    fanin_client_cancel(client);
}

CASE(it_can_be_cancelled_in_each_phase)
{
    static const message_type when[] = {MSG_KEYS, MSG_BOXES, MSG_BEGIN, MSG_READ,
                                        MSG_END};
    begin(false);
    for (size_t i = 0; i < sizeof when / sizeof *when; i++) {
        stub_world_settle(&s.world); /* leases of the one before are given back */
        acts(when[i], RANKS, 1, IS_SILENT);
        stub_time_at_ms(700, cancel, s.world.client);
        assert_int_equal(pull(), FANIN_ERR_CANCELLED);
        assert_int_equal(s.took_ms, 700);
        assert_int_equal(odd.times, 0);
    }
    expect_pull(1);
}
