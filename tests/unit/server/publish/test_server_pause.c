/* SPDX-License-Identifier: Apache-2.0 */
/* Pause and resume as peers see them: answers, drains, tokens, versions, what is refused. */
#include "call.h"
#include "clock.h"
#include "gpu.h"
#include "publish/commit.h"
#include "server_peer.h"
#include "testing.h"
#include "ucx.h"

#include <stdatomic.h>

#define SIZE 100
#define MS UINT64_C(1000000)

static uint8_t memory[2][SIZE];

/* With shard "a" at step 1. */
static fanin_server *start_published(uint32_t lease_ms)
{
    fanin_server *s = server_start_lease(lease_ms);
    memset(memory[0], 1, SIZE);
    server_put(s, RUN, "a", memory[0], SIZE);
    server_commit(s, 1);
    return s;
}

static void pause_it(fanin_server *s, const char *reason)
{
    assert_works(fanin_server_pause(s, RUN, reason, ERROR));
}

static void resume_it(fanin_server *s)
{
    assert_works(fanin_server_resume(s, RUN, ERROR));
}

/* A session whose client says which features it has. */
static peer open_with(fanin_server *s, uint64_t features)
{
    peer p = peer_connect(s);
    msg_hello_ok ok = peer_hello_with(
        &p, (msg_hello){.role = ROLE_CONTROL, .features = features, .id = {9}});
    assert_true(ok.features & FEATURE_PAUSED);
    return p;
}

static void expect_paused(peer *p, const char *reason)
{
    char words[400];
    msg_error e = peer_expect_error(p, FANIN_ERR_PAUSED);
    snprintf(words, sizeof words, "%s is paused: %s", RUN, reason);
    assert_string_equal(e.message, words);
    assert_string_equal(e.key, RUN);
    assert_non_null(strstr(e.remedy, "pull again"));
}

static void expect_bytes(fanin_server *s, peer *p, uint8_t value)
{
    uint8_t got[SIZE];
    peer data = peer_data(s, p);
    grant g = peer_lease(p);
    read_entry one = {.box = 0, .count = 1};
    peer_read(&data, &g, &one, 1, got, SIZE);
    for (size_t i = 0; i < SIZE; i++)
        assert_int_equal(got[i], value);
    assert_true(peer_end(p, &g, false).good);
    peer_close(&data);
}

/* ----------------------------------------------------------------- answers */

SERVER_TEST(readers_are_answered_at_once)
{
    fanin_server *s = start_published(0);
    peer p = peer_open(s), parked = peer_open(s);
    grant g = peer_newest(&p);
    peer_request_wait(&parked, RUN, WIRE_RULE_EXACT, 2, 60000);
    uint64_t waiting = parked.request;
    peer_ping(&parked); /* so the wait is parked */
    pause_it(s, "the optimizer went for lunch");
    expect_paused(&parked, "the optimizer went for lunch");
    assert_int_equal(parked.frame.request, waiting);
    for (int rule = WIRE_RULE_NEWEST; rule <= WIRE_RULE_AT_LEAST; rule++) {
        peer_request_wait(&p, RUN, (wire_rule)rule, 1, 60000);
        expect_paused(&p, "the optimizer went for lunch");
    }
    peer_request_begin(&p, &g);
    expect_paused(&p, "the optimizer went for lunch");
    pause_it(s, NULL); /* again: another reason */
    peer_request_begin(&p, &g);
    expect_paused(&p, "trainer memory offloaded");
    assert_int_equal(server_stats(s).begins_refused, 2);
    assert_int_equal(server_stats(s).updates, 0);
    resume_it(s);
    expect_bytes(s, &p, 1);
}

static void expect_event(peer *p, uint64_t step, int32_t wanted)
{
    msg_event e = peer_event(p);
    assert_int_equal(e.step, step);
    assert_int_equal(e.state, wanted);
}

