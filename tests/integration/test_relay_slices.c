/* SPDX-License-Identifier: Apache-2.0 */
/* Readers of slices, as workers of tensor-parallel engines are, and holders of whole tensors. */
#include "testing.h"
#include "ends.h"
#include "handing.h"
#include "inside.h"
#include "pull/pull_session.h"
#include "rank_proxy.h"
#include "relay_readers.h"
#include "relay_strikes.h"
#include <signal.h>
#include <stdatomic.h>

#define WORKERS 2

static world w;
static reader cache, tp[WORKERS];

static int tear_down(void **state)
{
    relay_reader_close(&cache);
    for (size_t i = 0; i < WORKERS; i++)
        relay_reader_close(&tp[i]);
    world_stop(&w);
    return 0;
}

#define CASE(name) TEST_WITH(name, NULL, tear_down)

static void open_workers(void)
{
    ways.slices = WORKERS;
    for (size_t i = 0; i < WORKERS; i++)
        relay_reader_open(&tp[i], i);
    ways.slices = 0;
}

static void begin_slices(world_cut by)
{
    world_begin(&w, 2, by, 1);
    ways_reset(&w);
    relay_reader_open(&cache, 0);
    open_workers();
}

/* ---------------------------------------------------------------------- who brings what */

static void reopen_tp(void)
{
    for (size_t i = 0; i < WORKERS; i++)
        relay_reader_close(&tp[i]);
    open_workers();
}

/* By those that have just come. Of a busy machine the holder is late now and then. */
static void expect_spared(uint64_t step)
{
    int spared = 0;
    for (int tries = 0; spared < 3 && tries < 20; tries++) {
        uint64_t origin = 0;
        reopen_tp();
        for (size_t i = 0; i < WORKERS; i++) {
            expect_pull(&tp[i], step);
            origin += stats_of(&tp[i]).bytes_from_origin;
        }
        spared += origin == 0;
    }
    assert_int_equal(spared, 3);
}

CASE(slices_are_had_of_who_holds_all)
{
    begin_slices(CUT_CHUNK0);
    expect_pull(&cache, 1);
    expect_spared(1);
    assert_int_equal(stats_of(&tp[0]).holders, 0); /* nobody wants the same */
    assert_non_null(strstr(tp[0].how, "from 1 relays"));
}

CASE(slices_are_had_by_cma_however_the_ranks_cut)
{
    if (!world_has_cma())
        skip();
    begin_slices(CUT_CHUNK1);
    ways.path = FANIN_PATH_CMA;
    expect_pull(&cache, 1);
    expect_spared(1);
}

static void take_a_while(void *cookie)
{
    (void)cookie;
    usleep(30000);
}

/* By those, too, that know of others, who want the same: before they read the trainer they hear who
   has the step. */
CASE(each_step_is_had_of_who_has_it_by_then)
{
    rank_proxy proxy;
    int spared = 0;
    world_begin(&w, 2, CUT_CHUNK0, 1);
    rank_proxy_start(&proxy, fanin_server_port(w.ranks[0].server), MSG_HOLDERS,
                     take_a_while, NULL);
    w.address_list[0] = proxy.address;
    ways_reset(&w);
    relay_reader_open(&cache, 0);
    ways.slices = WORKERS;
    for (size_t i = 0; i < WORKERS; i++)
        relay_reader_open(&tp[i], 0);
    for (uint64_t step = 1; spared < 3 && step < 30; step++) {
        uint64_t before = 0, after = 0;
        if (step > 1)
            world_commit(&w, step);
        expect_pull(&cache, step);
        for (size_t i = 0; i < WORKERS; i++) {
            reader *r = &tp[(step + i) % WORKERS];
            before += stats_of(r).bytes_from_origin;
            atomic_store(&proxy.triggered, false);
            expect_pull(r, step);
            after += stats_of(r).bytes_from_origin;
        }
        spared += after == before;
    }
    assert_int_equal(spared, 3);
    tear_down(NULL);
    rank_proxy_stop(&proxy);
}

