/* SPDX-License-Identifier: Apache-2.0 */
/* Words: who is told them, and that a word holds its lease's epoch exactly as long as an end would
   be good. The test is in the server's process, so that a word is read as any memory. */
#include "core/rules.h"
#include "publish/words.h"
#include "server_peer.h"
#include "testing.h"

#include <stdlib.h>
#include <string.h>

#define SIZE 1000

static uint8_t memory[2][SIZE];

/* A session that has opened cma, and its lease. */
typedef struct reader_here {
    peer p;
    grant g;
    msg_begin_ok lease;
} reader_here;

static peer open_cma(fanin_server *s)
{
    peer p = peer_open_unix(s);
    peer_request_path(&p, WIRE_PATH_CMA);
    peer_expect(&p, MSG_OPEN_PATH_OK);
    return p;
}

static reader_here lease_here(fanin_server *s)
{
    reader_here r = {.p = open_cma(s)};
    r.g = peer_newest(&r.p);
    r.lease = peer_begin(&r.p, &r.g);
    assert_true(r.lease.granted);
    assert_int_not_equal(r.lease.word, 0);
    return r;
}

static uint64_t read_word(uint64_t word)
{
    return atomic_load((atomic_uint_fast64_t *)(uintptr_t)word);
}

static bool stands(const reader_here *r)
{
    return read_word(r->lease.word) == r->lease.epoch;
}

static fanin_server *start(bool snapshot)
{
    fanin_server *s = server_start_lease(0);
    server_put(s, RUN, "a", memory[0], SIZE);
    if (snapshot)
        server_snapshot(s, 1);
    else
        server_commit(s, 1);
    return s;
}

/* ------------------------------------------------------------------ who is told */

static uint64_t word_of_begin(peer *p)
{
    grant g = peer_newest(p);
    return peer_begin(p, &g).word;
}

static void who_has_not_opened_cma_is_told_none(void **state)
{
    fanin_server *s = start(false);
    peer tcp = peer_open(s), unix_peer = peer_open_unix(s), here = open_cma(s);
    assert_int_equal(word_of_begin(&tcp), 0);
    assert_int_equal(word_of_begin(&unix_peer), 0);
    peer_request_path(&tcp, WIRE_PATH_CMA);
    peer_expect_error(&tcp, FANIN_ERR_UNSUPPORTED);
    assert_int_equal(word_of_begin(&tcp), 0);
    uint64_t word = word_of_begin(&here);
    assert_int_not_equal(word, 0);
    assert_int_equal(word % 8, 0);
}

static msg_wait_ok wait_and_begin(peer *p, const grant *g)
{
    buffer b = {0};
    msg_wait m = {.rule = WIRE_RULE_NEWEST,
                  .timeout_ms = 1000,
                  .begin_version = g->catalog_version};
    msg_wait_ok ok;
    memcpy(m.publication, RUN, sizeof RUN);
    encode_wait(&b, ++p->request, &m);
    peer_send(p, &b);
    body in = peer_expect(p, MSG_WAIT_OK);
    assert_int_equal(decode_wait_ok(&in, &ok), FANIN_OK);
    assert_int_equal(ok.token.size, 16);
    return ok;
}

static void leases_with_announcements_have_words_too(void **state)
{
    fanin_server *s = start(false);
    reader_here r = lease_here(s);
    msg_wait_ok ok = wait_and_begin(&r.p, &r.g);
    assert_int_equal(ok.word, r.lease.word);
    assert_int_equal(ok.epoch, r.lease.epoch);
    peer tcp = peer_open(s);
    ok = wait_and_begin(&tcp, &r.g);
    assert_int_equal(ok.word, 0);
    assert_int_equal(ok.epoch, 0);
}

/* ------------------------------------------------------------------ what they say */

static void pause_run(fanin_server *s)
{
    assert_int_equal(fanin_server_pause(s, RUN, NULL, NULL), FANIN_OK);
}

static void resume_run(fanin_server *s)
{
    assert_int_equal(fanin_server_resume(s, RUN, NULL), FANIN_OK);
}

static void remove_run(fanin_server *s)
{
    assert_int_equal(fanin_server_remove(s, RUN, NULL, NULL), FANIN_OK);
}

static void withdraw_run(fanin_server *s)
{
    assert_int_equal(fanin_server_withdraw(s, RUN, NULL), FANIN_OK);
}