/* A peer that does not know the state is told one that it knows. */
SERVER_TEST(state_is_told_as_the_peer_knows_it)
{
    fanin_server *s = start_published(0);
    uint64_t features[] = {FEATURE_PAUSED, 0};
    for (int i = 0; i < 2; i++) {
        int32_t wanted = features[i] ? WIRE_STATE_PAUSED : WIRE_STATE_WRITING;
        peer p = open_with(s, features[i]), watcher = peer_watch(s, features[i]);
        expect_event(&watcher, 1, WIRE_STATE_STABLE);
        pause_it(s, NULL);
        expect_event(&watcher, 1, WIRE_STATE_DRAINING);
        expect_event(&watcher, 1, wanted);
        msg_list_entry e = peer_entry(&p);
        assert_int_equal(e.state, wanted);
        assert_int_equal(e.step, 1);
        assert_int_equal(e.epoch % 2, 1);
        resume_it(s);
        expect_event(&watcher, 1, WIRE_STATE_STABLE);
        assert_int_equal(peer_state(&p), WIRE_STATE_STABLE);
        peer_close(&p);
        peer_close(&watcher);
    }
}

/* ------------------------------------------------------------------- leases */

SERVER_TEST(readers_are_drained_at_most_the_lease)
{
    fanin_server *s = start_published(200);
    peer p = peer_open(s);
    uint64_t before = clock_ns();
    grant g = peer_lease(&p);
    pause_it(s, NULL);
    assert_true(clock_ns() - before >= 200 * MS);
    assert_int_equal(server_stats(s).drains_expired, 1);
    assert_false(peer_end(&p, &g, false).good);
    pause_it(s, "again"); /* nobody left to wait for */
    resume_it(s);
    expect_bytes(s, &p, 1);
}

static fanin_status pause_run(void *server)
{
    return fanin_server_pause(server, RUN, NULL, NULL);
}

/* While readers are waited for, others know already; the end of the reader ends the wait. */
SERVER_TEST(draining_turns_others_away)
{
    fanin_server *s = start_published(60000);
    peer holder = peer_open(s), other = peer_open(s), watcher = peer_watch(s, 0);
    grant g = peer_lease(&holder);
    call c;
    call_start(&c, pause_run, s);
    peer_await(&watcher, WIRE_STATE_DRAINING);
    peer_request_wait(&other, RUN, WIRE_RULE_NEWEST, 0, 60000);
    expect_paused(&other, "trainer memory offloaded");
    peer_request_begin(&other, &g);
    expect_paused(&other, "trainer memory offloaded");
    assert_int_equal(fanin_server_begin_update(s, RUN, NULL), FANIN_ERR_STATE);
    assert_true(peer_end(&holder, &g, false).good);
    assert_int_equal(call_end(&c), FANIN_OK);
    assert_int_equal(server_stats(s).drains_expired, 0);
}

/* ------------------------------------------------------------------- resume */

SERVER_TEST(the_step_is_served_again)
{
    fanin_server *s = start_published(0);
    peer p = peer_open(s);
    grant before = peer_lease(&p);
    pause_it(s, NULL);
    resume_it(s);
    grant after = peer_lease(&p);
    assert_int_equal(after.step, 1);
    assert_true(after.epoch > before.epoch);
    assert_int_equal(after.catalog_version, before.catalog_version);
    assert_false(peer_end(&p, &before, false).good);
    assert_true(peer_end(&p, &after, false).good);
    server_begin(s);
    server_commit(s, 2);
    assert_int_equal(peer_newest(&p).step, 2);
}

SERVER_TEST(moved_memory_is_served)
{
    fanin_server *s = start_published(0);
    peer p = peer_open(s);
    uint64_t version = peer_newest(&p).catalog_version;
    for (int i = 1; i < 4; i++) {
        pause_it(s, NULL);
        memset(memory[(i + 1) % 2], 0xee, SIZE);
        memset(memory[i % 2], 1, SIZE);
        server_put(s, RUN, "a", memory[i % 2], SIZE);
        pause_it(s, "still"); /* the put has opened no update */
        resume_it(s);
        grant g = peer_newest(&p);
        assert_int_equal(g.step, 1);
        assert_true(g.catalog_version > version);
        version = g.catalog_version;
        expect_bytes(s, &p, 1);
        assert_int_equal(fanin_server_commit(s, RUN, 2, NULL, NULL), FANIN_ERR_STATE);
    }
    assert_int_equal(server_stats(s).commits, 1);
}

