/* SPDX-License-Identifier: Apache-2.0 */
/* Readers that hand on what they have read: who brings what, and what they survive. */
#include "testing.h"
#include "call.h"
#include "clock.h"
#include "ends.h"
#include "handing.h"
#include "host.h"
#include "list.h"
#include "local_world.h"
#include "parts.h"
#include "pull/pull_session.h"
#include <signal.h>
#include <stdatomic.h>
#include <sys/eventfd.h>
#include <sys/prctl.h>

#define READERS 3
#define UNIT 128 /* so that there are many, and a pull takes its time */

static world w;

typedef struct reader {
    fanin_relay *relay;
    fanin_tensor *tensors;
    fanin_box *boxes;
    fanin_pull_options options;
    fanin_error error;
    fanin_result_info info;
    char how[160];
    call call;
} reader;

static reader readers[READERS];

static void reader_open(reader *r)
{
    fanin_client_config client;
    fanin_relay_config config;
    fanin_client_config_init(&client, sizeof client);
    client.lost_ms = 2000;
    client.path = FANIN_PATH_STREAM;
    fanin_relay_config_init(&config, sizeof config);
    config.client = &client;
    config.unit_bytes = UNIT;
    r->error = (fanin_error)FANIN_ERROR_INIT;
    assert_ok(fanin_relay_create(&config, w.address_list, w.size, &r->relay, &r->error),
              r->error);
    r->options = make_options(FANIN_STEP_NEWEST, 0);
    r->tensors = calloc(w.n_tensors, sizeof *r->tensors);
    r->boxes = calloc(w.n_tensors, sizeof *r->boxes);
    for (size_t i = 0; i < w.n_tensors; i++) {
        const world_tensor *t = &w.tensors[i];
        memcpy(r->boxes[i].extent, t->shape, sizeof r->boxes[i].extent);
        r->boxes[i].address = malloc(world_bytes(t) + 1);
        r->tensors[i] = world_boxes(t, &r->boxes[i], 1);
    }
}

static void reader_close(reader *r)
{
    fanin_relay_destroy(&r->relay);
    for (size_t i = 0; r->boxes && i < w.n_tensors; i++)
        free(r->boxes[i].address);
    free(r->boxes);
    free(r->tensors);
    *r = (reader){0};
}

static int tear_down(void **state)
{
    for (size_t i = 0; i < READERS; i++)
        reader_close(&readers[i]);
    world_stop(&w);
    return 0;
}

#define CASE(name) TEST_WITH(name, NULL, tear_down)

static void begin_readers(size_t n)
{
    world_begin(&w, 2, CUT_CHUNK0, 1);
    for (size_t i = 0; i < n; i++)
        reader_open(&readers[i]);
}

static fanin_status relay_pull(void *cookie)
{
    reader *r = cookie;
    fanin_result *result = NULL;
    fanin_relay_release(r->relay); /* what it holds of the last one is lent */
    for (size_t i = 0; i < w.n_tensors; i++)
        memset(r->boxes[i].address, 0xcc, world_bytes(&w.tensors[i]) + 1);
    fanin_status status = fanin_relay_pull_into(r->relay, &r->options, r->tensors,
                                                w.n_tensors, &result, &r->error);
    r->info = (fanin_result_info){.struct_size = sizeof r->info};
    fanin_result_get(result, &r->info);
    snprintf(r->how, sizeof r->how, "%s",
             r->info.path_reason ? r->info.path_reason : "");
    fanin_result_free(&result);
    return status;
}

static void check_bytes(const reader *r, uint64_t step)
{
    assert_int_equal(r->info.step, step);
    assert_memory_equal(r->info.world_id, w.id, sizeof w.id);
    for (size_t i = 0; i < w.n_tensors; i++) {
        const uint8_t *bytes = r->boxes[i].address;
        world_check(&w, i, step, bytes);
        assert_int_equal(bytes[world_bytes(&w.tensors[i])], 0xcc);
    }
}

static void expect_pull(reader *r, uint64_t step)
{
    assert_ok(relay_pull(r), r->error);
    check_bytes(r, step);
}

static fanin_relay_stats stats_of(const reader *r);

/* Of who is slow to be reached a reader takes nothing: again, until some of it came from others. */
static fanin_status pull_of_others(reader *r)
{
    deadline until = deadline_in_ms(20000);
    uint64_t before = stats_of(r).bytes_from_relays;
    fanin_status status;
    do
        status = relay_pull(r);
    while (status == FANIN_OK && stats_of(r).bytes_from_relays == before &&
           !deadline_passed(until));
    assert_true(stats_of(r).bytes_from_relays > before);
    return status;
}