CASE(some_of_the_tensors_are_had_of_who_holds_all)
{
    begin_slices(CUT_CHUNK0);
    expect_pull(&cache, 1);
    relay_reader_close(&tp[0]);
    w.n_tensors -= 2;
    relay_reader_open(&tp[0], 0);
    expect_pull_of_others(&tp[0], 1);
    relay_reader_close(&tp[0]);
    w.n_tensors += 2;
}

/* It has pulled less than the trainer publishes. */
CASE(who_does_not_hold_all_is_let_alone)
{
    begin_slices(CUT_CHUNK0);
    w.n_tensors -= 2;
    expect_pull(&cache, 1);
    w.n_tensors += 2;
    expect_pull(&tp[0], 1);
    assert_int_equal(stats_of(&tp[0]).bytes_from_relays, 0);
}

CASE(all_at_once_have_each_step)
{
    begin_slices(CUT_CHUNK0);
    for (uint64_t step = 1; step < 6; step++) {
        if (step > 1)
            world_commit(&w, step);
        call_start(&cache.call, relay_pull, &cache);
        for (size_t i = 0; i < WORKERS; i++)
            call_start(&tp[i].call, relay_pull, &tp[i]);
        assert_ok(call_end(&cache.call), cache.error);
        check_bytes(&cache, step);
        for (size_t i = 0; i < WORKERS; i++) {
            assert_ok(call_end(&tp[i].call), tp[i].error);
            check_bytes(&tp[i], step);
        }
    }
}

/* The same slice as a plain client pulls it. */
static void check_as_of_the_trainer(const reader *r)
{
    fanin_client *client = world_client(&w, FANIN_PATH_STREAM);
    fanin_tensor *tensors = calloc(w.n_tensors, sizeof *tensors);
    fanin_box *boxes = calloc(w.n_tensors, sizeof *boxes);
    fanin_error error = FANIN_ERROR_INIT;
    for (size_t i = 0; i < w.n_tensors; i++) {
        boxes[i] = r->boxes[i];
        boxes[i].address = calloc(1, world_bytes(&w.tensors[i]) + 1);
        tensors[i] = r->tensors[i];
        tensors[i].boxes = &boxes[i];
    }
    assert_ok(
        fanin_client_pull(client, &r->options, tensors, w.n_tensors, NULL, &error),
        error);
    for (size_t i = 0; i < w.n_tensors; i++) {
        uint64_t bytes = fanin_dtype_bits(tensors[i].dtype) / 8;
        for (uint32_t d = 0; d < tensors[i].n_dims; d++)
            bytes *= boxes[i].extent[d];
        assert_memory_equal(boxes[i].address, r->boxes[i].address, bytes);
        free(boxes[i].address);
    }
    free(tensors);
    free(boxes);
    fanin_client_destroy(&client);
}

/* It holds F32 as it is published, and the workers want BF16. */
CASE(slices_are_converted_as_by_a_pull_of_the_trainer)
{
    begin_slices(CUT_CHUNK0);
    expect_pull(&cache, 1);
    ways.floats = FANIN_DTYPE_BF16;
    reopen_tp();
    for (size_t i = 0; i < WORKERS; i++) {
        tp[i].options.verify = true;
        expect_pull_of_others(&tp[i], 1);
        check_as_of_the_trainer(&tp[i]);
    }
}

CASE(slices_of_a_step_that_the_trainer_has_passed_are_had)
{
    begin_slices(CUT_CHUNK0);
    expect_pull(&cache, 1);
    world_commit(&w, 2);
    tp[0].options.rule = FANIN_STEP_EXACT;
    tp[0].options.step = 1;
    expect_pull(&tp[0], 1);
    assert_int_equal(stats_of(&tp[0]).bytes_from_origin, 0);
}

/* ---------------------------------------------------------------------------- faults */