SERVER_TEST(changes_meanwhile_show_at_the_resume)
{
    fanin_server *s = start_published(0);
    peer p = peer_open(s);
    fanin_pair pair = {"r", "16"};
    pause_it(s, NULL);
    memset(memory[1], 2, SIZE);
    server_put(s, RUN, "b", memory[1], SIZE);
    assert_int_equal(fanin_server_remove(s, RUN, "a", NULL), FANIN_OK);
    assert_int_equal(fanin_server_set_metadata(s, RUN, &pair, 1, NULL), FANIN_OK);
    resume_it(s);
    grant g = peer_newest(&p);
    key_table *keys;
    box_table *boxes;
    peer_catalog(&p, &g, &keys, &boxes);
    assert_int_equal(keys->count, 1);
    assert_string_equal(keys->entries[0].name, "b");
    assert_int_equal(keys->n_pairs, 1);
    box_table_free(&boxes);
    key_table_free(&keys);
    expect_bytes(s, &p, 2);
}

SERVER_TEST(what_was_not_published_stays_so)
{
    fanin_server *s = server_start_lease(0);
    server_put(s, RUN, "a", memory[0], SIZE);
    memset(memory[0], 3, SIZE);
    peer p = open_with(s, FEATURE_PAUSED);
    pause_it(s, NULL); /* nothing was committed yet */
    assert_int_equal(peer_state(&p), WIRE_STATE_PAUSED);
    resume_it(s);
    assert_int_equal(peer_state(&p), WIRE_STATE_UNPUBLISHED);
    server_commit(s, 1);
    server_begin(s);
    assert_int_equal(fanin_server_abort_update(s, RUN, NULL), FANIN_OK);
    pause_it(s, NULL); /* the bytes are half-written */
    resume_it(s);
    assert_int_equal(peer_state(&p), WIRE_STATE_UNPUBLISHED);
    peer_request_wait(&p, RUN, WIRE_RULE_NEWEST, 0, 30);
    peer_expect_error(&p, FANIN_ERR_TIMEOUT);
    server_commit(s, 2);
    expect_bytes(s, &p, 3);
}

/* Other values come back than those that were taken away. */
SERVER_TEST(a_step_that_is_given_up_is_not_shown_again)
{
    fanin_server *s = start_published(0);
    peer p = open_with(s, FEATURE_PAUSED);
    pause_it(s, NULL);
    assert_int_equal(fanin_server_abort_update(s, RUN, NULL), FANIN_OK);
    assert_int_equal(peer_state(&p), WIRE_STATE_PAUSED);
    memset(memory[0], 4, SIZE);
    resume_it(s);
    assert_int_equal(peer_state(&p), WIRE_STATE_UNPUBLISHED);
    assert_int_equal(fanin_server_commit(s, RUN, 1, NULL, NULL), FANIN_ERR_ARGUMENT);
    server_commit(s, 2);
    expect_bytes(s, &p, 4);
}

/* ----------------------------------------------------------------- refusals */

SERVER_TEST(updates_are_refused_while_paused)
{
    fanin_server *s = start_published(0);
    fanin_error error = FANIN_ERROR_INIT;
    pause_it(s, NULL);
    assert_int_equal(fanin_server_begin_update(s, RUN, &error), FANIN_ERR_STATE);
    assert_non_null(strstr(error.message, "paused: resume it first"));
    error = (fanin_error)FANIN_ERROR_INIT;
    assert_int_equal(fanin_server_commit(s, RUN, 2, NULL, &error), FANIN_ERR_STATE);
    assert_non_null(strstr(error.message, "paused: resume it first"));
    resume_it(s);
    assert_int_equal(fanin_server_resume(s, RUN, &error), FANIN_ERR_STATE);
    server_begin(s);
    assert_int_equal(fanin_server_pause(s, RUN, NULL, &error), FANIN_ERR_STATE);
    assert_non_null(strstr(error.message, "update of " RUN " is open"));
    assert_int_equal(fanin_server_resume(s, RUN, &error), FANIN_ERR_STATE);
    server_commit(s, 2);
    server_put(s, RUN, "a", memory[1], SIZE); /* as begin_update */
    assert_int_equal(fanin_server_pause(s, RUN, NULL, &error), FANIN_ERR_STATE);
}