static void expect_pull_of_others(reader *r, uint64_t step)
{
    assert_ok(pull_of_others(r), r->error);
    check_bytes(r, step);
}

static fanin_relay_stats stats_of(const reader *r)
{
    fanin_relay_stats s = {.struct_size = sizeof s};
    fanin_relay_get_stats(r->relay, &s);
    return s;
}

static uint64_t all_bytes(void)
{
    uint64_t sum = 0;
    for (size_t i = 0; i < w.n_tensors; i++)
        sum += world_bytes(&w.tensors[i]);
    return sum;
}

CASE(who_is_alone_reads_the_trainer)
{
    begin_readers(1);
    expect_pull(&readers[0], 1);
    fanin_relay_stats s = stats_of(&readers[0]);
    assert_int_equal(s.bytes_from_origin, all_bytes());
    assert_int_equal(s.landed, s.units);
    world_commit(&w, 2);
    expect_pull(&readers[0], 2);
    assert_int_equal(readers[0].info.bytes, all_bytes());
}

/* The memory is lent until its next writing begins: readers of the last step have it meanwhile. */
CASE(a_next_pull_into_the_same_memory_needs_no_release)
{
    begin_readers(2);
    for (uint64_t step = 1; step < 5; step++) {
        if (step > 1)
            world_commit(&w, step);
        for (size_t i = 0; i < 2; i++) {
            reader *r = &readers[i];
            assert_ok(fanin_relay_pull_into(r->relay, &r->options, r->tensors,
                                            w.n_tensors, NULL, &r->error),
                      r->error);
            for (size_t j = 0; j < w.n_tensors; j++)
                world_check(&w, j, step, r->boxes[j].address);
        }
    }
}

CASE(a_late_joiner_reads_the_others)
{
    begin_readers(3);
    expect_pull(&readers[0], 1);
    expect_pull(&readers[1], 1);
    expect_pull_of_others(&readers[2], 1);
    fanin_relay_stats s = stats_of(&readers[2]);
    assert_int_equal((s.bytes_from_origin + s.bytes_from_relays) % all_bytes(), 0);
    assert_int_equal(s.holders, 2);
    assert_non_null(strstr(readers[2].how, "relays"));
}

CASE(all_at_once_share_each_step)
{
    begin_readers(3);
    for (uint64_t step = 1; step < 6; step++) {
        if (step > 1)
            world_commit(&w, step);
        for (size_t i = 0; i < READERS; i++)
            call_start(&readers[i].call, relay_pull, &readers[i]);
        for (size_t i = 0; i < READERS; i++)
            assert_ok(call_end(&readers[i].call), readers[i].error);
        for (size_t i = 0; i < READERS; i++)
            check_bytes(&readers[i], step);
    }
}

/* ------------------------------------------------------------------------- faults */

/* What happens in the midst of a reader's pull: when some batches have been read. */
static struct {
    void (*strike)(void);
    atomic_int left; /* batches until then */
} fault;

fanin_status __real_pull_session_confirm_later(fanin_session *s, confirmed_fn fn,
                                               void *cookie, fanin_error *error);
fanin_status __wrap_pull_session_confirm_later(fanin_session *s, confirmed_fn fn,
                                               void *cookie, fanin_error *error);

fanin_status __wrap_pull_session_confirm_later(fanin_session *s, confirmed_fn fn,
                                               void *cookie, fanin_error *error)
{
    if (atomic_fetch_sub(&fault.left, 1) == 1)
        fault.strike();
    return __real_pull_session_confirm_later(s, fn, cookie, error);
}

/* In a pull that is to follow. */
static void strike_after(int batches, void (*strike)(void))
{
    fault.strike = strike;
    atomic_store(&fault.left, batches);
}

static void commit_2(void)
{
    world_commit(&w, 2);
}

static void pause_ranks(void)
{
    for (size_t i = 0; i < w.size; i++)
        assert_int_equal(
            fanin_server_pause(w.ranks[i].server, "lora:0", "a test", NULL), FANIN_OK);
}

static void stop_ranks(void)
{
    for (size_t i = 0; i < w.size; i++)
        world_stop_rank(&w, i);
}

/* What others hold of the step is all of it, so that the pull ends with it. */
CASE(an_update_meanwhile_is_no_matter_where_others_hold_all)
{
    w.lease_ms = 1;
    begin_readers(2);
    expect_pull(&readers[0], 1);
    strike_after(2, commit_2);
    expect_pull(&readers[1], 1);
    expect_pull(&readers[0], 2);
    expect_pull(&readers[1], 2);
}

