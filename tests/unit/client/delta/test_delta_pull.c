/* SPDX-License-Identifier: Apache-2.0 */
/* Pulls by patches from ranks that say whatever the test wants: what is read, what may be built
   upon, what lies are refused, what an attempt that fails leaves. */
#include "delta/delta.h"
#include "ends.h"
#include "stub_ranks.h"
#include "testing.h"
#include <sys/socket.h>

#define RANKS 2
#define PART (3 * (size_t)PATCH_SEGMENT + 77) /* bytes of a rank: 4 segments */
#define BYTES (RANKS * PART)
#define KEPT 3

static struct {
    stub_world world;
    fanin_destination *into;
    uint8_t *memory, *before;
    fanin_pull_options options;
    fanin_result_info info;
    fanin_error error;
    uint64_t step;
    unsigned salt;
} s;

/* What rank 1 does with the next frames of a kind. */
static struct {
    message_type of;
    unsigned times;
    enum { NOTHING, HANGS_UP, IS_STALE, ANOTHER_COPY, TOUCHES } act;
    bool deltas;             /* the last wait asked for them */
    unsigned whole, patches; /* entries that were read */
    unsigned read_after;     /* reads that are answered before it acts */
} odd;

static void note_read(const stub_rank *r, const body *in)
{
    static read_entry entries[LIMIT_READ_ENTRIES];
    msg_read m;
    body copy = *in;
    assert_int_equal(decode_read(&copy, &m, entries), FANIN_OK);
    for (uint32_t i = 0; i < m.n_entries; i++) {
        bool of_patch = entries[i].box > 0 && r->patches.generation > 0;
        *(of_patch ? &odd.patches : &odd.whole) += 1;
    }
}

static bool answer(stub_talk *t, const frame *f, body *in)
{
    msg_wait wait;
    body copy = *in;
    if (f->type == MSG_WAIT) {
        assert_int_equal(decode_wait(&copy, &wait), FANIN_OK);
        odd.deltas = wait.deltas;
    }
    if (f->type == MSG_READ)
        note_read(t->rank, in);
    if (odd.act == NOTHING || f->type != odd.of || t->rank->hello.rank != 1 ||
        odd.times == 0)
        return stub_answer(t, f, in);
    if (odd.read_after > 0) {
        odd.read_after--;
        return stub_answer(t, f, in);
    }
    odd.times--;
    switch (odd.act) {
    case HANGS_UP:
        return false;
    case IS_STALE:
        encode_end_ok(&t->out, f->request, &(msg_end_ok){.good = false, .step = 9});
        return true;
    case ANOTHER_COPY:
        t->rank->patches.generation++;
        (void)stub_answer(t, f, in);
        t->rank->patches.generation--;
        return true;
    default: /* TOUCHES */
        memset(s.memory, 0x77, BYTES);
        fanin_destination_touched(s.into);
        return stub_answer(t, f, in);
    }
}

static void make_destination(void)
{
    fanin_box box = {.extent = {BYTES}, .address = s.memory};
    fanin_tensor t = {.struct_size = sizeof t,
                      .name = "t",
                      .dtype = FANIN_DTYPE_U8,
                      .n_dims = 1,
                      .shape = {BYTES},
                      .boxes = &box,
                      .n_boxes = 1};
    fanin_destination_free(&s.into);
    assert_works(fanin_destination_create(&t, 1, &s.into, ERROR));
}

static int set_up(void **state)
{
    (void)state;
    memset(&odd, 0, sizeof odd);
    stub_world_start(&s.world, RANKS, RANKS, PART);
    for (size_t i = 0; i < RANKS; i++)
        s.world.ranks[i].answer = answer;
    s.memory = calloc(1, BYTES);
    s.before = calloc(1, BYTES);
    s.step = 1;
    s.options = make_options(FANIN_STEP_NEWEST, 0);
    s.options.deltas = true;
    make_destination();
    return 0;
}

static int tear_down(void **state)
{
    (void)state;
    fanin_destination_free(&s.into);
    stub_world_stop(&s.world);
    free(s.memory);
    free(s.before);
    return 0;
}

#define CASE(name) TEST_WITH(name, set_up, tear_down)

/* ------------------------------------------------------------------- steps, pulls */

