/* SPDX-License-Identifier: Apache-2.0 */
/* What a plan's sources are read by, made by several threads: what one thread makes. */
#include "plan/plan.h"
#include "plan_world.h"
#include "pull/plan_cache.h"
#include "stream/stream_link.h"
#include "testing.h"

#define RANKS 8
#define KEYS 5000 /* that all threads have something to do, and look at the time */

static struct {
    world w;
    landing l;
    fanin_client *client;
    publication publication;
    plan_part part;
    path_goal goal;
    size_t peers[RANKS];
    const path_reader *readers[RANKS];
    bool mask[RANKS];
    fanin_error error;
} s;

static int set_up(void **state)
{
    fanin_client_config config;
    memset(&s, 0, sizeof s);
    s.error = (fanin_error)FANIN_ERROR_INIT;
    fanin_client_config_init(&config, sizeof config);
    config.no_ucx = true;
    assert_ok(fanin_client_create(&config, &s.client, &s.error), s.error);
    world_init(&s.w, RANKS, 7);
    for (uint32_t key = 0; key < KEYS; key++)
        world_key(&s.w, FANIN_DTYPE_U8, 2, (uint64_t[]){RANKS * (1 + key % 3), 3});
    for (uint32_t rank = 0; rank < RANKS; rank++) {
        world_hold_chunks(&s.w, rank, 0, RANKS, rank);
        s.peers[rank] = rank;
        s.mask[rank] = true;
    }
    world_seal(&s.w, NULL);
    landing_whole(&s.l, &s.w, 0);
    s.publication.keys = s.w.keys;
    s.part.plan = (path_plan){.sources = s.w.sources,
                              .peer_of = s.peers,
                              .reader_of = s.readers,
                              .n_sources = RANKS};
    assert_ok(world_plan(&s.w, &s.l, &s.part.plan.plan, &s.error), s.error);
    return 0;
}

static void forget(void)
{
    for (size_t i = 0; i < PATH_READERS; i++) {
        for (size_t j = 0; s.part.details[i] && j < RANKS; j++)
            path_readers[i]->forget(s.part.details[i][j]);
        free(s.part.details[i]);
        s.part.details[i] = NULL;
    }
}

static int tear_down(void **state)
{
    plan_free(&s.part.plan.plan);
    landing_free(&s.l);
    world_free(&s.w);
    fanin_client_destroy(&s.client);
    return 0;
}

TESTS_BETWEEN(set_up, tear_down) /* under valgrind a plan takes seconds */

static int tear_down_case(void **state)
{
    forget();
    return 0;
}

#define CASE(name) TEST_WITH(name, NULL, tear_down_case)

static fanin_status detail(deadline at)
{
    return plan_detail_ahead(&s.part, s.client, &s.publication, &s.goal, &stream_reader,
                             s.mask, at, &s.error);
}

static void *const *details(void)
{
    size_t i = 0;
    while (path_readers[i] != &stream_reader)
        i++;
    return s.part.details[i];
}

static void assert_alike(const read_list *a, const read_list *b)
{
    assert_int_equal(a->n_requests, b->n_requests);
    for (uint64_t i = 0; i < a->n_requests; i++) {
        const read_request *x = &a->requests[i], *y = &b->requests[i];
        assert_int_equal(x->first_piece, y->first_piece);
        assert_int_equal(x->n_pieces, y->n_pieces);
        assert_int_equal(x->n_entries, y->n_entries);
        assert_int_equal(x->bytes, y->bytes);
        assert_int_equal(x->first_entry, y->first_entry);
        const read_entry *e = &a->entries[x->first_entry];
        const read_entry *f = &b->entries[y->first_entry];
        assert_int_equal(e->box, f->box);
        assert_int_equal(e->count, f->count);
        assert_int_equal(e->offset, f->offset);
        assert_int_equal(e->length, f->length);
    }
}

/* ------------------------------------------------------------------- tests */

CASE(threads_make_what_one_makes)
{
    for (int round = 0; round < 2; round++) {
        assert_ok(detail(UINT64_MAX), s.error);
        for (size_t i = 0; i < RANKS; i++) {
            read_list alone;
            assert_ok(read_list_build(s.part.plan.plan, i, s.w.sources[i].boxes,
                                      s.w.keys, NULL, &alone, &s.error),
                      s.error);
            assert_true(alone.n_requests > 0);
            assert_alike(details()[i], &alone);
            free(alone.requests);
            free(alone.entries);
        }
        forget();
    }
}

/* Of those that will not be read by it nothing is made, and what is there stays. */
CASE(only_what_lacks_is_made)
{
    s.mask[3] = false;
    assert_ok(detail(UINT64_MAX), s.error);
    void *first = details()[0];
    assert_non_null(first);
    assert_null(details()[3]);
    s.mask[3] = true;
    assert_ok(detail(UINT64_MAX), s.error);
    assert_ptr_equal(details()[0], first);
    assert_non_null(details()[3]);
}

CASE(it_ends_by_deadline_and_cancel)
{
    assert_int_equal(detail(1), FANIN_ERR_TIMEOUT); /* long ago */
    assert_string_equal(s.error.phase, "plan");
    fanin_client_cancel(s.client);
    assert_int_equal(detail(UINT64_MAX), FANIN_ERR_CANCELLED);
    assert_ok(detail(UINT64_MAX), s.error);
    for (size_t i = 0; i < RANKS; i++)
        assert_non_null(details()[i]);
}