CASE(an_update_meanwhile_is_no_matter_where_one_holds_all)
{
    w.lease_ms = 1;
    begin_slices(CUT_CHUNK0);
    expect_pull(&cache, 1);
    tp[0].options.rule = FANIN_STEP_EXACT;
    tp[0].options.step = 1;
    expect_pull_without_trainer(&tp[0], commit_2);
}

CASE(a_trainer_that_goes_meanwhile_leaves_who_holds_all)
{
    begin_slices(CUT_CHUNK0);
    expect_pull(&cache, 1);
    expect_pull_without_trainer(&tp[0], stop_ranks);
}

static void take_next_step(void)
{
    world_commit(&w, 2);
    (void)!relay_pull(&cache);
}

/* Its memory is written anew in the midst of a pull. */
CASE(a_holder_that_takes_the_next_step_meanwhile_tears_nothing)
{
    w.lease_ms = 5;
    for (int after = 1; after < 4; after += 2) {
        begin_slices(CUT_CHUNK0);
        expect_pull(&cache, 1);
        strike_after(after, take_next_step);
        assert_ok(relay_pull(&tp[0]), tp[0].error);
        check_bytes(&tp[0], tp[0].info.step);
        check_bytes(&cache, cache.info.step);
        tear_down(NULL);
    }
}

CASE(a_holder_of_all_that_is_killed_meanwhile_is_done_without)
{
    begin_slices(CUT_CHUNK0);
    start_holder();
    strike_after(2, kill_holder);
    expect_pull(&tp[0], 1);
    expect_pull(&tp[1], 1);
}

CASE(a_holder_of_all_that_is_stopped_is_done_without)
{
    begin_slices(CUT_CHUNK0);
    start_holder();
    strike_after(2, stop_holder);
    expect_pull(&tp[0], 1);
    expect_pull(&tp[1], 1); /* its list has one that does not answer */
    kill_holder();
}

CASE(altered_bytes_of_who_holds_all_are_found)
{
    begin_slices(CUT_CHUNK0);
    expect_pull(&cache, 1);
    for (size_t i = 0; i < w.n_tensors; i++)
        memset(cache.boxes[i].address, 0xee, world_bytes(&w.tensors[i]));
    tp[0].options.verify = true;
    assert_int_equal(pull_of_others(&tp[0]), FANIN_ERR_TRANSPORT);
    assert_non_null(strstr(tp[0].error.message, "the relay at 127.0.0.1:"));
    uint64_t relayed = stats_of(&tp[0]).bytes_from_relays;
    expect_pull(&tp[0], 1); /* though it is listed yet */
    assert_int_equal(stats_of(&tp[0]).bytes_from_relays, relayed);
}

/* ---------------------------------------------------------------------- false holders */

/* The pull does without it. */
static void expect_not_used(false_relay *x)
{
    expect_pull(&tp[0], 1);
    assert_int_equal(stats_of(&tp[0]).bytes_from_relays, 0);
    false_relay_close(x);
}

CASE(a_holder_of_other_parts_is_done_without)
{
    false_relay x;
    begin_slices(CUT_CHUNK0);
    false_relay_cut(&x, &cache);
    false_relay_open(&x, 2, 2);
    expect_not_used(&x);
}

CASE(a_holder_of_other_shapes_is_done_without)
{
    false_relay x;
    begin_slices(CUT_CHUNK0);
    false_relay_cut(&x, &cache);
    for (size_t i = 0; i < x.parts.n; i++) { /* as many bytes of one dimension less */
        fanin_tensor *t = &x.parts.own[i];
        if (t->n_dims < 2)
            continue;
        fanin_box *box = &x.parts.boxes[x.parts.n + i];
        t->shape[0] = box->extent[0] = t->shape[0] * t->shape[1];
        t->shape[1] = box->extent[1] = 1;
    }
    false_relay_open(&x, x.parts.n, x.parts.n);
    expect_not_used(&x);
}