/* The next step: each rank has some other words. */
static void commit_patch(unsigned changes)
{
    s.step++;
    for (size_t i = 0; i < RANKS; i++) {
        stub_rank *r = &s.world.ranks[i];
        uint8_t *bytes = malloc(PART);
        memcpy(bytes, r->bytes, PART);
        for (unsigned j = 0; j < changes; j++)
            bytes[(j * 7919 + s.salt++ * 13) % PART] ^= (uint8_t)(1 + j);
        stub_rank_patch(r, s.step, bytes, KEPT);
    }
}

static fanin_status pull_with(fanin_client *client)
{
    fanin_result *result = NULL;
    odd.whole = odd.patches = 0;
    s.error = (fanin_error)FANIN_ERROR_INIT;
    memcpy(s.before, s.memory, BYTES);
    fanin_status status =
        fanin_client_pull_into(client, &s.options, s.into, &result, &s.error);
    memset(&s.info, 0, sizeof s.info);
    s.info.struct_size = sizeof s.info;
    if (status == FANIN_OK)
        fanin_result_get(result, &s.info);
    fanin_result_free(&result);
    return status;
}

static void check_memory(void)
{
    for (size_t i = 0; i < RANKS; i++)
        assert_memory_equal(s.memory + i * PART, s.world.ranks[i].bytes, PART);
}

static void expect(uint64_t base)
{
    assert_ok(pull_with(s.world.client), s.error);
    check_memory();
    assert_int_equal(s.info.step, s.step);
    assert_int_equal(s.info.bytes, BYTES);
    assert_int_equal(s.info.tensors, 1);
    assert_int_equal(s.info.base_step, base);
    assert_true(base ? odd.whole == 0 : odd.whole > 0);
}

static void expect_whole(const char *because)
{
    expect(0);
    assert_non_null(s.info.whole_because);
    assert_says(s.info.whole_because, because);
}

static void expect_delta(uint64_t base)
{
    expect(base);
    assert_null(s.info.whole_because);
}

/* It fails, and the step before is there. */
static void expect_refusal(fanin_status status, const char *words)
{
    assert_int_equal(pull_with(s.world.client), status);
    assert_says(s.error.message, words);
    assert_memory_equal(s.memory, s.before, BYTES);
}

/* Ranks have steps with patches from now on, and the destination the first of them. */
static void begin_deltas(void)
{
    commit_patch(3);
    expect_whole("not known");
    commit_patch(3);
}

/* -------------------------------------------------------------------- what is read */

CASE(what_has_changed_is_all_that_is_read)
{
    begin_deltas();
    expect_delta(2);
    assert_true(odd.deltas);
    assert_int_equal(s.info.patch_bytes, RANKS * (4 * 4 + 3 * PATCH_CHANGE));
    unsigned begun = stub_world_asked(&s.world, MSG_BEGIN);
    for (int i = 0; i < 5; i++) {
        commit_patch(100);
        expect_delta(s.step - 1);
    }
    /* Leases came with the announcements. */
    assert_int_equal(stub_world_asked(&s.world, MSG_BEGIN), begun);
    expect_delta(s.step); /* the same step again: nothing is read */
    assert_int_equal(odd.patches, 0);
    assert_int_equal(s.info.patch_bytes, 0);
    assert_int_equal(s.info.path, FANIN_PATH_STREAM);
}

CASE(steps_that_were_left_out_are_a_chain)
{
    begin_deltas();
    commit_patch(50);
    commit_patch(60);
    expect_delta(2);
    for (int i = 0; i <= KEPT; i++)
        commit_patch(5);
    expect_whole("no patches from the step");
    commit_patch(5);
    expect_delta(s.step - 1);
}

CASE(nobody_is_asked_for_patches_who_does_not_want_them)
{
    commit_patch(3);
    s.options.deltas = false;
    expect(0);
    assert_null(s.info.whole_because);
    assert_false(odd.deltas);
    commit_patch(3);
    s.options.deltas = true;
    expect_whole("not known"); /* the pull before kept no base */
    commit_patch(3);
    expect_delta(s.step - 1);
}

CASE(a_patch_of_more_than_half_is_not_read)
{
    begin_deltas();
    expect_delta(2);
    commit_patch(PART / 4); /* words of 4 bytes each */
    expect_whole("more than half");
    assert_true(odd.patches > 0); /* directories */
    commit_patch(3);
    expect_delta(s.step - 1);
}