CASE(who_is_alone_begins_again_after_an_update)
{
    w.lease_ms = 1;
    begin_readers(1);
    strike_after(2, commit_2);
    assert_ok(relay_pull(&readers[0]), readers[0].error);
    check_bytes(&readers[0], 2);
    assert_int_equal(readers[0].info.restarts, 1);
}

CASE(a_pause_meanwhile_leaves_the_others)
{
    begin_readers(2);
    expect_pull(&readers[0], 1);
    strike_after(2, pause_ranks);
    expect_pull(&readers[1], 1);
}

CASE(a_trainer_that_goes_meanwhile_leaves_the_others)
{
    begin_readers(2);
    expect_pull(&readers[0], 1);
    strike_after(2, stop_ranks);
    expect_pull(&readers[1], 1);
}

static void withdraw_step(void)
{
    for (size_t i = 0; i < w.size; i++)
        (void)!fanin_server_withdraw(w.ranks[i].server, "lora:0", NULL);
}

/* Its bytes were wrong, also those that others hold. */
CASE(a_step_that_is_taken_back_is_not_had_of_others)
{
    begin_readers(2);
    expect_pull(&readers[0], 1);
    strike_after(2, withdraw_step);
    readers[1].options.rule = FANIN_STEP_EXACT;
    readers[1].options.step = 1;
    assert_int_equal(relay_pull(&readers[1]), FANIN_ERR_STALE);
    assert_non_null(strstr(readers[1].error.message, "has taken step 1 back"));
    readers[1].options.rule = FANIN_STEP_NEWEST;
    world_commit(&w, 2);
    expect_pull(&readers[1], 2);
}

/* On the same ports, of another launch: its step 1 is another one. */
CASE(a_restarted_trainer_is_another_world)
{
    begin_readers(2);
    expect_pull(&readers[0], 1);
    stop_ranks();
    w.id[3] ^= 0x5a;
    w.salt = 9;
    for (size_t i = 0; i < w.size; i++)
        world_restart_rank(&w, i);
    world_commit(&w, 1);
    expect_pull(&readers[1], 1);
    expect_pull(&readers[0], 1);
    assert_int_equal(stats_of(&readers[0]).holders, 1);
}

/* Its ranks are other processes, though the world id and the step are those of before. */
CASE(a_trainer_that_restarts_with_its_world_id_is_another_one)
{
    begin_readers(3);
    expect_pull(&readers[0], 1);
    expect_pull(&readers[1], 1);
    stop_ranks();
    w.salt = 9;
    for (size_t i = 0; i < w.size; i++)
        world_restart_rank(&w, i);
    world_commit(&w, 1);
    usleep(700000); /* both may have looked for the ranks, twice */
    expect_pull(&readers[2], 1);
    assert_int_equal(stats_of(&readers[2]).holders, 0);
    expect_pull(&readers[0], 1);
}

CASE(what_is_released_is_read_by_nobody)
{
    begin_readers(2);
    expect_pull(&readers[0], 1);
    fanin_relay_release(readers[0].relay);
    for (size_t i = 0; i < w.n_tensors; i++)
        memset(readers[0].boxes[i].address, 0xee, world_bytes(&w.tensors[i]));
    expect_pull(&readers[1], 1);
    assert_int_equal(stats_of(&readers[1]).bytes_from_relays, 0);
    fanin_relay_release(readers[0].relay);
    fanin_relay_release(NULL);
}

CASE(others_that_want_something_else_are_let_alone)
{
    begin_readers(2);
    expect_pull(&readers[0], 1);
    w.n_tensors -= 2;
    expect_pull(&readers[1], 1);
    assert_int_equal(stats_of(&readers[1]).holders, 0);
    w.n_tensors += 2;
}

CASE(verify_asks_the_trainer_for_what_relays_brought)
{
    begin_readers(2);
    expect_pull(&readers[0], 1);
    readers[1].options.verify = true;
    expect_pull_of_others(&readers[1], 1);
    assert_true(readers[1].info.verified);
}

/* Nobody can tell a reader's own memory from what it has read: verify does. */
CASE(altered_bytes_of_a_relay_are_found)
{
    begin_readers(2);
    expect_pull(&readers[0], 1);
    for (size_t i = 0; i < w.n_tensors; i++)
        memset(readers[0].boxes[i].address, 0xee, world_bytes(&w.tensors[i]));
    readers[1].options.verify = true;
    assert_int_equal(pull_of_others(&readers[1]), FANIN_ERR_TRANSPORT);
    assert_non_null(strstr(readers[1].error.message, "the relay at 127.0.0.1:"));
    assert_non_null(strstr(readers[1].error.key, "base_model"));
    uint64_t relayed = stats_of(&readers[1]).bytes_from_relays;
    expect_pull(&readers[1], 1); /* though it is listed yet */
    assert_int_equal(stats_of(&readers[1]).bytes_from_relays, relayed);
}

