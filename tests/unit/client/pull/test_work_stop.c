/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What is computed from a peer's claims looks whether it is still wanted, in steps of bounded size:
 * the more is claimed the more looks, and wherever a look says no the work ends as a deadline that
 * passed. Looks are counted; no clock is asked.
 */
#include "ipc/device_plan.h"
#include "plan_world.h"
#include "stream/stream_link.h"
#include "testing.h"

#define SIDE 128
#define COUNT ((uint64_t)SIDE * SIDE) /* of boxes, of keys, of regions: several looks */

/* One rank holds a tensor in single elements, in no order. */
typedef struct claims {
    world w;
    landing whole;
    buffer blobs[4]; /* boxes; many keys, boxes by rule of these; regions */
    key_table *keys; /* the many */
    plan *plan;
    region_table regions;
    region_entry region;
} claims;

typedef fanin_status (*work_fn)(claims *c, work_stop *stop, fanin_error *error);

typedef struct looks {
    uint64_t asked, until;
} looks;

static bool look(void *cookie)
{
    looks *l = cookie;
    return ++l->asked >= l->until;
}

static fanin_status run(claims *c, work_fn work, uint64_t until, uint64_t *asked,
                        fanin_error *error)
{
    looks l = {.until = until};
    work_stop stop = {.fn = look, .cookie = &l};
    fanin_status status = work(c, &stop, error);
    *asked = l.asked;
    return status;
}

/* ------------------------------------------------------------------ the work */

static fanin_status read_boxes(claims *c, work_stop *stop, fanin_error *error)
{
    box_table *t;
    fanin_status status = box_table_decode(c->blobs[0].data, c->blobs[0].size,
                                           c->w.keys, stop, &t, error);
    box_table_free(&t);
    return status;
}

static fanin_status read_keys(claims *c, work_stop *stop, fanin_error *error)
{
    key_table *t;
    fanin_status status =
        key_table_decode(c->blobs[1].data, c->blobs[1].size, stop, &t, error);
    key_table_free(&t);
    return status;
}

static fanin_status read_chunks(claims *c, work_stop *stop, fanin_error *error)
{
    box_table *t;
    fanin_status status =
        box_table_decode(c->blobs[2].data, c->blobs[2].size, c->keys, stop, &t, error);
    box_table_free(&t);
    return status;
}

static fanin_status read_regions(claims *c, work_stop *stop, fanin_error *error)
{
    region_table *t;
    fanin_status status =
        region_table_decode(c->blobs[3].data, c->blobs[3].size, stop, &t, error);
    region_table_free(&t);
    return status;
}

static fanin_status make_plan(claims *c, work_stop *stop, fanin_error *error)
{
    plan *p;
    plan_rules rules = {.stop = stop};
    fanin_status status = plan_build(c->w.keys, c->w.sources, 1, NULL, 0,
                                     c->whole.to_of_key, &rules, &p, error);
    assert_int_equal(p == NULL, status != FANIN_OK);
    plan_free(&p);
    return status;
}

static fanin_status cut_spans(claims *c, work_stop *stop, fanin_error *error)
{
    const span_rule rule = {.max_length = 4096, .max_gap = 0, .direct_from = 64};
    plan_spans *spans;
    fanin_status status = plan_spans_build(c->plan, c->w.keys, c->w.sources, 0,
                                           &c->regions, &rule, stop, &spans, error);
    assert_int_equal(spans == NULL, status != FANIN_OK);
    plan_spans_free(&spans);
    return status;
}

static fanin_status list_requests(claims *c, work_stop *stop, fanin_error *error)
{
    read_list list = {0};
    fanin_status status = read_list_build(c->plan, 0, c->w.sources[0].boxes, c->w.keys,
                                          stop, &list, error);
    free(list.entries);
    free(list.requests);
    return status;
}

static fanin_status lay_out(uint64_t distance, work_stop *stop, fanin_error *error)
{
    host_pieces host = {.pieces = calloc(COUNT, sizeof *host.pieces), .n = COUNT};
    device_plan *d = calloc(1, sizeof *d);
    copy_list list = {.stop = stop};
    assert_true(host.pieces && d);
    d->wanted.n = 1;
    for (uint64_t i = 0; i < COUNT; i++)
        host.pieces[i] =
            (host_piece){.from = i, .to = (COUNT - i) * distance, .length = 1};
    fanin_status status = device_plan_lay_out_host(d, &host, &list, error);
    copy_list_free(&list);
    device_plan_free(&d);
    free(host.pieces);
    return status;
}