CASE(ranks_without_patches)
{
    expect_whole("keeps no patches");
    stub_rank_commit(&s.world.ranks[0], 2);
    stub_rank_commit(&s.world.ranks[1], 2);
    s.step = 2;
    expect_whole("keeps no patches");
    commit_patch(3);
    expect_whole("not known"); /* a copy of before had no number */
    commit_patch(3);
    expect_delta(s.step - 1);
}

/* ---------------------------------------------------------------- what is no base */

CASE(written_by_somebody_else)
{
    begin_deltas();
    fanin_destination_touched(NULL);
    fanin_destination_touched(s.into);
    memset(s.memory, 0xee, BYTES);
    expect_whole("not known");
    commit_patch(3);
    expect_delta(s.step - 1);
    commit_patch(3);
    s.options.deltas = false;
    expect(0);
    commit_patch(3);
    s.options.deltas = true;
    expect_whole("not known");
}

CASE(written_while_patches_are_read)
{
    begin_deltas();
    odd.of = MSG_END;
    odd.act = TOUCHES;
    odd.times = 1;
    expect_whole("not known");
    assert_int_equal(s.info.restarts, 1);
    commit_patch(3);
    odd.times = 1;
    expect_whole("not known");
    odd.times = 0;
    commit_patch(3);
    expect_delta(s.step - 1);
}

CASE(written_by_a_session)
{
    fanin_session *session;
    begin_deltas();
    expect_delta(2);
    assert_works(
        fanin_client_begin_into(s.world.client, &s.options, s.into, &session, ERROR));
    assert_works(fanin_session_read(session, 0, 1, ERROR));
    fanin_session_abandon(&session);
    commit_patch(3);
    expect_whole("not known");
}

CASE(a_session_that_outlasts_its_destination)
{
    fanin_session *session;
    begin_deltas();
    assert_works(
        fanin_client_begin_into(s.world.client, &s.options, s.into, &session, ERROR));
    fanin_destination_free(&s.into);
    assert_works(fanin_session_read(session, 0, 1, ERROR));
    fanin_session_abandon(&session);
    make_destination();
    expect_whole("not known");
}

/* What it has written last may lie over what the other has brought. */
CASE(a_writer_that_leaves_before_another)
{
    delta_base *b = delta_base_create();
    assert_non_null(b);
    delta_base_enter(b);
    (void)delta_base_drop(b);
    delta_base_enter(b);
    uint64_t drops = delta_base_drop(b), now;
    delta_base_leave(b);
    delta_base_set(b, calloc(1, sizeof(base_step)), drops);
    assert_null(delta_base_copy(b, &now));
    drops = delta_base_drop(b);
    delta_base_set(b, calloc(1, sizeof(base_step)), drops);
    delta_base_leave(b);
    base_step *held = delta_base_copy(b, &now);
    assert_non_null(held);
    free(held);
    delta_base_release(b);
}

CASE(a_whole_pull_that_failed)
{
    begin_deltas();
    expect_delta(2);
    commit_patch(3);
    s.options.deltas = false;
    s.options.max_attempts = 1;
    odd.act = IS_STALE;
    odd.of = MSG_END;
    odd.times = 1;
    assert_int_equal(pull_with(s.world.client), FANIN_ERR_STALE);
    s.options.deltas = true;
    expect_whole("not known");
}

CASE(a_rank_of_another_life)
{
    begin_deltas();
    stub_rank *r = &s.world.ranks[1];
    r->hello.incarnation[3] ^= 1;
    r->hello.session[3] ^= 1;
    r->bytes[5] ^= 0x20; /* other bytes of the same steps */
    stub_rank_hang_up(r);
    expect_whole("started again");
    commit_patch(3);
    expect_delta(s.step - 1);
}

/* The rank is the same, and so is its copy. */
CASE(another_connection)
{
    begin_deltas();
    for (size_t i = 0; i < RANKS; i++)
        stub_rank_hang_up(&s.world.ranks[i]);
    expect_delta(2);
}

/* ------------------------------------------------------- what a failure leaves */