CASE(a_pull_can_be_cancelled)
{
    begin_readers(1);
    readers[0].options.rule = FANIN_STEP_EXACT;
    readers[0].options.step = 7; /* nobody commits it */
    call_start(&readers[0].call, relay_pull, &readers[0]);
    assert_false(call_returns(&readers[0].call, 50));
    fanin_relay_cancel(readers[0].relay);
    assert_int_equal(call_end(&readers[0].call), FANIN_ERR_CANCELLED);
    fanin_relay_cancel(NULL);
    readers[0].options.step = 1;
    expect_pull(&readers[0], 1);
}

CASE(bad_calls_are_refused)
{
    fanin_relay *relay = NULL;
    const char *none[] = {NULL};
    begin_readers(1);
    assert_int_equal(fanin_relay_create(NULL, NULL, 1, &relay, NULL),
                     FANIN_ERR_ARGUMENT);
    assert_int_equal(fanin_relay_create(NULL, none, 1, &relay, NULL),
                     FANIN_ERR_ARGUMENT);
    assert_int_equal(fanin_relay_create(NULL, none, 1, NULL, NULL), FANIN_ERR_ARGUMENT);
    assert_null(relay);
    reader *r = &readers[0];
    assert_int_equal(
        fanin_relay_pull_into(NULL, &r->options, r->tensors, 1, NULL, NULL),
        FANIN_ERR_ARGUMENT);
    assert_int_equal(fanin_relay_pull_into(r->relay, NULL, r->tensors, 1, NULL, NULL),
                     FANIN_ERR_ARGUMENT);
    assert_int_equal(fanin_relay_pull_into(r->relay, &r->options, NULL, 1, NULL, NULL),
                     FANIN_ERR_ARGUMENT);
    r->options.timeout_ms = 0;
    assert_int_equal(relay_pull(r), FANIN_ERR_ARGUMENT);
    r->options.timeout_ms = 20000;
    r->options.publication = "lora:other";
    assert_int_equal(relay_pull(r), FANIN_ERR_NOT_FOUND);
    r->options.publication = "lora:0";
    expect_pull(r, 1);
}

/* ------------------------------------------------------------- readers that are lost */

/* ThreadSanitizer ends a child of a process with threads when it starts one of its own. */
static bool children_have_threads(void)
{
#if defined(__SANITIZE_THREAD__)
    return false;
#elif defined(__has_feature)
    return !__has_feature(thread_sanitizer);
#else
    return true;
#endif
}

/* A reader in a process of its own, which has the step and hands it on. */
static pid_t fork_holder(void)
{
    int ready[2];
    if (!children_have_threads())
        skip();
    char byte = 0;
    assert_int_equal(pipe(ready), 0);
    pid_t child = fork();
    if (child == 0) {
        static reader r;
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        reader_open(&r);
        byte = relay_pull(&r) == FANIN_OK;
        (void)!write(ready[1], &byte, 1);
        for (;;)
            pause();
    }
    close(ready[1]);
    assert_int_equal(read(ready[0], &byte, 1), 1);
    assert_int_equal(byte, 1);
    close(ready[0]);
    return child;
}

static pid_t other;

static void kill_holder(void)
{
    kill(other, SIGKILL);
    tests_await(other);
}

static void stop_holder(void)
{
    kill(other, SIGSTOP);
}

CASE(a_holder_in_another_process_is_read)
{
    begin_readers(1);
    other = fork_holder();
    expect_pull_of_others(&readers[0], 1);
    kill_holder();
    world_commit(&w, 2);
    expect_pull(&readers[0], 2);
}

CASE(a_holder_that_is_killed_meanwhile_is_done_without)
{
    begin_readers(1);
    other = fork_holder();
    strike_after(2, kill_holder);
    expect_pull(&readers[0], 1);
}

CASE(a_holder_that_is_stopped_is_done_without)
{
    begin_readers(2);
    other = fork_holder();
    strike_after(2, stop_holder);
    expect_pull(&readers[0], 1);
    expect_pull(&readers[1], 1); /* its list has one that does not answer */
    kill_holder();
}

/* ---------------------------------------------------------------------- false relays */