SERVER_TEST(nothing_is_created)
{
    fanin_server *s = server_start_lease(0);
    fanin_error error = FANIN_ERROR_INIT;
    assert_int_equal(fanin_server_pause(s, RUN, NULL, &error), FANIN_ERR_NOT_FOUND);
    assert_string_equal(error.phase, "pause");
    assert_int_equal(fanin_server_resume(s, RUN, &error), FANIN_ERR_NOT_FOUND);
    assert_string_equal(error.phase, "resume");
    assert_int_equal(server_stats(s).publications, 0);
    assert_int_equal(fanin_server_pause(s, "nonsense", NULL, NULL), FANIN_ERR_ARGUMENT);
    assert_int_equal(fanin_server_resume(s, "nonsense", NULL), FANIN_ERR_ARGUMENT);
    assert_int_equal(fanin_server_pause(NULL, RUN, NULL, NULL), FANIN_ERR_ARGUMENT);
    assert_int_equal(fanin_server_resume(NULL, RUN, NULL), FANIN_ERR_ARGUMENT);
    server_put(s, RUN, "a", memory[0], SIZE);
    server_commit(s, 1);
    pause_it(s, NULL);
    assert_int_equal(fanin_server_remove(s, RUN, NULL, NULL), FANIN_OK);
    assert_int_equal(fanin_server_resume(s, RUN, NULL), FANIN_ERR_NOT_FOUND);
    assert_int_equal(fanin_server_pause(s, RUN, NULL, NULL), FANIN_ERR_NOT_FOUND);
    server_put(s, RUN, "a", memory[0], SIZE); /* another one, not paused */
    server_commit(s, 2);
    peer p = peer_open(s);
    assert_int_equal(peer_newest(&p).step, 2);
}

SERVER_TEST(reasons_are_text)
{
    fanin_server *s = start_published(0);
    peer p = peer_open(s);
    assert_int_equal(fanin_server_pause(s, RUN, "\xff", NULL), FANIN_ERR_ARGUMENT);
    assert_int_equal(peer_newest(&p).step, 1);
    char reason[401], cut[256];
    for (size_t i = 0; i < 400; i += 2)
        memcpy(reason + i, "\xc3\xa4", 2);
    reason[400] = '\0';
    memcpy(cut, reason, 254);
    cut[254] = '\0';
    pause_it(s, reason);
    peer_request_wait(&p, RUN, WIRE_RULE_NEWEST, 0, 60000);
    expect_paused(&p, cut);
    pause_it(s, "");
    peer_request_wait(&p, RUN, WIRE_RULE_NEWEST, 0, 60000);
    expect_paused(&p, "trainer memory offloaded");
}

/* ------------------------------------------------------------------ others */

SERVER_TEST(snapshots_stay_readable)
{
    fanin_server *s = server_start_lease(0);
    memset(memory[0], 1, SIZE);
    server_put(s, RUN, "a", memory[0], SIZE);
    server_snapshot(s, 1);
    peer p = open_with(s, FEATURE_PAUSED);
    grant g = peer_newest(&p);
    pause_it(s, NULL);
    memset(memory[0], 0xee, SIZE);
    assert_int_equal(peer_state(&p), WIRE_STATE_STABLE);
    assert_int_equal(fanin_server_begin_update(s, RUN, NULL), FANIN_ERR_STATE);
    server_put(s, RUN, "a", memory[1], SIZE); /* moved */
    assert_int_equal(peer_newest(&p).catalog_version, g.catalog_version);
    assert_int_equal(server_stats(s).publications_paused, 1);
    pause_it(s, "again");
    resume_it(s);
    pause_it(s, "the put has opened no update");
    assert_int_equal(fanin_server_abort_update(s, RUN, NULL), FANIN_OK);
    resume_it(s);
    assert_int_equal(peer_newest(&p).step, 1);
    memset(memory[1], 2, SIZE);
    server_snapshot(s, 2); /* alone, after an abort */
    expect_bytes(s, &p, 2);
}

