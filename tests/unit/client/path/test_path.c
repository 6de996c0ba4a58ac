/* SPDX-License-Identifier: Apache-2.0 */
/* Which path a rank's regions are read on and why, and when that is decided anew. */
#include "cma/cma.h"
#include "pull/choose_path.h"
#include "stream/stream_link.h"
#include "stub_ranks.h"
#include "testing.h"
#include <fcntl.h>

#define RANKS 2
#define PART 16
#define CALL_MS 1000

/* What a path keeps of regions. */
typedef struct keepsake {
    path_hold hold; /* first: the state hands it back */
    unsigned dropped;
    size_t peer;
} keepsake;

static struct {
    stub_world world;
    publication *run;
    path_goal goal;
    path_round round;
    bool want[RANKS];
    fanin_error error;
} s;

static bool refuses; /* rank 1 gives no regions */

static unsigned hosts_untold; /* so many times what tells the host cannot be opened */

int __real_open64(const char *path, int flags, ...);
int __wrap_open64(const char *path, int flags, ...);
int __wrap_open64(const char *path, int flags, ...)
{
    va_list rest;
    va_start(rest, flags);
    int mode = flags & O_CREAT ? va_arg(rest, int) : 0;
    va_end(rest);
    if (hosts_untold == 0 || !strstr(path, "boot_id"))
        return __real_open64(path, flags, mode);
    hosts_untold--;
    errno = EMFILE;
    return -1;
}

static bool answer(stub_talk *t, const frame *f, body *in)
{
    if (refuses && f->type == MSG_REGIONS && t->rank == &s.world.ranks[1])
        return stub_answer_error(t, f->request, FANIN_ERR_UNSUPPORTED, "not by this");
    return stub_answer(t, f, in);
}

static void sync_tables(void)
{
    announcement now[RANKS];
    for (size_t i = 0; i < RANKS; i++) {
        const stub_rank *r = &s.world.ranks[i];
        now[i] = (announcement){.valid = true, .step = r->step, .version = r->version};
        now[i].keys = digest_of(r->keys.data, r->keys.size);
    }
    assert_ok(tables_sync(s.world.client, s.run, now, s.want, deadline_in_ms(CALL_MS),
                          &s.error),
              s.error);
}

static void begin(fanin_path forced)
{
    fanin_client_config config;
    fanin_client_config_init(&config, sizeof config);
    config.no_ucx = true;
    config.path = forced;
    memset(&s, 0, sizeof s);
    s.error = (fanin_error)FANIN_ERROR_INIT;
    refuses = false;
    hosts_untold = 0;
    stub_world_start_with(&s.world, RANKS, RANKS, PART, &config);
    s.run = tables_of(s.world.client, STUB_RUN);
    assert_non_null(s.run);
    for (size_t i = 0; i < RANKS; i++) {
        s.want[i] = true;
        s.world.ranks[i].answer = answer;
    }
    sync_tables();
    assert_ok(path_states_open(s.world.client, s.run, &s.error), s.error);
    s.round = (path_round){.client = s.world.client,
                           .publication = s.run,
                           .want = s.want,
                           .goal = &s.goal,
                           .at = UINT64_MAX,
                           .fallback = &stream_reader};
}

static int tear_down(void **state)
{
    stub_world_stop(&s.world);
    return 0;
}

#define CASE(name) TEST_WITH(name, NULL, tear_down)

static path_state *state_of(size_t rank)
{
    return path_state_of(s.world.client, s.run, rank);
}

static void on_drop(fanin_client *client, size_t peer, path_hold *hold)
{
    keepsake *k = (keepsake *)hold;
    assert_ptr_equal(client, s.world.client);
    k->dropped++;
    k->peer = peer;
}

/* Rank 1 is read by cma, which keeps something of its regions. */
static void decide_on_cma(keepsake *k)
{
    bool mask[RANKS] = {true, true};
    assert_ok(path_regions(&s.round, mask, &cma_reader, &s.error), s.error);
    path_set(&s.round, 1, &cma_reader, "so it is");
    *k = (keepsake){.hold = {.drop = on_drop}};
    state_of(1)->hold = &k->hold;
    assert_string_equal(state_of(1)->path->name, "cma");
    assert_int_equal(k->dropped, 0);
}

static void assert_undecided(const keepsake *k)
{
    path_state *state = state_of(1);
    assert_null(state->path);
    assert_null(state->hold);
    assert_int_equal(k->dropped, 1);
    assert_int_equal(k->peer, 1);
}

/* ---------------------------------------------------------------- serials */

CASE(a_decision_stays)
{
    keepsake k;
    begin(FANIN_PATH_AUTO);
    assert_null(state_of(1)->path);
    decide_on_cma(&k);
    sync_tables();
    assert_string_equal(state_of(1)->path->name, "cma");
    assert_string_equal(path_taken(s.run, 1)->reason, "so it is");
    assert_int_equal(k.dropped, 0);
    assert_null(state_of(0)->path);
    path_state_drop(s.world.client, state_of(1), 1);
    assert_undecided(&k);
}