static fanin_status lay_out_stretch(claims *c, work_stop *stop, fanin_error *error)
{
    (void)c;
    return lay_out(1, stop, error);
}

static fanin_status lay_out_scattered(claims *c, work_stop *stop, fanin_error *error)
{
    (void)c;
    return lay_out(3, stop, error);
}

/* --------------------------------------------------------------------- tests */

static void check(claims *c, work_fn work)
{
    fanin_error error = FANIN_ERROR_INIT;
    uint64_t all, asked;
    assert_ok(run(c, work, UINT64_MAX, &all, &error), error);
    assert_true(all >= COUNT / WORK_STEPS);
    for (uint64_t until = 1; until <= all; until += 1 + all / 16) {
        error = (fanin_error)FANIN_ERROR_INIT;
        assert_int_equal(run(c, work, until, &asked, &error), FANIN_ERR_TIMEOUT);
        assert_int_equal(asked, until);
        assert_int_equal(error.status, FANIN_ERR_TIMEOUT);
        assert_non_null(strstr(error.message, "the deadline passed while"));
    }
}

TEST(claims_are_read_until_nobody_waits)
{
    check(*state, read_boxes);
    check(*state, read_keys);
    check(*state, read_chunks);
    check(*state, read_regions);
}

TEST(plans_are_made_until_nobody_waits)
{
    check(*state, make_plan);
    check(*state, cut_spans);
    check(*state, list_requests);
    check(*state, lay_out_stretch);
    check(*state, lay_out_scattered);
}

/* ------------------------------------------------------------------- set-up */

static void hold_elements(claims *c)
{
    world *w = &c->w;
    world_init(w, 1, 1);
    world_key(w, FANIN_DTYPE_U8, 2, (uint64_t[]){SIDE, SIDE});
    for (uint64_t i = 0; i < COUNT; i++) {
        uint64_t at = i * 40503 % COUNT;
        block b = {.n_dims = 2, .offset = {at / SIDE, at % SIDE}, .extent = {1, 1}};
        world_hold(w, 0, 0, &b, 0, 0, LAYOUT_PACKED);
    }
    world_seal(w, NULL);
    box_table_encode(&c->blobs[0], w->keys->entries, 1, w->ranks[0].records,
                     w->ranks[0].n_records, 0, 1);
    landing_whole(&c->whole, w, 0);
    c->region = (region_entry){.length = COUNT};
    c->regions = (region_table){.entries = &c->region, .count = 1};
}

static void claim_keys(claims *c)
{
    static char names[COUNT][16];
    key_entry *entries = calloc(COUNT, sizeof *entries);
    box_record *boxes = calloc(COUNT, sizeof *boxes);
    region_entry *regions = calloc(COUNT, sizeof *regions);
    assert_true(entries && boxes && regions);
    for (uint32_t i = 0; i < COUNT; i++) {
        snprintf(names[i], sizeof names[i], "key-%06u", i);
        entries[i] = (key_entry){
            .name = names[i], .dtype = FANIN_DTYPE_U8, .n_dims = 1, .shape = {8}};
        boxes[i].key = i;
        boxes[i].block = (block){.n_dims = 1, .extent = {8}};
        boxes[i].place = (box_place){.offset = (uint64_t)i * 8, .packed = true};
        regions[i] = (region_entry){.id = i, .length = 1, .device = -1};
        regions[i].memory = FANIN_MEMORY_HOST;
    }
    key_table_encode(&c->blobs[1], entries, COUNT, NULL, 0);
    box_table_encode(&c->blobs[2], entries, COUNT, boxes, COUNT, 0, 1);
    region_table_encode(&c->blobs[3], regions, COUNT);
    free(entries);
    free(boxes);
    free(regions);
}

static int set_up(void **state)
{
    claims *c = calloc(1, sizeof *c);
    assert_non_null(c);
    hold_elements(c);
    claim_keys(c);
    assert_works(world_plan(&c->w, &c->whole, &c->plan, ERROR));
    assert_works(
        key_table_decode(c->blobs[1].data, c->blobs[1].size, NULL, &c->keys, ERROR));
    *state = c;
    return 0;
}

static int tear_down(void **state)
{
    claims *c = *state;
    plan_free(&c->plan);
    key_table_free(&c->keys);
    for (size_t i = 0; i < sizeof c->blobs / sizeof *c->blobs; i++)
        buffer_free(&c->blobs[i]);
    landing_free(&c->whole);
    world_free(&c->w);
    free(c);
    return 0;
}

TESTS_BETWEEN(set_up, tear_down)