static void move_shard(fanin_server *s)
{
    server_put(s, RUN, "a", memory[1], SIZE);
}

/* Whatever takes the shards away turns the word before it returns. */
static void words_turn_with_whatever_takes_the_bytes(void **state)
{
    static void (*const takes[])(fanin_server * s) = {
        server_begin, pause_run, remove_run, withdraw_run, move_shard,
    };
    for (size_t i = 0; i < sizeof takes / sizeof *takes; i++) {
        fanin_server *s = start(false);
        reader_here r = lease_here(s);
        assert_true(stands(&r));
        takes[i](s);
        assert_false(stands(&r));
        assert_false(peer_end(&r.p, &r.g, false).good);
    }
}

static void no_epoch_comes_back_into_a_word(void **state)
{
    fanin_server *s = start(false);
    reader_here first = lease_here(s);
    uint64_t last = read_word(first.lease.word);
    for (uint64_t step = 2; step < 20; step++) {
        if (step % 3 == 0) {
            remove_run(s);
            server_put(s, RUN, "a", memory[0], SIZE);
        } else if (step % 3 == 1) {
            pause_run(s);
            resume_run(s);
            server_begin(s);
        } else {
            server_begin(s);
        }
        server_commit(s, step);
        reader_here r = lease_here(s);
        assert_int_equal(r.lease.word, first.lease.word); /* the name's for ever */
        assert_true(stands(&r));
        assert_false(stands(&first));
        assert_true(read_word(first.lease.word) > last);
        last = read_word(first.lease.word);
    }
}

static void another_name_has_another_word(void **state)
{
    fanin_server *s = start(false);
    reader_here r = lease_here(s);
    server_put(s, "lora:1", "a", memory[1], SIZE);
    assert_int_equal(fanin_server_commit(s, "lora:1", 1, NULL, NULL), FANIN_OK);
    assert_int_equal(fanin_server_begin_update(s, "lora:1", NULL), FANIN_OK);
    assert_true(stands(&r));
    remove_run(s);
    assert_false(stands(&r));
}

static void publish_copy(fanin_server *s, uint64_t step)
{
    server_begin(s);
    server_snapshot(s, step);
}

/* A copy stands until its arena is filled again, and no longer; whatever the other one is at. */
static void a_copys_word_stands_as_long_as_the_copy(void **state)
{
    fanin_server *s = start(true);
    reader_here r[8];
    r[1] = lease_here(s);
    for (uint64_t step = 2; step < 8; step++) {
        if (step ==
            5) /* other arenas: those before stand for their readers all the same */
            server_put(s, RUN, "b", memory[1], SIZE);
        publish_copy(s, step);
        r[step] = lease_here(s);
        for (uint64_t before = 1; before <= step; before++)
            assert_int_equal(stands(&r[before]), before + 1 >= step);
    }
    remove_run(s);
    for (uint64_t step = 1; step < 8; step++)
        assert_false(stands(&r[step]));
}

/* Of copies and shards in every order of a few hundred calls. */
static void words_say_what_an_end_says(void **state)
{
    uint32_t random = 1;
    for (int snapshot = 0; snapshot < 2; snapshot++) {
        fanin_server *s = start(snapshot);
        uint64_t step = 1;
        reader_here r = lease_here(s);
        for (int i = 0; i < 300; i++) {
            random = random * 1664525 + 1013904223;
            switch (random >> 28) {
            case 0:
            case 1:
                pause_run(s);
                resume_run(s);
                break;
            case 2:
                remove_run(s);
                server_put(s, RUN, "a", memory[random >> 20 & 1], SIZE);
                break;
            case 3:
                server_begin(s);
                assert_int_equal(fanin_server_abort_update(s, RUN, NULL), FANIN_OK);
                break;
            default:
                server_begin(s);
            }
            if (snapshot && random >> 28 < 2)
                server_begin(s);
            if (snapshot)
                server_snapshot(s, ++step);
            else if (random >> 28 > 1)
                server_commit(s, ++step);
            if (random >> 27 & 1)
                continue;
            bool seen = stands(&r);
            assert_int_equal(peer_end(&r.p, &r.g, false).good, seen);
            peer_close(&r.p);
            r = lease_here(s);
        }
    }
}

/* ------------------------------------------------------------------ without the rule */

static bool a_word_turns(void)
{
    fanin_server *s = start(false);
    reader_here r = lease_here(s);
    server_begin(s);
    return !stands(&r);
}