CASE(it_ends_with_what_it_was_made_from)
{
    keepsake k;
    begin(FANIN_PATH_AUTO);
    decide_on_cma(&k);
    path_void(s.world.client, 1);
    assert_undecided(&k);
    assert_non_null(state_of(1)->regions); /* of the same tables */
    decide_on_cma(&k);
    s.world.ranks[1].version++;
    sync_tables();
    assert_undecided(&k);
    assert_null(state_of(1)->regions);
    decide_on_cma(&k);
    stub_rank_hang_up(&s.world.ranks[1]);
    stub_world_settle(&s.world);
    stub_world_reconnect(&s.world);
    assert_undecided(&k);
}

CASE(it_ends_with_the_client)
{
    keepsake k;
    begin(FANIN_PATH_AUTO);
    decide_on_cma(&k);
    path_states_free(s.world.client, s.run);
    assert_int_equal(k.dropped, 1);
    assert_null(path_taken(s.run, 1)->path);
}

CASE(what_failed_is_avoided_until_the_next_life)
{
    keepsake k;
    begin(FANIN_PATH_AUTO);
    decide_on_cma(&k);
    path_avoid(s.world.client, 1, "it broke");
    assert_undecided(&k);
    assert_string_equal(path_avoided(s.world.client, 1), "it broke");
    assert_null(path_avoided(s.world.client, 0));
    assert_ok(
        path_prepare(s.world.client, s.run, s.want, &s.goal, UINT64_MAX, &s.error),
        s.error);
    assert_string_equal(state_of(1)->path->name, "stream");
    assert_string_equal(path_taken(s.run, 1)->reason, "it broke");
    stub_rank_hang_up(&s.world.ranks[1]);
    stub_world_settle(&s.world);
    stub_world_reconnect(&s.world);
    assert_null(path_avoided(s.world.client, 1));
    assert_null(state_of(1)->path);
}

/* ---------------------------------------------------------------- choosing */

CASE(who_asks_for_stream_gets_it)
{
    begin(FANIN_PATH_STREAM);
    s.want[0] = false;
    assert_ok(
        path_prepare(s.world.client, s.run, s.want, &s.goal, UINT64_MAX, &s.error),
        s.error);
    assert_null(state_of(0)->path);
    assert_string_equal(state_of(1)->path->name, "stream");
    assert_string_equal(state_of(1)->reason, "asked for");
    assert_int_equal(s.goal.gather.n, 0);
    assert_int_equal(stub_world_asked(&s.world, MSG_REGIONS), 0);
}

/* Ranks of this host that offer nothing else, and one of another host; there is no UCX here. */
CASE(what_no_other_path_takes_is_stream)
{
    begin(FANIN_PATH_AUTO);
    strcpy(s.world.ranks[1].hello.host_id, "elsewhere");
    stub_rank_hang_up(&s.world.ranks[1]);
    stub_world_settle(&s.world);
    stub_world_reconnect(&s.world);
    assert_ok(
        path_prepare(s.world.client, s.run, s.want, &s.goal, UINT64_MAX, &s.error),
        s.error);
    for (size_t i = 0; i < RANKS; i++) {
        assert_string_equal(state_of(i)->path->name, "stream");
        assert_non_null(strstr(state_of(i)->reason, i == 0 ? "offer cma" : "UCX"));
    }
    assert_ptr_equal(path_of_number(FANIN_PATH_STREAM), path_readers[1]);
    assert_null(path_of_number(FANIN_PATH_AUTO));
}

CASE(a_forced_path_that_cannot_be_is_an_error)
{
    static const fanin_path paths[] = {FANIN_PATH_CMA, FANIN_PATH_RDMA};
    static const fanin_status statuses[] = {FANIN_ERR_UNSUPPORTED,
                                            FANIN_ERR_TRANSPORT}; /* this host's lack */
    for (size_t i = 0; i < 2; i++) {
        begin(paths[i]);
        assert_int_equal(
            path_prepare(s.world.client, s.run, s.want, &s.goal, UINT64_MAX, &s.error),
            statuses[i]);
        assert_non_null(strstr(s.error.message, fanin_path_name(paths[i])));
        assert_non_null(strstr(s.error.message, "is not possible"));
        assert_non_null(strstr(s.error.message, i == 0 ? "offer cma" : "UCX"));
        if (i == 0)
            tear_down(NULL);
    }
}

CASE(what_ranks_are_is_told_by_their_hellos)
{
    begin(FANIN_PATH_AUTO);
    fanin_client *client = s.world.client;
    assert_true(path_is_offered(client, 0, &stream_reader));
    assert_false(path_is_offered(client, 0, &cma_reader));
    assert_true(path_is_local(client, 1));
    s.world.ranks[1].hello.paths |= 1u << WIRE_PATH_CMA;
    strcpy(s.world.ranks[1].hello.host_id, "elsewhere");
    stub_rank_hang_up(&s.world.ranks[1]);
    stub_world_settle(&s.world);
    stub_world_reconnect(&s.world);
    assert_true(path_is_offered(client, 1, &cma_reader));
    assert_false(path_is_local(client, 1));
    assert_true(path_is_local(client, 0));
}