SERVER_TEST(paused_ones_are_counted)
{
    fanin_server *s = start_published(0);
    char text[16384];
    assert_int_equal(server_stats(s).publications_paused, 0);
    pause_it(s, NULL);
    assert_int_equal(server_stats(s).publications_paused, 1);
    assert_int_equal(fanin_server_prometheus(s, text, sizeof text, NULL), FANIN_OK);
    assert_non_null(strstr(text, "\nfanin_publications_paused 1\n"));
    resume_it(s);
    assert_int_equal(fanin_server_prometheus(s, text, sizeof text, NULL), FANIN_OK);
    assert_non_null(strstr(text, "\nfanin_publications_paused 0\n"));
}

/* Memory that is away is neither registered nor exported; afterwards it is. */
SERVER_TEST(no_keys_while_paused)
{
    if (!gpu_built())
        skip(); /* the only path with keys that needs no UCX */
    fanin_server *s = start_published(0);
    peer p = peer_open_unix(s);
    grant g = peer_newest(&p);
    pause_it(s, NULL);
    peer_request_regions(&p, &g, WIRE_PATH_CUDA_IPC);
    peer_expect_error(&p, FANIN_ERR_STALE);
    resume_it(s);
    region_table *regions = peer_regions(&p, &g, WIRE_PATH_CUDA_IPC);
    assert_true(regions->count > 0);
    region_table_free(&regions);
}

/* ------------------------------------------------------------- catalogs of before */

void __real_commit_tidy_and_leave(fanin_server *s);
void __wrap_commit_tidy_and_leave(fanin_server *s);
void __wrap_ucx_region_destroy(ucx_region **r);

static atomic_bool control_is_away;
static atomic_uint unregistered;

void __wrap_commit_tidy_and_leave(fanin_server *s)
{
    if (!atomic_load(&control_is_away))
        __real_commit_tidy_and_leave(s);
}

void __wrap_ucx_region_destroy(ucx_region **r)
{
    *r = NULL;
    atomic_fetch_add(&unregistered, 1);
}

/* As if a reader had asked for its keys. */
static void register_region(fanin_server *s)
{
    static char key;
    publication *p = publication_look_up(s, RUN);
    assert_int_equal(p->catalog->regions.count, 1);
    p->catalog->regions.regions[0]->registered = (ucx_region *)&key;
}

static void pause_all(fanin_server *s)
{
    pause_it(s, NULL);
}

static void remove_all(fanin_server *s)
{
    assert_int_equal(fanin_server_remove(s, RUN, NULL, NULL), FANIN_OK);
}

static void remove_one(fanin_server *s)
{
    assert_int_equal(fanin_server_remove(s, RUN, "a", NULL), FANIN_OK);
}

static void replace_one(fanin_server *s)
{
    static uint8_t other[SIZE];
    server_put(s, RUN, "a", other, SIZE);
}

/* Whose memory it is again need not wait for the control thread, which may be busy. */
SERVER_TEST(memory_of_catalogs_before_is_given_back_too)
{
    static void (*const give_back[])(fanin_server *) = {pause_all, remove_all,
                                                        remove_one, replace_one};
    for (size_t i = 0; i < sizeof give_back / sizeof *give_back; i++) {
        fanin_server *s = start_published(0);
        register_region(s);
        atomic_store(&unregistered, 0);
        atomic_store(&control_is_away, true);
        server_begin(s);
        server_put(s, RUN, "b", memory[1], SIZE); /* the region grows: it is another */
        server_commit(s, 2);
        give_back[i](s);
        assert_int_equal(atomic_load(&unregistered), 1);
        atomic_store(&control_is_away, false);
        server_stop(&s, 0);
    }
}