CASE(a_holder_of_other_types_is_done_without)
{
    false_relay x;
    begin_slices(CUT_CHUNK0);
    false_relay_cut(&x, &cache);
    for (size_t i = 0; i < x.parts.n; i++) {
        if (x.parts.own[i].dtype == FANIN_DTYPE_BF16)
            x.parts.own[i].dtype = FANIN_DTYPE_F16;
    }
    false_relay_open(&x, x.parts.n, x.parts.n);
    expect_not_used(&x);
}

CASE(a_holder_that_has_nothing_yet_is_not_waited_for)
{
    false_relay x;
    begin_slices(CUT_CHUNK0);
    false_relay_cut(&x, &cache);
    false_relay_open(&x, x.parts.n, 0);
    expect_not_used(&x);
}

/* By cma nobody says that a part has not come. */
static void check_half(fanin_path path)
{
    false_relay x;
    begin_slices(CUT_CHUNK0);
    expect_pull(&cache, 1); /* into the memory that is handed on */
    fanin_relay_release(cache.relay);
    false_relay_cut(&x, &cache);
    false_relay_open(&x, x.parts.n, 0);
    for (size_t i = 0; i + 1 < x.parts.n; i += 2) {
        const fanin_tensor *t = &x.parts.own[i];
        uint64_t bytes = fanin_dtype_bits(t->dtype) / 8;
        for (uint32_t d = 0; d < t->n_dims; d++)
            bytes *= t->shape[d];
        memset(t->boxes->address, 0xee, bytes);
        landed_range next = {(uint32_t)i + 1, 1};
        assert_int_equal(handing_prove(x.server, "lora:0", 1, &next, 1, NULL),
                         FANIN_OK);
    }
    relay_reader_close(&tp[1]);
    ways.path = path;
    ways.slices = WORKERS;
    relay_reader_open(&tp[1], 1);
    expect_pull_of_others(&tp[1], 1);
    assert_true(stats_of(&tp[1]).bytes_from_origin > 0);
    false_relay_close(&x);
}

CASE(of_a_holder_that_has_half_comes_what_it_has)
{
    check_half(FANIN_PATH_STREAM);
    if (!world_has_cma())
        return;
    tear_down(NULL);
    check_half(FANIN_PATH_CMA);
}

/* ------------------------------------------------------------------ many of them */

#define MANY 128

static holders_list *offers[MANY];

/* So many say that they hold all, where nobody listens, and a reader looks at them first. */
static void offer_many(const reader *r, size_t n)
{
    static fanin_client_config config;
    parts whole;
    member next = r->relay->self;
    fanin_client_config_init(&config, sizeof config);
    assert_int_equal(parts_cut(&whole, cache.tensors, w.n_tensors, UNIT, NULL),
                     FANIN_OK);
    for (size_t i = 0; i < n; i++) {
        for (size_t at = sizeof next.id; at > 0 && ++next.id[at - 1] == 0;)
            at--;
        offer_falsely(&offers[i], &config, &whole.holding, 1, next);
    }
    parts_free(&whole);
}

static void withdraw_many(void)
{
    for (size_t i = 0; i < MANY; i++)
        list_destroy(&offers[i]);
}

CASE(false_holders_do_not_hide_the_one_that_has_all)
{
    begin_slices(CUT_CHUNK0);
    expect_pull(&tp[0], 1);
    expect_pull(&cache, 1);
    offer_many(&tp[0], 4);
    expect_pull_of_others(&tp[0], 1);
    withdraw_many();
}

/* Those take no places of readers that want the same. */
CASE(holders_of_all_do_not_hide_those_that_want_the_same)
{
    begin_slices(CUT_CHUNK0);
    expect_pull(&tp[0], 1);
    relay_reader_close(&tp[1]);
    ways.slices = WORKERS;
    relay_reader_open(&tp[1], 0);
    expect_pull(&tp[1], 1);
    offer_many(&tp[0], MANY);
    expect_pull_of_others(&tp[0], 1);
    withdraw_many();
}