/* A list's entry of whom it is not: a port where nobody listens, a rank, the reader itself. */
static void offer_falsely(holders_list **list, const fanin_client_config *config,
                          const parts *p, uint16_t port, uint8_t mark)
{
    static const logger quiet;
    msg_offer m = {.publication = "lora:0", .step = 1, .port = port, .local = true};
    uint64_t seen = 0;
    holder *all;
    size_t n;
    member self;
    memset(self.id, mark, sizeof self.id);
    memcpy(m.holding, p->holding.bytes, sizeof m.holding);
    memcpy(m.incarnation, self.id, sizeof m.incarnation);
    host_id(NULL, m.host);
    assert_int_equal(list_create(config, &quiet, eventfd(0, 0), list, NULL), FANIN_OK);
    list_rank *ranks = calloc(w.size, sizeof *ranks);
    for (size_t i = 0; i < w.size; i++) {
        snprintf(ranks[i].address, sizeof ranks[i].address, "%s", w.address_list[i]);
        member rank = handing_member(w.ranks[i].server);
        memcpy(ranks[i].incarnation, rank.id, sizeof rank.id);
    }
    assert_true(list_offer(*list, w.id, ranks, w.size, &m));
    free(ranks);
    deadline until = deadline_in_ms(20000);
    while (!list_is_known(*list) && !deadline_passed(until))
        usleep(1000);
    assert_true(list_copy(*list, &self, &seen, &all, &n));
    free(all);
}

CASE(entries_that_lead_to_nobody_are_done_without)
{
    fanin_client_config config;
    holders_list *lists[3];
    parts p;
    fanin_client_config_init(&config, sizeof config);
    begin_readers(2);
    assert_int_equal(
        parts_cut(&p, readers[0].tensors, w.n_tensors, UNIT, &readers[0].error),
        FANIN_OK);
    offer_falsely(&lists[0], &config, &p, 1, 0xa1);
    offer_falsely(&lists[1], &config, &p, fanin_server_port(w.ranks[0].server), 0xa2);
    expect_pull(&readers[0], 1);
    assert_int_equal(stats_of(&readers[0]).bytes_from_relays, 0);
    assert_int_equal(stats_of(&readers[0]).holders, 2);
    offer_falsely(&lists[2], &config, &p, fanin_server_port(w.ranks[1].server), 0x01);
    expect_pull(&readers[1], 1);
    for (size_t i = 0; i < 3; i++)
        list_destroy(&lists[i]);
    parts_free(&p);
}

/* A relay whose publication is not what its offer says. */
CASE(a_relay_that_publishes_something_else_is_done_without)
{
    fanin_client_config config;
    holders_list *list;
    parts p;
    fanin_client_config_init(&config, sizeof config);
    begin_readers(1);
    assert_int_equal(
        parts_cut(&p, readers[0].tensors, w.n_tensors, UNIT, &readers[0].error),
        FANIN_OK);
    fanin_server_config c = make_server_config();
    memcpy(c.world_id, w.id, sizeof w.id);
    c.flags |= FANIN_SERVER_RELAY;
    char address[32];
    fanin_server *server = make_server(&c, address, sizeof address);
    assert_int_equal(fanin_server_put(server, "lora:0", p.own, p.n / 2, true, NULL),
                     FANIN_OK);
    assert_int_equal(handing_fill(server, "lora:0", 1, NULL), FANIN_OK);
    assert_int_equal(handing_prove(server, "lora:0", 1, 0, (uint32_t)p.n / 2, NULL),
                     FANIN_OK);
    member self = handing_member(server);
    (void)self;
    offer_falsely(&list, &config, &p, fanin_server_port(server), 0);
    expect_pull(&readers[0], 1);
    assert_int_equal(stats_of(&readers[0]).bytes_from_relays, 0);
    list_destroy(&list);
    fanin_server_destroy(&server, 0);
    parts_free(&p);
}

/* Steps come while readers read: each has one whole step, whichever. */
CASE(steps_come_while_readers_read)
{
    w.lease_ms = 5;
    begin_readers(3);
    uint64_t step = 1;
    for (size_t round = 0; round < 10; round++) {
        for (size_t i = 0; i < READERS; i++)
            call_start(&readers[i].call, relay_pull, &readers[i]);
        for (size_t i = 0; i < 1 + round % 3; i++)
            world_commit(&w, ++step);
        for (size_t i = 0; i < READERS; i++)
            assert_ok(call_end(&readers[i].call), readers[i].error);
        for (size_t i = 0; i < READERS; i++)
            check_bytes(&readers[i], readers[i].info.step);
    }
}