static const reader_here *reads_the_arena;
static bool stood_at_the_fill;

static void look_before_the_fill(void)
{
    stood_at_the_fill = stands(reads_the_arena);
}

static bool a_copys_word_turns(void)
{
    fanin_server *s = start(true);
    reader_here r = lease_here(s);
    publish_copy(s, 2);
    reads_the_arena = &r;
    atomic_store(&server_on_fill, look_before_the_fill);
    publish_copy(s, 3);
    atomic_store(&server_on_fill, NULL);
    return !stood_at_the_fill;
}

static void words_turn_before_anything_is_written(void **state)
{
    assert_true(a_word_turns() && a_copys_word_turns());
    atomic_store(&server_rules_off, RULE_WORDS);
    bool word = a_word_turns(), copy = a_copys_word_turns();
    atomic_store(&server_rules_off, 0);
    assert_false(word || copy);
}

/* ------------------------------------------------------------------ quiet ends */

static void send_quiet_end(peer *p, const grant *g)
{
    buffer b = {0};
    msg_end m = {.quiet = true};
    memcpy(m.token, g->token, sizeof m.token);
    encode_end(&b, ++p->request, &m);
    peer_send(p, &b);
}

static void a_quiet_end_is_taken_and_not_answered(void **state)
{
    fanin_server *s = start(false);
    reader_here r = lease_here(s);
    assert_int_equal(server_stats(s).leases, 1);
    send_quiet_end(&r.p, &r.g);
    peer_ping(&r.p); /* its answer is the next frame */
    assert_int_equal(server_stats(s).leases, 0);
    assert_int_equal(server_stats(s).pulls_good, 1);
    send_quiet_end(&r.p, &r.g); /* a token that is none any more */
    peer_ping(&r.p);
    assert_int_equal(server_stats(s).pulls_good, 1);
}

/* ------------------------------------------------------------------ what ends tell */

static void end_with(peer *p, const grant *g, msg_end m)
{
    buffer b = {0};
    memcpy(m.token, g->token, sizeof m.token);
    encode_end(&b, ++p->request, &m);
    peer_send(p, &b);
    peer_ping(p); /* its answer comes after the end's, if there is one */
}

static void what_was_read_one_sided_is_counted_within_bounds(void **state)
{
    fanin_server *s = start(false);
    reader_here r = lease_here(s);
    end_with(&r.p, &r.g, (msg_end){.quiet = true, .bytes_cma = 5, .bytes_rdma = 7});
    fanin_server_stats now = server_stats(s);
    assert_int_equal(now.bytes_cma, 5);
    assert_int_equal(now.bytes_rdma, 0); /* this session has no such path */
    assert_int_equal(now.bytes_streamed, 0);
    end_with(&r.p, &r.g, (msg_end){.quiet = true, .bytes_cma = 5}); /* no lease */
    assert_int_equal(server_stats(s).bytes_cma, 5);

    r = lease_here(s);
    end_with(&r.p, &r.g, (msg_end){.quiet = true, .abandon = true, .bytes_cma = 5});
    assert_int_equal(server_stats(s).bytes_cma, 5);

    r = lease_here(s);
    end_with(&r.p, &r.g, (msg_end){.quiet = true, .bytes_cma = UINT64_MAX});
    uint64_t all = server_stats(s).bytes_cma - 5;
    assert_in_range(all, 1, 1 << 20); /* what there is */

    peer tcp = peer_open(s);
    grant g = peer_lease(&tcp);
    end_with(&tcp, &g, (msg_end){.quiet = true, .bytes_cma = 5, .bytes_cuda_ipc = 5});
    assert_int_equal(server_stats(s).bytes_cma, all + 5);
    assert_int_equal(server_stats(s).bytes_cuda_ipc, 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        server_test(who_has_not_opened_cma_is_told_none),
        server_test(leases_with_announcements_have_words_too),
        server_test(words_turn_with_whatever_takes_the_bytes),
        server_test(no_epoch_comes_back_into_a_word),
        server_test(another_name_has_another_word),
        server_test(a_copys_word_stands_as_long_as_the_copy),
        server_test(words_say_what_an_end_says),
        server_test(words_turn_before_anything_is_written),
        server_test(a_quiet_end_is_taken_and_not_answered),
        server_test(what_was_read_one_sided_is_counted_within_bounds),
    };
    return cmocka_run_group_tests_name("words", tests, NULL, NULL);
}