/* Another thread of the process has all descriptors, for a moment. */
CASE(a_moment_without_descriptors_changes_nothing)
{
    begin(FANIN_PATH_AUTO);
    for (size_t i = 0; i < RANKS; i++) {
        s.world.ranks[i].hello.paths |= 1u << WIRE_PATH_CUDA_IPC;
        stub_rank_hang_up(&s.world.ranks[i]);
    }
    stub_world_settle(&s.world);
    stub_world_reconnect(&s.world);
    hosts_untold = RANKS;
    assert_ok(
        path_prepare(s.world.client, s.run, s.want, &s.goal, UINT64_MAX, &s.error),
        s.error);
    for (size_t i = 0; i < RANKS; i++) {
        assert_non_null(state_of(i)->regions);
        assert_non_null(strstr(state_of(i)->reason, "offer cma"));
    }
}

/* ---------------------------------------------------------------- giving up */

CASE(a_path_that_is_given_up_is_stream)
{
    begin(FANIN_PATH_AUTO);
    assert_ok(path_give_up(&s.round, 1, "it does not work", &s.error), s.error);
    assert_string_equal(state_of(1)->path->name, "stream");
    assert_string_equal(state_of(1)->reason, "it does not work");
}

CASE(unless_it_is_forced)
{
    begin(FANIN_PATH_RDMA);
    assert_int_equal(path_give_up(&s.round, 1, "it does not work", &s.error),
                     FANIN_ERR_UNSUPPORTED);
    assert_int_equal(s.error.rank, 1);
    assert_non_null(strstr(s.error.message, "path rdma to rank 1 at "));
    assert_non_null(strstr(s.error.message, "is not possible: it does not work"));
    s.round.lacks = true;
    assert_int_equal(path_give_up(&s.round, 1, "there is no fabric", &s.error),
                     FANIN_ERR_TRANSPORT);
    assert_null(state_of(1)->path);
}

/* That a rank has gone says nothing of paths. */
CASE(or_the_rank_has_gone)
{
    begin(FANIN_PATH_AUTO);
    stub_rank_hang_up(&s.world.ranks[1]);
    stub_world_settle(&s.world);
    assert_int_equal(path_give_up(&s.round, 1, "it does not work", &s.error),
                     FANIN_ERR_CLOSED);
    assert_null(strstr(s.error.message, "does not work"));
    assert_null(state_of(1)->path);
}

CASE(a_rank_that_refuses_its_regions_is_given_up)
{
    bool mask[RANKS] = {true, true};
    begin(FANIN_PATH_AUTO);
    refuses = true;
    assert_ok(path_regions(&s.round, mask, &cma_reader, &s.error), s.error);
    assert_true(mask[0] && !mask[1]);
    assert_null(state_of(0)->path);
    assert_non_null(state_of(0)->regions);
    assert_string_equal(state_of(1)->path->name, "stream");
    assert_non_null(strstr(state_of(1)->reason, "not by this"));
    tear_down(NULL);

    mask[1] = true;
    begin(FANIN_PATH_CMA);
    refuses = true;
    assert_int_equal(path_regions(&s.round, mask, &cma_reader, &s.error),
                     FANIN_ERR_UNSUPPORTED);
    assert_non_null(strstr(s.error.message, "not by this"));
}

/* ------------------------------------------------------------------- arenas */

CASE(an_arena_lies_in_the_regions)
{
    keepsake k;
    size_t peer = 1;
    uint32_t first;
    reader_lease leases[RANKS] = {{.held = true}, {.held = true}};
    const path_plan plan = {.peer_of = &peer, .n_sources = 1};
    region_entry arenas[2] = {
        {.base = 4096, .length = PART, .memory = FANIN_MEMORY_HOST, .device = -1},
        {.id = 1,
         .base = 8192,
         .length = PART,
         .memory = FANIN_MEMORY_HOST,
         .device = -1}};
    begin(FANIN_PATH_AUTO);
    const path_reading reading = {.client = s.world.client,
                                  .publication = s.run,
                                  .plan = &plan,
                                  .leases = leases};
    for (uint64_t short_by = 0; short_by < 2; short_by++) {
        buffer *regions = &s.world.ranks[1].regions;
        buffer_clear(regions);
        arenas[1].length = PART - short_by;
        region_table_encode(regions, arenas, 2);
        s.world.ranks[1].version++;
        sync_tables();
        decide_on_cma(&k);
        for (leases[1].first_region = 0; leases[1].first_region < 3;
             leases[1].first_region++) {
            bool good = leases[1].first_region + short_by <= 1;
            fanin_status status = path_arena(&reading, 0, &first, &s.error);
            assert_int_equal(status, good ? FANIN_OK : FANIN_ERR_PROTOCOL);
            assert_int_equal(first, leases[1].first_region);
        }
        assert_non_null(strstr(s.error.message, "an arena outside of its regions"));
        path_state_drop(s.world.client, state_of(1), 1);
    }
}