static void fail_then_recover(message_type of, int act, unsigned after)
{
    begin_deltas();
    s.options.timeout_ms = 2000;
    odd.of = of;
    odd.act = act;
    odd.times = 1;
    odd.read_after = after;
    expect_delta(2); /* another attempt */
    assert_true(s.info.restarts > 0);
    commit_patch(3);
    odd.times = 1000000;
    odd.read_after = after;
    memcpy(s.before, s.memory, BYTES);
    assert_int_not_equal(pull_with(s.world.client), FANIN_OK);
    assert_memory_equal(s.memory, s.before, BYTES);
    odd.act = NOTHING;
    stub_world_reconnect(&s.world);
    expect_delta(s.step - 1);
}

CASE(an_end_that_says_stale)
{
    fail_then_recover(MSG_END, IS_STALE, 0);
}

CASE(a_rank_that_goes_while_directories_are_read)
{
    fail_then_recover(MSG_READ, HANGS_UP, 0);
}

CASE(a_rank_that_goes_while_changes_are_read)
{
    begin_deltas();
    odd.of = MSG_READ;
    odd.act = HANGS_UP;
    odd.times = 1;
    odd.read_after = 1;
    expect_delta(2);
    assert_int_equal(s.info.restarts, 1);
}

CASE(a_lease_of_another_copy)
{
    begin_deltas();
    expect_delta(2);
    commit_patch(3);
    s.world.ranks[1].old = true; /* no leases with announcements */
    odd.of = MSG_BEGIN;
    odd.act = ANOTHER_COPY;
    odd.times = 1;
    expect_whole("another copy");
    expect_whole("not known"); /* it was not known which one was read */
}

/* ---------------------------------------------------------------------------- lies */

/* Rank 1 tells of a patch from generation 2 to 3 with 3 changes, which the test alters. */
static patch_offers *lying(void)
{
    begin_deltas();
    return &s.world.ranks[1].patches;
}

static void expect_lie(const char *words)
{
    char who[80];
    snprintf(who, sizeof who, "rank 1 at %s", s.world.ranks[1].address);
    expect_refusal(FANIN_ERR_PROTOCOL, words);
    assert_says(s.error.message, who);
    assert_string_equal(s.error.address, s.world.ranks[1].address);
    assert_int_equal(s.error.rank, 1);
}

CASE(directories_of_no_size)
{
    lying()->directory_bytes = 0;
    expect_lie("cannot be");
    s.world.ranks[1].patches.directory_bytes = 18;
    expect_lie("cannot be");
    s.world.ranks[1].patches.directory_bytes = 12;
    expect_lie("do not lie in"); /* a segment less than boxes reach */
    s.world.ranks[1].patches.directory_bytes = UINT64_C(1) << 62;
    expect_whole("more than half");
}

CASE(boxes_that_nobody_may_ask_for)
{
    lying()->first_box = LIMIT_BOXES - 1;
    expect_lie("cannot be");
    s.world.ranks[1].patches.first_box = UINT64_MAX;
    expect_lie("cannot be");
}

CASE(counts_that_do_not_fit)
{
    static const struct {
        size_t at;
        uint8_t value;
    } lies[] = {{0, 200}, {3, 200}, {2, 1}, {13, 9}};
    begin_deltas();
    buffer *directory = &s.world.ranks[1].patch_boxes[0];
    for (size_t i = 0; i < sizeof lies / sizeof *lies; i++) {
        uint8_t was = directory->data[lies[i].at];
        directory->data[lies[i].at] = lies[i].value;
        expect_lie("does not fit");
        directory->data[lies[i].at] = was;
    }
    s.world.ranks[1].patches.patches[0].bytes += 4;
    expect_lie("does not fit");
    s.world.ranks[1].patches.patches[0].bytes -= 3;
    expect_lie("does not fit");
    s.world.ranks[1].patches.patches[0].bytes = UINT64_MAX - 3;
    expect_lie("does not fit");
    s.world.ranks[1].patches.patches[0].bytes = 3 * PATCH_CHANGE;
    expect_delta(2);
}

CASE(places_that_do_not_ascend)
{
    begin_deltas();
    commit_patch(40);
    buffer *changes = &s.world.ranks[1].patch_boxes[1];
    uint8_t was[4];
    memcpy(was, changes->data, sizeof was);
    memcpy(changes->data, was + 2, 2);
    memcpy(changes->data + 2, was, 2);
    expect_lie("do not ascend");
    memcpy(changes->data, was, sizeof was);
    memcpy(changes->data + 2, was, 2); /* twice */
    expect_lie("do not ascend");
    memcpy(changes->data, was, sizeof was);
    expect_delta(2);
}
